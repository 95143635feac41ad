"""A cell of a table: a policy, a machine and a draft, simulated until it has so many tokens."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import experiment
from benchmarks.papers import intervals
from benchmarks.papers.intervals import Interval
from pipespec.extras.emulation.synthetic_proposer import USUAL, Accuracy
from pipespec.extras.plan.pipeline_times import Machine
from pipespec.extras.plan.simulation import Rounds, TokenArrival, simulate
from pipespec.head.policies.policy import AUTO, SpeculationPolicy
from pipespec.head.policies.root import Root

TOKENS = 2000
# In the plain pipeline every token takes as long as the others.
PLAIN_TOKENS = 200
# Batches that count; one before them is left out, while the pipeline fills.
BATCHES = 20
# Rows of a batch of many requests.
MAX_ROWS = 64


@dataclass(frozen=True)
class Cell:
    """What is simulated; see `simulate`. `tokens` are those that count, of all requests;
    `in_flight`: batches on their way, 0: as many as stages."""

    policy: SpeculationPolicy
    machine: Machine
    accuracy: Accuracy = USUAL
    rounds: Rounds = AUTO
    tokens: int = TOKENS
    requests: int = 1
    in_flight: int = 0

    @property
    def key(self) -> str:
        return repr(self)

    @property
    def least_tokens(self) -> int:
        """For an interval, without which there is no figure."""
        return BATCHES * 4

    def run(self, share: float = 1.0) -> Run:
        """Simulate `share` of its tokens."""
        plain = isinstance(self.policy, Root)
        tokens = PLAIN_TOKENS * self.requests if plain else int(share * self.tokens)
        size = -(-max(tokens, self.least_tokens) // BATCHES)
        arrivals: list[TokenArrival] = []
        found = simulate(
            self.policy,
            self.machine,
            self.accuracy,
            rounds=self.rounds,
            num_tokens=(BATCHES + 1) * size,
            num_requests=self.requests,
            max_rows=MAX_ROWS if self.requests > 1 else 0,
            in_flight=self.in_flight,
            on_token=arrivals.append,
        )
        return Run.of(
            arrivals[: (BATCHES + 1) * size], size, self.requests, found.rows / found.steps
        )


@dataclass(frozen=True)
class Run:
    """What a cell gave, by batches of tokens in the order of their arrival `[BATCHES]`.

    Attributes:
        requests: how many there were.
        ms: milliseconds per token of all requests.
        hits: the share of tokens that had been scheduled before they were decided.
        delays: steps per token of one request.
        gaps: milliseconds between tokens of one request, of each batch `[tokens]`. Tokens that one
            verdict decides arrive together: 0.
        rows_per_step: of a batch of the target.
    """

    requests: int
    tokens: int
    ms: np.ndarray
    hits: np.ndarray
    delays: np.ndarray
    gaps: tuple[np.ndarray, ...]
    rows_per_step: float

    @classmethod
    def of(
        cls, arrivals: Sequence[TokenArrival], size: int, requests: int, rows_per_step: float
    ) -> Run:
        """From `BATCHES + 1` batches of `size` tokens, the first of which fills the pipeline."""
        times = np.array([each.ms for each in arrivals])
        ends = times[size - 1 :: size]
        counted = arrivals[size:]
        return cls(
            requests,
            len(counted),
            np.diff(ends) / size,
            intervals.batches([each.hit for each in counted], BATCHES).mean(1),
            intervals.batches([each.delay for each in counted], BATCHES).mean(1),
            tuple(_gaps(arrivals, size)),
            rows_per_step,
        )

    def as_json(self) -> dict[str, Any]:
        plain = asdict(self)
        arrays = {name: plain[name].tolist() for name in ("ms", "hits", "delays")}
        return {**plain, **arrays, "gaps": [each.tolist() for each in self.gaps]}

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> Run:
        arrays = {name: np.array(kept[name]) for name in ("ms", "hits", "delays")}
        return cls(**{**kept, **arrays, "gaps": tuple(map(np.array, kept["gaps"]))})

    @property
    def tbt(self) -> Interval:
        """The mean time between tokens of a request, ms."""
        return intervals.mean(self.requests * self.ms)

    @property
    def tokens_per_second(self) -> Interval:
        """Of all requests."""
        return intervals.mean(self.ms).inverse.scaled(1000)

    @property
    def hit_rate(self) -> Interval:
        return intervals.mean(self.hits)

    @property
    def tokens_per_step(self) -> Interval:
        """Of one request: with one stage, the tokens that one call of the target yields."""
        return intervals.mean(self.delays).inverse

    def percentile(self, percent: float) -> Interval:
        """Of the time between tokens of a request, ms."""
        return intervals.percentile(self.gaps, percent)

    def over(self, other: Run) -> Interval:
        """How many times as many tokens per second it decodes as `other`."""
        return intervals.ratio(other.ms, self.ms)


def _gaps(arrivals: Sequence[TokenArrival], size: int) -> Iterator[np.ndarray]:
    """The time from each token's predecessor in its request, by batches without the first."""
    last: dict[int, float] = {}
    batch: list[float] = []
    for number, (request, ms, _, _) in enumerate(arrivals):
        if number >= size and request in last:
            batch.append(ms - last[request])
        last[request] = ms
        if number >= size and (number + 1) % size == 0:
            yield np.array(batch)
            batch = []


class Runs:
    """The runs of cells, by cell, each with `share` of its tokens.

    `resume` is a file that keeps them; those that it holds from the same `version` of the code are
    not run again.
    """

    def __init__(self, share: float = 1.0, resume: Path | None = None, version: str = "") -> None:
        self._share, self._resume, self._version = share, resume, version
        self._found: dict[str, Run] = {}
        if resume is not None and resume.exists():
            for line in resume.read_text().splitlines():
                kept = json.loads(line)
                if (kept["version"], kept["share"]) == (version, share):
                    self._found[kept["cell"]] = Run.from_json(kept["run"])

    def __getitem__(self, cell: Cell) -> Run:
        return self._found[cell.key]

    def add(self, cell: Cell, run: Run) -> None:
        self._found[cell.key] = run
        if self._resume is not None:
            kept = {"version": self._version, "share": self._share, "cell": cell.key}
            with self._resume.open("a") as file:
                file.write(json.dumps({**kept, "run": run.as_json()}) + "\n")

    def simulate(self, cells: Iterable[Cell], jobs: int) -> Iterator[int]:
        """Run the cells in `jobs` processes, each of them once; yields how many are left."""
        left = {cell.key: cell for cell in cells if cell.key not in self._found}
        if jobs == 1:
            for number, cell in enumerate(left.values(), 1):
                self.add(cell, cell.run(self._share))
                yield len(left) - number
            return
        # The long ones first, so that none of them is the last.
        order = sorted(left.values(), key=lambda cell: -_work(cell))
        with ProcessPoolExecutor(jobs) as pool:
            futures = {pool.submit(cell.run, self._share): cell for cell in order}
            for number, future in enumerate(as_completed(futures), 1):
                self.add(futures[future], future.result())
                yield len(left) - number


def _work(cell: Cell) -> float:
    """About how long a cell takes, beside others."""
    return cell.tokens * cell.machine.num_stages * (16 + cell.policy.max_rows)


def num_jobs() -> int:
    return len(os.sched_getaffinity(0))


def code_version() -> str:
    """Of the code that simulates a cell, as git names its contents."""
    names = [f"HEAD:{path}" for path in ("pipespec", "benchmarks/papers/cells.py")]
    found = subprocess.run(
        ["git", "rev-parse", *names], cwd=experiment.ROOT, capture_output=True, text=True
    )
    return found.stdout.strip()
