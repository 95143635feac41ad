"""The same prompts decoded in several configurations: run one after another, compared, published.

A benchmark states its cases, decodes them and publishes their rows. Every case has a cluster of
its own. Answers are compared token for token; if any differ, the benchmark ends with an error.
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

from benchmarks import emulated, experiment
from pipespec.client.bench import bench
from pipespec.client.dataset import Sample
from pipespec.client.figures import BenchResult, RequestResult
from pipespec.config.compose import compose

ALL = "all"
# Of every request, stored beside its times.
STATISTICS = ("hit_rate", "tokens_per_step", "step_ms", "overruns")


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        label: what tells it from the others, as columns of the table: {"method": "root"}.
        machine, method: the overrides that say what is emulated and how it decodes.
        like: the name of the case whose answers it must give; empty: the first one's.
        num_prompts, tokens: if it decodes less than the options say.
    """

    label: Mapping[str, str | int]
    machine: Sequence[str]
    method: Sequence[str]
    like: str = ""
    num_prompts: int | None = None
    tokens: int | None = None

    @property
    def name(self) -> str:
        """The label in words: `8 stages, wan, free`."""
        words = (f"{v} {k}" if isinstance(v, int) else v for k, v in self.label.items())
        return ", ".join(words)


@dataclass(frozen=True)
class Ran:
    """One cluster's work, and the settings that repeat it."""

    result: BenchResult
    given: list[str]
    settings: dict[str, Any]

    @property
    def requests(self) -> list[RequestResult]:
        return self.result.requests

    def differing(self, other: Ran) -> int:
        """How many requests of this run have other tokens than the same ones of `other`, as far
        as both go."""
        theirs = {request.id: request.token_ids for request in other.requests}
        return sum(
            any(a != b for a, b in zip(request.token_ids, theirs[request.id], strict=False))
            for request in self.requests
        )


def run(
    name: str,
    given: Sequence[str],
    prompts: Sequence[Sample],
    *,
    prompt_tokens: int | None = None,
    temporary: Sequence[Path] = (),
) -> Ran:
    """Decode the prompts on a cluster of their own, behind a bar called `name`."""
    config = compose(given)
    with Progress(transient=True) as shown:
        task = shown.add_task(name)
        result = bench(
            config,
            prompts,
            prompt_tokens=prompt_tokens,
            on_done=lambda done, of: shown.update(task, completed=done, total=of),
        )
    stored = experiment.overrides(given, *temporary)
    return Ran(result, stored, experiment.settings(config, *temporary))


def recorded(runs: Mapping[str, Ran]) -> dict[str, dict[str, Any]]:
    """What is stored of the configurations of some runs."""
    return {
        "overrides": {name: ran.given for name, ran in runs.items()},
        "settings": {name: ran.settings for name, ran in runs.items()},
    }


@dataclass(frozen=True)
class Comparison:
    """All cases, each with what came of it."""

    prompts: Sequence[Sample]
    done: Sequence[tuple[Case, Ran]]

    @property
    def runs(self) -> dict[str, Ran]:
        """By the cases' names."""
        return {case.name: ran for case, ran in self.done}

    @property
    def data_sets(self) -> list[str]:
        return list(dict.fromkeys(sample.benchmark for sample in self.prompts))

    def differing(self) -> dict[str, int]:
        """For every case, how many answers are not those of the case that it is compared with."""
        runs, first = self.runs, self.done[0][0].name
        return {case.name: ran.differing(runs[case.like or first]) for case, ran in self.done}

    def rows(self, data_set: str = ALL) -> list[dict[str, Any]]:
        """A row per case, over the requests of one data set or of all.

        The speed-up is over the first case whose label differs in nothing but the method.
        """
        rows = []
        plain: dict[tuple[str | int, ...], float] = {}
        for case, ran in self.done:
            mine = [r for r in ran.requests if data_set in (r.benchmark, ALL)]
            figures = replace(ran.result, requests=mine).summary()
            tbt = figures["mean_tbt_ms"]
            alike = tuple(value for name, value in case.label.items() if name != "method")
            rows.append(
                {
                    **case.label,
                    "tbt_ms": tbt,
                    "speed_up": plain.setdefault(alike, tbt) / tbt,
                    "tokens_per_step": figures["tokens_per_step"],
                    "hit_rate": figures["hit_rate"],
                    "overruns": figures["overruns"],
                    "overruns_per_step": figures["overruns"] / sum(r.stats["steps"] for r in mine),
                }
            )
        return rows

    def requests(self) -> list[dict[str, Any]]:
        """What is stored of every request of every case."""
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
            for case, ran in self.done
            for request in ran.requests
        ]


def tbt_ms(request: RequestResult) -> float:
    """Mean milliseconds between the tokens of a request."""
    return (request.token_ms[-1] - request.token_ms[0]) / (len(request.token_ms) - 1)


def decode(options: argparse.Namespace, cases: Sequence[Case], *temporary: Path) -> Comparison:
    """Run every case with the draft and the prompts of the options.

    `temporary` are folders that the cases name and that end with this run.
    """
    prompts = emulated.samples(options)
    done = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draft = emulated.draft(options, emulated.record(options, folder, prompts))
        for case in cases:
            answer = emulated.answer(case.tokens or options.tokens)
            ran = run(
                case.name,
                [*case.machine, *draft, *case.method, *answer],
                prompts[: case.num_prompts],
                prompt_tokens=options.prompt_tokens,
                temporary=[folder, *temporary],
            )
            done.append((case, ran))
    return Comparison(prompts, done)


def publish(
    options: argparse.Namespace,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    compared: Comparison,
    *,
    draw: Callable[[Path], None],
    **more: Any,
) -> None:
    """Publish the rows with what is stored of every case; end with an error if answers differ."""
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
