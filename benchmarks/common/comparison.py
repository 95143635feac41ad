"""The same prompts decoded in several configurations, one after another, and compared.

A benchmark states its cases, decodes them and publishes their rows. Every case has its own cluster.
Answers are compared token for token; if any differ, the benchmark ends with an error.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.common import experiment, run_options
from pipespec.config.compose import compose
from pipespec.extras.bench.dataset import Sample
from pipespec.extras.bench.figures import BenchResult, RequestResult
from pipespec.extras.bench.measurement import bench

ALL = "all"
# Of every request, stored beside its times.
STATISTICS = ("hit_rate", "tokens_per_step", "step_ms", "overruns")


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        label: its columns of the table, which distinguish it: {"method": "root"}.
        machine, method: the overrides of the emulated machine and of the decoding method.
    """

    label: Mapping[str, str | int]
    machine: Sequence[str]
    method: Sequence[str]

    @property
    def name(self) -> str:
        """The label as text: `8 stages, wan, free`."""
        words = (f"{v} {k}" if isinstance(v, int) else v for k, v in self.label.items())
        return ", ".join(words)


@dataclass(frozen=True)
class CaseRun:
    """The results of one cluster, and its settings."""

    result: BenchResult
    overrides: list[str]
    settings: dict[str, Any]

    @property
    def requests(self) -> list[RequestResult]:
        return self.result.requests

    def differing(self, other: CaseRun) -> int:
        """How many requests have other tokens than the same ones of `other`, up to the shorter
        length."""
        theirs = {request.id: request.token_ids for request in other.requests}
        return sum(
            any(a != b for a, b in zip(request.token_ids, theirs[request.id], strict=False))
            for request in self.requests
        )


def run(
    name: str,
    overrides: Sequence[str],
    prompts: Sequence[Sample],
    *,
    prompt_tokens: int | None = None,
    temporary: Sequence[Path] = (),
) -> CaseRun:
    """Decode the prompts on a new cluster, with a progress bar called `name`."""
    config = compose(overrides)
    with Progress(transient=True) as shown:
        task = shown.add_task(name)
        result = bench(
            config,
            prompts,
            prompt_tokens=prompt_tokens,
            on_done=lambda done, of: shown.update(task, completed=done, total=of),
        )
    stored = experiment.overrides(overrides, *temporary)
    return CaseRun(result, stored, experiment.settings(config, *temporary))


def recorded(runs: Mapping[str, CaseRun]) -> dict[str, dict[str, Any]]:
    """The configurations of some runs, as they are stored."""
    return {
        "overrides": {name: case_run.overrides for name, case_run in runs.items()},
        "settings": {name: case_run.settings for name, case_run in runs.items()},
    }


@dataclass(frozen=True)
class Comparison:
    """All cases with their runs."""

    prompts: Sequence[Sample]
    case_runs: Sequence[tuple[Case, CaseRun]]

    @property
    def runs(self) -> dict[str, CaseRun]:
        """The runs by the names of their cases."""
        return {case.name: case_run for case, case_run in self.case_runs}

    @property
    def data_sets(self) -> list[str]:
        return list(dict.fromkeys(sample.benchmark for sample in self.prompts))

    def differing(self) -> dict[str, int]:
        """For every case, how many answers differ from those of the first."""
        first = self.case_runs[0][1]
        return {case.name: case_run.differing(first) for case, case_run in self.case_runs}

    def rows(self, data_set: str = ALL) -> list[dict[str, Any]]:
        """A row for each case, over the requests of one data set or of all.

        The speed-up is over the first case whose label differs only in the method.
        """
        rows = []
        plain: dict[tuple[str | int, ...], float] = {}
        for case, case_run in self.case_runs:
            requests = [r for r in case_run.requests if data_set in (r.benchmark, ALL)]
            figures = replace(case_run.result, requests=requests).summary()
            tbt = figures["mean_tbt_ms"]
            same_label = tuple(value for name, value in case.label.items() if name != "method")
            rows.append(
                {
                    **case.label,
                    "tbt_ms": tbt,
                    "speed_up": plain.setdefault(same_label, tbt) / tbt,
                    "tokens_per_step": figures["tokens_per_step"],
                    "hit_rate": figures["hit_rate"],
                    "overruns": figures["overruns"],
                    "overruns_per_step": figures["overruns"]
                    / sum(r.stats["steps"] for r in requests),
                }
            )
        return rows

    def requests(self) -> list[dict[str, Any]]:
        """Every request of every case, as it is stored."""
        return [
            {
                **case.label,
                "id": request.id,
                "benchmark": request.benchmark,
                "prompt_tokens": len(request.prompt_ids),
                "tokens": len(request.token_ids),
                "ttft_ms": request.ttft_ms,
                "tbt_ms": tbt_ms(request),
                **{name: request.stats[name] for name in STATISTICS},
            }
            for case, case_run in self.case_runs
            for request in case_run.requests
        ]


def tbt_ms(request: RequestResult) -> float:
    """Mean milliseconds between the tokens of a request."""
    return (request.token_ms[-1] - request.token_ms[0]) / (len(request.token_ms) - 1)


def decode(options: argparse.Namespace, cases: Sequence[Case], *temporary: Path) -> Comparison:
    """Run every case with the draft and the prompts of the options.

    `temporary` are folders that the cases name and that are removed after this run.
    """
    prompts = run_options.samples(options)
    case_runs = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draft = run_options.draft(options, run_options.record(options, folder, prompts))
        for case in cases:
            case_run = run(
                case.name,
                [*case.machine, *draft, *case.method, *run_options.answer(options.tokens)],
                prompts,
                prompt_tokens=options.prompt_tokens,
                temporary=[folder, *temporary],
            )
            case_runs.append((case, case_run))
    return Comparison(prompts, case_runs)


def publish(
    options: argparse.Namespace,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    compared: Comparison,
    *,
    draw: Callable[[Path], None] | None = None,
    **more: Any,
) -> None:
    """Publish the rows and all cases; end with an error if answers differ."""
    differing = compared.differing()
    experiment.publish(
        options,
        title,
        rows,
        draw=draw,
        **more,
        differing_answers=differing,
        requests=compared.requests(),
        **recorded(compared.runs),
    )
    if any(differing.values()):
        sys.exit(f"Answers differ: {differing}.")
    print("The answers of all cases are equal, token for token.")
