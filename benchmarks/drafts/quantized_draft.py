"""A draft in fewer bits: how many tokens it costs, and how much time it saves.

    python -m benchmarks.drafts.quantized_draft --json benchmarks/results/quantized_draft.json

Tokens per step are counts: eight stages, target in bfloat16, the demo draft in bfloat16, in eight
bits, in NF4 and as an AWQ checkpoint of four bits (to the nearest code, groups of 32), kept packed
and converted to plain weights. Times are of one round on this machine's CPU, measured: 64 rows, or
one, after 256 tokens of text, and their 16 best tokens; of the demo draft, inflated until its
matrices fit all formats, and of one inflated further, which computes the same.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import track

from benchmarks.common import experiment, run_options
from benchmarks.common.demo_pair import Pair
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.engine.attention.attention_plan import causal_plan
from pipespec.engine.checkpoint.formats.packing import PACKED_INT4
from pipespec.engine.model_slice import ModelSlice
from tools import inflate
from tools.rig.packing import KINDS, pack

TEXT, CHILDREN = 256, 16
# Hidden and intermediate size of a draft whose matrices fit every format, and of a larger one.
FITTING, LARGER = (192, 576), (1152, 3456)


@dataclass(frozen=True)
class DraftFormat:
    """A format of the draft's weights: from the packed checkpoint or not, and its settings."""

    name: str
    packed: bool
    settings: tuple[str, ...] = ()
    quantization: str | None = None


FORMATS = (
    DraftFormat("bfloat16", packed=False),
    DraftFormat(
        "int8", packed=False, settings=("model.draft_quantization=int8",), quantization="int8"
    ),
    DraftFormat(
        "nf4", packed=False, settings=("model.draft_quantization=nf4",), quantization="nf4"
    ),
    DraftFormat("AWQ, 4 bits kept", packed=True, quantization=PACKED_INT4),
    DraftFormat("AWQ, plain weights", packed=True, settings=("model.keep_quantized=no",)),
)


def round_ms(path: Path, quantization: str | None, rows: int, repeats: int) -> tuple[float, float]:
    """Milliseconds of a round, median; MiB of the weights."""
    model = ModelSlice.load(
        path,
        range(inflate.read_config(path)["num_hidden_layers"]),
        dtype=torch.bfloat16,
        quantization=quantization,
        num_slots=TEXT + rows,
    )
    slots = np.arange(TEXT + rows)
    plan = causal_plan(slots[:TEXT], slots[TEXT:])
    tokens, positions = torch.arange(rows), torch.from_numpy(plan.positions)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        logits = model.logits(model.forward(tokens, positions, plan)).float()
        logits.log_softmax(-1).topk(CHILDREN)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times), model.num_weight_bytes / 2**20


def main() -> None:
    parser = experiment.parser(__doc__)
    run_options.add_size(parser)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=15)
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--layers", type=int, default=8, help="of the larger draft (8)")
    parser.add_argument("--repeats", type=int, default=30)
    options = experiment.parse(parser, prompts=2, tokens=8, layers=2, repeats=5)

    torch.set_num_threads(1)  # as in a rank
    pair = Pair()
    prompts = pair.prompts(options.prompts, options.prompt_tokens)
    shape = inflate.Shape.of(inflate.read_config(pair.draft))
    (hidden, units), (more, most) = FITTING, LARGER
    sizes = {
        "": shape.grow(hidden, shape.layers, units),
        "larger_": shape.grow(more, options.layers, most),
    }
    rows = []
    with tempfile.TemporaryDirectory() as name, EmbeddedRedis() as server:
        drafts = {}
        for size, shape in sizes.items():
            folder = Path(name) / f"{size}draft"
            inflate.write(pair.draft, folder / "plain", shape, torch.bfloat16)
            pack(folder / "plain", folder / "packed", folder / "dense", KINDS["awq"])
            drafts[size] = folder
        for form in track(FORMATS, "drafts", transient=True):
            which = "packed" if form.packed else "plain"
            decoded = Pair(pair.target, drafts[""] / which).decode(
                server,
                prompts,
                options.tokens,
                f"cluster.stages={options.stages}",
                f"proposer.rounds={options.rounds}",
                "model.dtype=bfloat16",
                *run_options.counted_method("best_first", options),
                *form.settings,
            )
            row: dict[str, str | float] = {
                "draft": form.name,
                "tokens_per_step": decoded.tokens_per_step,
            }
            row["hit_rate"] = decoded.mean("hit_rate")
            for size, folder in drafts.items():
                path = folder / which
                ms, mib = round_ms(path, form.quantization, options.width, options.repeats)
                row |= {f"{size}mib": mib, f"{size}round_ms": ms}
                row[f"{size}row_ms"] = round_ms(path, form.quantization, 1, options.repeats)[0]
            rows.append(row)
    title = (
        f"The demo draft in fewer bits: {len(prompts)} prompts × {options.tokens} tokens, "
        f"{options.stages} stages, width {options.width}, {options.rounds} rounds; times measured "
        f"on one thread, larger: {sizes['larger_'].num_parameters / 1e6:.0f}M parameters"
    )
    experiment.publish(options, title, rows)


if __name__ == "__main__":
    main()
