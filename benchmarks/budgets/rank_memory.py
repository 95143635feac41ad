"""Memory of every rank, predicted and measured, and the share of the tree: SpecPipe's Table 1.

    python -m benchmarks.budgets.rank_memory [--stages 8] [--json FILE]

Each rank loads its part of the demo pair, computes a batch of 64 rows, and then reports its
tensors, its unique memory (USS) and its mapped memory (RSS, which counts the shared libraries of
torch in every rank again). Budget beyond weights and KV pool: 300 MiB.

The prediction is arithmetic on the model's shape: a slice's weights, and a KV slot for every
token of the context, every row of the steps in flight and one batch on its way in. The same for
Llama-3.1-70B in bfloat16 is computed, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import psutil
import torch

from benchmarks.common import experiment
from pipespec.cluster.decide import decide
from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.ranks import rank_components
from pipespec.config.compose import compose
from pipespec.core import Batch
from pipespec.engine.precision import ITEM_BYTES
from pipespec.engine.slice.runner import SliceRunner
from pipespec.head.proposer import Context
from pipespec.placement.slices import split_evenly
from tools.inflate import Shape, read_config
from tools.rig.launch import own_rank, results_of

MIB, GIB = 2**20, 2**30
ROWS = 64
# The published config.json of meta-llama/Llama-3.1-70B.
LLAMA_70B = Shape(8192, 80, 28672, 64, 8, 128, 128256, tied=False)
BFLOAT16 = 2


@dataclass(frozen=True)
class Memory:
    """The bytes that one rank needs: weights, and KV by the use of its slots."""

    weights: int
    context: int
    tree: int
    batch: int

    @property
    def kv(self) -> int:
        return self.context + self.tree + self.batch


def predict(
    shape: Shape, layers: range, item: int, *, context: int, tree: int, batch: int
) -> Memory:
    """A slice of a Llama whose numbers take `item` bytes; the slots of each kind are given."""
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    first, last = layers.start == 0, layers.stop == shape.layers
    # A tied head is the embedding, but a rank that lacks the first layer has to hold it too.
    embeddings = first + (last and not (first and shape.tied))
    weights = len(layers) * layer + embeddings * shape.vocab * shape.hidden + last * shape.hidden
    slot = len(layers) * 2 * shape.kv_heads * shape.head_dim
    return Memory(weights * item, *(slots * slot * item for slots in (context, tree, batch)))


def tree_slots(stages: int, width: int) -> int:
    """Rows that a stage may hold besides the text: a batch per rank, and one more."""
    return (stages + 2) * width


def measure(deployment: Deployment) -> dict[str, float]:
    """The entrypoint of every rank: bytes after one batch."""
    rank = own_rank()
    model = rank_components.load_model(deployment, rank)
    assert model is not None
    context = Context(1, [1] * ROWS, list(range(ROWS)))
    hidden = None if rank < 2 else torch.zeros(ROWS, model.hidden_size, dtype=model.dtype)
    SliceRunner(model, model.num_slots).compute(Batch(0, context.rows(0), hidden))
    with torch.inference_mode():
        for layer in model.attention_layers:  # pages count once they are used
            layer.pool.keys.zero_()
            layer.pool.values.zero_()
    memory = psutil.Process().memory_full_info()
    return {
        "rank": rank,
        "weights": model.num_weight_bytes,
        "kv": model.num_kv_bytes,
        "uss": memory.uss,
        "rss": memory.rss,
    }


def row(deployment: Deployment, found: dict[str, float]) -> dict[str, str | float]:
    """A rank's line of the table, in MiB."""
    rank = int(found["rank"])
    info = deployment.target if rank else deployment.draft
    assert info is not None
    policy = deployment.config.policy
    # The draft computes every node that it expands.
    held_nodes = policy.max_held(deployment.num_ranks)
    expected = predict(
        Shape.of(read_config(info.path)),
        deployment.layers[rank - 1] if rank else range(info.num_layers),
        ITEM_BYTES[deployment.dtype],
        context=deployment.context,
        tree=tree_slots(len(deployment.layers), policy.max_rows) if rank else held_nodes,
        batch=deployment.config.max_rows,
    )
    held = found["weights"] + found["kv"]
    return {
        "rank": f"stage {rank}" if rank else "head",
        "weights_predicted": expected.weights / MIB,
        "weights_held": found["weights"] / MIB,
        "kv_predicted": expected.kv / MIB,
        "kv_held": found["kv"] / MIB,
        "kv_of_tree": expected.tree / MIB,
        "kv_of_context": expected.context / MIB,
        "uss_beyond": (found["uss"] - held) / MIB,
        "rss_beyond": (found["rss"] - held) / MIB,
    }


def computed(stages: int, width: int, context: int, chunk: int) -> list[dict[str, str | float]]:
    """Llama-3.1-70B in bfloat16 over `stages` stages, GiB."""
    rows: list[dict[str, str | float]] = []
    for number, layers in enumerate(split_evenly(LLAMA_70B.layers, stages), 1):
        need = predict(
            LLAMA_70B,
            layers,
            BFLOAT16,
            context=context,
            tree=tree_slots(stages, width),
            batch=max(width, chunk),
        )
        rows.append(
            {
                "rank": f"stage {number}",
                "weights": need.weights / GIB,
                "kv_of_context": need.context / GIB,
                "kv_of_tree": need.tree / GIB,
                "kv_of_batch": need.batch / GIB,
                "sum": (need.weights + need.kv) / GIB,
                "tree_share": need.tree / (need.weights + need.kv),
            }
        )
    return rows


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--width", type=int, default=64, help="(64)")
    parser.add_argument("--context", type=int, default=32768, help="of the 70B, tokens (32768)")
    options = experiment.parse(parser)
    stages = 2 if options.quick else options.stages
    overrides = [
        f"cluster.stages={stages}",
        "cluster.devices=[cpu]",
        f"policy.width={options.width}",
        "scheduler.max_num_seqs=1",  # of which the shape is predicted
    ]
    config = compose(overrides)
    deployment = decide(config)
    # A script's own functions cannot be found by the ranks; the module's can.
    from benchmarks.budgets.rank_memory import measure as entrypoint

    found = results_of(entrypoint, (deployment,), deployment.num_ranks)
    rows = [row(deployment, each) for each in found]
    chunk = config.decode.prefill_chunk
    large = computed(options.stages, options.width, options.context, chunk)
    large_title = (
        f"Computed, GiB: Llama-3.1-70B in bfloat16, {options.stages} stages, width "
        f"{options.width}, context {options.context}"
    )
    title = (
        f"Measured, MiB: demo pair, {stages} stages, width {options.width}, "
        f"context {deployment.context}"
    )
    experiment.publish(
        options,
        f"{title} (budget beyond weights and KV pool: 300)",
        rows,
        unit="MiB",
        computed={"title": large_title, "unit": "GiB", "rows": large},
        overrides=overrides,
        settings=experiment.settings(config),
    )
    experiment.show(large_title, large)
    beyond = float(np.median([line["uss_beyond"] for line in rows]))
    print(f"Median of a rank's unique memory beyond weights and KV: {beyond:.0f} MiB.")


if __name__ == "__main__":
    main()
