"""A long prompt beside a running answer: what it costs the answer, and what the answer costs it.

    python -m benchmarks.long_prompt --json benchmarks/results/long_prompt.json

EMULATED, on copies of the demo pair with a longer context. Once the prompt is read alone. Then an
answer runs by itself, and the same prompt comes beside it. Compared are the steps (the time of the
slowest stage), the gaps between the answer's tokens and the prompt's time to first token (TTFT);
the three ratios are those that the design bounds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import emulated, experiment
from benchmarks.asked import prompts
from benchmarks.experiment import Row
from benchmarks.traces import Trace
from pipespec.client.answers import write_trace
from pipespec.client.client import Client
from pipespec.client.own import Running, running
from pipespec.clock import monotonic_ns
from pipespec.cluster.deployment import decide
from pipespec.config.compose import compose
from pipespec.controller.records import Accepted, Finished
from pipespec.core import Sampling
from pipespec.stats import Report

POSITIONS = 16384
FIRST_TOKENS = 4  # of the answer to the long prompt
ANSWER_TOKENS = 32  # of the prompt of the answer that runs
STEP, GAP, TTFT = 2.0, 1.5, 1.5  # the bounds


@dataclass(frozen=True)
class Span:
    """What happened between two moments: steps and gaps between tokens, emulated milliseconds."""

    steps: np.ndarray
    gaps: np.ndarray

    @classmethod
    def of(cls, trace: Trace, tokens: np.ndarray, begin: float, end: float) -> Span:
        """`tokens` are moments, as `begin` and `end` are; a gap is where it ends."""
        longest: dict[int, float] = {}
        for rank in range(1, len(trace.ranks)):
            for step, span in trace.computed(rank).items():
                if begin <= span.start < end:
                    longest[step] = max(longest.get(step, 0.0), span.length)
        inside = (tokens[1:] > begin) & (tokens[1:] <= end)
        # A step in which no stage had rows took no time.
        steps = np.array([length for length in longest.values() if length > 1e-3])
        return cls(steps, np.diff(tokens)[inside])

    def ratio(self, other: Span) -> float:
        """How much longer the 99th percentile of the other's gaps is."""
        return float(np.percentile(other.gaps, 99) / np.percentile(self.gaps, 99))

    def figures(self) -> dict[str, float]:
        return {
            "steps": len(self.steps),
            "median_step_ms": float(np.median(self.steps)),
            "longest_step_ms": float(self.steps.max()),
            "tokens": len(self.gaps),
            "p50_gap_ms": float(np.percentile(self.gaps, 50)),
            "p99_gap_ms": float(np.percentile(self.gaps, 99)),
            "longest_gap_ms": float(self.gaps.max()),
        }


def pair(folder: Path, positions: int) -> list[str]:
    """The overrides that name copies of the demo pair with a context of so many tokens."""
    for name in ("target", "draft"):
        copy = shutil.copytree(emulated.TARGET.parent / name, folder / name)
        config = json.loads((copy / "config.json").read_text())
        config["max_position_embeddings"] = positions
        (copy / "config.json").write_text(json.dumps(config))
    return [f"model.{name}={folder / name}" for name in ("target", "draft")]


def alone(client: Client, prompt: list[int]) -> tuple[float, list[Report]]:
    """The time to the first token of a prompt with nothing beside it, in ms, and the reports."""
    came = monotonic_ns()
    request = client.submit(prompt, Sampling(), max_new_tokens=FIRST_TOKENS)
    for _ in client.events(request):
        pass
    reports = client.reports(request)
    return ttft(reports, came), reports


def beside(
    cluster: Running, answer: list[int], prompt: list[int], tokens: int
) -> tuple[list[Report], list[Report], int]:
    """An answer runs, and after so many tokens a prompt comes; the reports on both, and when it
    came, in ns. The answer is cancelled when the other has ended."""
    client = cluster.client
    first = client.submit(answer, Sampling(), max_new_tokens=POSITIONS - len(answer))
    second: int | None = None
    came = told = 0
    with client.follow() as followed:
        followed.add(first)
        while len(followed):
            for number, event in followed.next():
                if number == first and isinstance(event, Accepted):
                    told += len(event.tokens)
                elif number == second and isinstance(event, Finished):
                    with cluster.cluster.open_log() as log:
                        log.cancel(first)
            if second is None and told > tokens:
                came = monotonic_ns()
                second = client.submit(prompt, Sampling(), max_new_tokens=FIRST_TOKENS)
                followed.add(second)
    assert second is not None, "the answer ended before the prompt came"
    return client.reports(first), client.reports(second), came


def ttft(reports: list[Report], came: int) -> float:
    """Milliseconds from the moment `came`, in ns, to a request's first token."""
    return float(reports[0]["token_ns"][0] - came) / 1e6


def overruns(reports: list[Report]) -> float:
    """Steps of stages and draft rounds that took longer than they should, per step."""
    head, *stages = reports
    late = head["counts"]["overruns"] + sum(stage["overruns"] for stage in stages)
    return float(late) / head["counts"]["steps"]


def measure(method: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One method: the prompt alone, the answer alone, both."""
    file = folder / f"{method}.json"
    overrides = [
        *pair(folder / method, POSITIONS),
        *emulated.cluster(options),
        *emulated.method(method, options),
        f"model.context={POSITIONS}",
        f"decode.prefill_chunk={options.chunk}",
        "scheduler.max_num_seqs=2",
        "scheduler.prefix_cache=false",  # the prompt comes twice, and is read twice
        f"trace={file}",
    ]
    deployment = decide(compose(overrides))
    with running(deployment) as cluster:
        shipped = prompts(cluster.client, 80, POSITIONS)
        long = np.resize(np.concatenate(shipped), options.prompt_tokens).tolist()
        by_itself, first = alone(cluster.client, long)
        answer, second, came = beside(cluster, shipped[0][:ANSWER_TOKENS], long, options.tokens)
    write_trace(deployment, answer)
    trace, scale = Trace.read(file, options.scale), options.scale
    tokens = np.array(answer[0]["token_ns"]) / 1e6 / scale
    arrival, end = came / 1e6 / scale, second[0]["token_ns"][0] / 1e6 / scale
    quiet = Span.of(trace, tokens, tokens[0], arrival)
    reading = Span.of(trace, tokens, arrival, end)
    with_it = ttft(second, came)
    return {
        "method": method,
        "step_ratio": float(reading.steps.max() / np.median(quiet.steps)),
        "gap_ratio": quiet.ratio(reading),
        "ttft_ratio": with_it / by_itself,
        "ttft_alone_ms": by_itself / scale,
        "ttft_beside_ms": with_it / scale,
        "quiet": quiet.figures(),
        "reading": reading.figures(),
        "overruns_per_step": [overruns(first), overruns(answer)],
        "settings": experiment.overrides(overrides, folder),
    }


def main() -> None:
    parser = experiment.parser(__doc__)
    emulated.add_cluster(parser, pace="rtx3090_8")
    parser.set_defaults(scale=4.0)
    emulated.add_methods(parser, ("root", "best_first"), width=16)
    parser.add_argument("--prompt-tokens", type=int, default=8192, help="of the long one (8192)")
    parser.add_argument("--chunk", type=int, default=128, help="decode.prefill_chunk (128)")
    parser.add_argument("--tokens", type=int, default=60, help="of the answer before it comes (60)")
    options = experiment.parse(
        parser, stages=2, scale=1.0, prompt_tokens=1024, tokens=16, methods=["root"]
    )
    with tempfile.TemporaryDirectory() as name:
        found = [measure(method, options, Path(name)) for method in options.methods]
    bounds = {"step_ratio": STEP, "gap_ratio": GAP, "ttft_ratio": TTFT}
    rows = [
        vars(Row(f"{each['method']}: {name}", each[name], bound))
        for each in found
        for name, bound in bounds.items()
    ]
    rows += [
        vars(Row(f"{each['method']}: overruns per step", each["overruns_per_step"][1]))
        for each in found
    ]
    options.source = "demo"
    title = (
        f"{emulated.tags(options)}: a prompt of {options.prompt_tokens} tokens beside a running "
        f"answer, {options.stages} stages"
    )
    for each in found:
        for kind in ("quiet", "reading"):
            experiment.show(f"{each['method']}, {kind}", [each[kind]])
    experiment.publish(options, title, rows, measured=found)


if __name__ == "__main__":
    main()
