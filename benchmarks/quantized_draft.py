"""A draft in fewer bits: how many tokens it costs, and how much time it saves.

    python -m benchmarks.quantized_draft --json benchmarks/results/quantized_draft.json

Tokens per step are counts: eight stages, target in bfloat16, the demo draft in bfloat16, in eight
bits, in NF4 and as an AWQ checkpoint of four bits (to the nearest code, groups of 32), kept so
and made plain. Times are of one round on this machine's CPU, measured: 64 rows, or one, behind 256
tokens of text and their best 16 guesses; of the demo draft, inflated until its matrices fit all
ways, and of one inflated further, which says the same.
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

from benchmarks import emulated, experiment, inflate
from benchmarks.pair import Pair
from pipespec.controller.server import EmbeddedRedis
from pipespec.engine.attention.plan import causal_plan
from pipespec.engine.model import ModelSlice
from pipespec.engine.quantization import KEPT
from tools.rig.packing import KINDS, pack

TEXT, CHILDREN = 256, 16
# Hidden and intermediate size of a draft whose matrices fit every way, and of a larger one.
FITTING, LARGER = (192, 576), (1152, 3456)


@dataclass(frozen=True)
class Way:
    """How a draft is held: of the packed checkpoint or not, the settings, and what it is called."""

    name: str
    packed: bool
    settings: tuple[str, ...] = ()
    held: str | None = None


WAYS = (
    Way("bfloat16", packed=False),
    Way("int8", packed=False, settings=("model.draft_quantization=int8",), held="int8"),
    Way("nf4", packed=False, settings=("model.draft_quantization=nf4",), held="nf4"),
    Way("AWQ, 4 bits kept", packed=True, held=KEPT),
    Way("AWQ, made plain", packed=True, settings=("model.keep_quantized=no",)),
)


def round_ms(path: Path, held: str | None, rows: int, repeats: int) -> tuple[float, float]:
    """Milliseconds of a round, median; MiB of the weights."""
    model = ModelSlice.load(
        path,
        range(inflate.read_config(path)["num_hidden_layers"]),
        dtype=torch.bfloat16,
        quantization=held,
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
    emulated.add_size(parser)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=15)
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--layers", type=int, default=8, help="of the larger draft (8)")
    parser.add_argument("--repeats", type=int, default=30)
    options = experiment.parse(parser, prompts=2, tokens=8, layers=2, repeats=5)

    torch.set_num_threads(1)  # as a rank has it
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
        for way in track(WAYS, "drafts", transient=True):
            which = "packed" if way.packed else "plain"
            ran = Pair(pair.target, drafts[""] / which).decode(
                server,
                prompts,
                options.tokens,
                f"cluster.stages={options.stages}",
                f"source.rounds={options.rounds}",
                "model.dtype=bfloat16",
                *emulated.method("best_first", options),
                *way.settings,
            )
            row: dict[str, str | float] = {
                "draft": way.name,
                "tokens_per_step": ran.tokens_per_step,
            }
            row["hit_rate"] = ran.mean("hit_rate")
            for size, folder in drafts.items():
                path = folder / which
                ms, mib = round_ms(path, way.held, options.width, options.repeats)
                row |= {f"{size}mib": mib, f"{size}round_ms": ms}
                row[f"{size}row_ms"] = round_ms(path, way.held, 1, options.repeats)[0]
            rows.append(row)
    title = (
        f"The demo draft in fewer bits: {len(prompts)} prompts × {options.tokens} tokens, "
        f"{options.stages} stages, width {options.width}, {options.rounds} rounds; times measured "
        f"on one thread, larger: {sizes['larger_'].num_parameters / 1e6:.0f}M parameters"
    )
    experiment.publish(options, title, rows)


if __name__ == "__main__":
    main()
