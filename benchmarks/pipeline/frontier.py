"""The default policy beside every fixed one, over stages, stage times, drafts and requests.

    python -m benchmarks.pipeline.frontier --requests 1,8 --cells 12 --tokens 400

Simulated with the head's own scheduler. A cell is a number of stages, a curve of stage times by
rows, a draft's accuracy, its speed and a number of requests. In each, the policies of `FIXED`
decode the same texts with the same random numbers; the fastest two of them, the default and `root`
then decode fresh ones, by which they are compared: a ratio above 1 means that the default is
faster. Its 95 % interval is over the seeds.

Cells come in an order that is random, and the same in every run: a smaller number of them is a
sample of all."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from statistics import fmean, stdev
from typing import Any

from benchmarks.common import experiment
from pipespec.extras.emulation.machine import TimeCurve, with_experts
from pipespec.extras.emulation.synthetic_proposer import Accuracy
from pipespec.extras.plan.pipeline_times import Machine
from pipespec.extras.plan.simulation import simulate
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.level import Level
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.head.policies.root import Root
from pipespec.head.policies.static_tree import StaticTree

REQUESTS = (1, 8, 64)
# Rows of a batch, of all requests.
MAX_ROWS = 64
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
FIRST_MS = 10.0  # of a stage for one row
DEFAULT = BestFirst()
FIXED: Mapping[str, SpeculationPolicy] = {
    "root": Root(),
    "static_tree": StaticTree(),
    **{f"level {width}": Level(width) for width in (4, 16, 64)},
    **{f"best_first {width}": BestFirst(width, row_cost=0.0) for width in WIDTHS},
}
# Those that decode fresh texts, and how many of these there are.
FINALISTS, SEEDS, TOKENS = 2, 5, 1000
# Tokens of each request at least, so that the pipeline is full most of the time, and of the texts
# that decide, in whose first steps the default does not know the times of its batches yet.
TOKENS_PER_REQUEST, DECIDING, MOST_TOKENS = 64, 150, 6000
# Of Student's distribution with SEEDS - 1 degrees of freedom, for an interval of 95 %.
STUDENT = 2.776


ONE_ROW = TimeCurve(((1, FIRST_MS),))
CURVES = {
    "flat": TimeCurve(((1, FIRST_MS), (64, 1.085 * FIRST_MS))),
    "8 of 256": with_experts(ONE_ROW, 256, 8, 0.22),
    "4 of 128": with_experts(ONE_ROW, 128, 4, 0.22),
    "2 of 8": with_experts(ONE_ROW, 8, 2, 0.9),
    "CPU": TimeCurve(((1, FIRST_MS), (64, 13.6 * FIRST_MS))),
}
# By how often the first token of a draft is the target's.
DRAFTS = {
    0.6: Accuracy({1: 0.6, 32: 0.97}, 0.8),
    0.74: Accuracy({1: 0.74, 32: 0.99}, 0.8),
    0.85: Accuracy({1: 0.85, 8: 0.99}, 0.8),
}


@dataclass(frozen=True)
class Cell:
    """Where policies are compared. `draft_steps`: a draft round, in times of a stage for a row."""

    stages: int
    curve: str
    draft: float
    draft_steps: float
    requests: int

    @property
    def machine(self) -> Machine:
        return Machine((CURVES[self.curve],) * self.stages, draft_ms=FIRST_MS * self.draft_steps)

    def ms_per_token(self, policy: SpeculationPolicy, seed: int, tokens: int) -> float:
        """The time between tokens of all requests together."""
        found = simulate(
            policy,
            self.machine,
            DRAFTS[self.draft],
            rounds="auto",
            num_tokens=tokens,
            seed=seed,
            num_requests=self.requests,
            max_rows=MAX_ROWS,
        )
        return found.ms / found.tokens


def all_cells(requests: Sequence[int] = REQUESTS) -> list[Cell]:
    """Every cell with these numbers of requests, in the order in which they are run."""
    found = [
        Cell(*values)
        for values in product((1, 2, 4, 8, 14), CURVES, DRAFTS, (0.1, 0.45, 1.2), requests)
    ]
    random.Random(0).shuffle(found)
    return found


def compare(cell: Cell, tokens: int) -> dict[str, Any]:
    """The default beside the fixed policies in a cell."""
    least = max(tokens, TOKENS_PER_REQUEST * cell.requests)
    first = {name: cell.ms_per_token(policy, 0, least) for name, policy in FIXED.items()}
    tokens = max(least, min(DECIDING * cell.requests, MOST_TOKENS))
    names = {*sorted(first, key=first.__getitem__)[:FINALISTS], "root"}
    seeds = range(1, 1 + SEEDS)
    default = [cell.ms_per_token(DEFAULT, seed, tokens) for seed in seeds]
    again = {
        name: [cell.ms_per_token(FIXED[name], seed, tokens) for seed in seeds] for name in names
    }
    best = min(again, key=lambda name: fmean(again[name]))
    return {
        **asdict(cell),
        "default": fmean(default),
        "best": best,
        **_ratios("over_best", again[best], default),
        **_ratios("over_root", again["root"], default),
    }


def _ratios(name: str, other: Sequence[float], default: Sequence[float]) -> dict[str, float]:
    """How many times as fast the default is, and the lower end of the interval."""
    found = [theirs / ours for theirs, ours in zip(other, default, strict=True)]
    low = fmean(found) - STUDENT * stdev(found) / math.sqrt(len(found))
    return {name: fmean(found), f"{name}_low": low}


def main() -> None:
    """Run the cells, show and store."""
    parser = experiment.parser(__doc__)
    parser.add_argument("--cells", type=int, help="how many of them (all)")
    parser.add_argument("--requests", type=experiment.numbers, default=REQUESTS, help="(1,8,64)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each seed, at least")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = experiment.parse(parser, cells=2, tokens=100)
    cells = all_cells(options.requests)[: options.cells]
    with ProcessPoolExecutor(options.jobs) as pool:
        rows = [*pool.map(partial(compare, tokens=options.tokens), cells)]
    rows.sort(key=lambda row: row["over_best"])
    title = f"simulated: the default beside the best fixed policy in {len(rows)} cells"
    experiment.publish(options, title, rows, unit="ms")


if __name__ == "__main__":
    main()
