"""A long prompt beside a running answer: how much each slows down the other.

    python -m benchmarks.load.long_prompt --json benchmarks/results/long_prompt.json

EMULATED, on copies of the demo pair with a longer context. First the prompt is prefilled alone.
Then an answer is decoded alone, and the same prompt is submitted while it runs. Steps (the time of
the slowest stage), gaps between the answer's tokens and the prompt's time to first token (TTFT)
are compared; the design states a bound for each of the three ratios.
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

from benchmarks.common import experiment, run_options
from benchmarks.common.checked_requests import shipped_prompts
from benchmarks.common.experiment import Row
from benchmarks.common.rank_traces import Trace
from pipespec.client.answers import write_trace
from pipespec.client.local_cluster import Running, running
from pipespec.client.sync_client import Client
from pipespec.clock import monotonic_ns
from pipespec.cluster.deployment import decide
from pipespec.config.compose import compose
from pipespec.controller.log_records import Accepted, Finished
from pipespec.core import SamplingParams
from pipespec.stats import Report

POSITIONS = 16384
FIRST_TOKENS = 4  # of the answer to the long prompt
ANSWER_TOKENS = 32  # of the prompt of the running answer
STEP, GAP, TTFT = 2.0, 1.5, 1.5  # the bounds


@dataclass(frozen=True)
class Interval:
    """The steps and the gaps between tokens in an interval, emulated milliseconds."""

    steps: np.ndarray
    gaps: np.ndarray

    @classmethod
    def of(cls, trace: Trace, tokens: np.ndarray, begin: float, end: float) -> Interval:
        """`tokens`, `begin` and `end` are times; a gap belongs to the interval in which it ends."""
        longest: dict[int, float] = {}
        for rank in range(1, len(trace.ranks)):
            for step, span in trace.computed(rank).items():
                if begin <= span.start < end:
                    longest[step] = max(longest.get(step, 0.0), span.length)
        inside = (tokens[1:] > begin) & (tokens[1:] <= end)
        # A step in which no stage had rows took no time.
        steps = np.array([length for length in longest.values() if length > 1e-3])
        return cls(steps, np.diff(tokens)[inside])

    def ratio(self, other: Interval) -> float:
        """The 99th percentile of the other's gaps over that of these."""
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


def longer_pair(folder: Path, positions: int) -> list[str]:
    """Overrides for copies of the demo pair with a context of `positions` tokens."""
    for name in ("target", "draft"):
        copy = shutil.copytree(run_options.TARGET.parent / name, folder / name)
        config = json.loads((copy / "config.json").read_text())
        config["max_position_embeddings"] = positions
        (copy / "config.json").write_text(json.dumps(config))
    return [f"model.{name}={folder / name}" for name in ("target", "draft")]


def decode_alone(client: Client, prompt: list[int]) -> tuple[float, list[Report]]:
    """The time to the first token of a prompt alone, in ms, and the reports."""
    submitted_ns = monotonic_ns()
    request = client.submit(prompt, SamplingParams(), max_new_tokens=FIRST_TOKENS)
    for _ in client.events(request):
        pass
    reports = client.reports(request)
    return ttft(reports, submitted_ns), reports


def decode_beside(
    cluster: Running, answer: list[int], prompt: list[int], tokens: int
) -> tuple[list[Report], list[Report], int]:
    """Decode an answer, and submit a prompt after `tokens` of its tokens.

    Returns the reports of both and the time of the submission, in ns. The answer is cancelled when
    the other request has ended.
    """
    client = cluster.client
    second: int | None = None
    submitted_ns = num_tokens = 0
    with client.follow() as followed:
        first = followed.submit(answer, SamplingParams(), max_new_tokens=POSITIONS - len(answer))
        while len(followed):
            for number, event in followed.next():
                if number == first and isinstance(event, Accepted):
                    num_tokens += len(event.tokens)
                elif number == second and isinstance(event, Finished):
                    client.cancel(first)
            if second is None and num_tokens > tokens:
                submitted_ns = monotonic_ns()
                second = followed.submit(prompt, SamplingParams(), max_new_tokens=FIRST_TOKENS)
    assert second is not None, "the answer ended before the prompt was submitted"
    return client.reports(first), client.reports(second), submitted_ns


def ttft(reports: list[Report], submitted_ns: int) -> float:
    """Milliseconds from `submitted_ns` to a request's first token."""
    return float(reports[0]["token_ns"][0] - submitted_ns) / 1e6


def overruns(reports: list[Report]) -> float:
    """Over-runs of stages and draft rounds, per step."""
    head, *stages = reports
    late = head["counts"]["overruns"] + sum(stage["overruns"] for stage in stages)
    return float(late) / head["counts"]["steps"]


def measure(method: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One method: the prompt alone, the answer alone, and both."""
    file = folder / f"{method}.json"
    overrides = [
        *longer_pair(folder / method, POSITIONS),
        *run_options.cluster(options),
        *run_options.method(method, options),
        f"model.context={POSITIONS}",
        f"decode.prefill_chunk={options.chunk}",
        "scheduler.max_num_seqs=2",
        "scheduler.prefix_cache=false",  # the prompt is submitted twice, and prefilled twice
        f"trace={file}",
    ]
    deployment = decide(compose(overrides))
    with running(deployment) as cluster:
        shipped = shipped_prompts(cluster.client, 80, POSITIONS)
        long = np.resize(np.concatenate(shipped), options.prompt_tokens).tolist()
        alone_ms, first = decode_alone(cluster.client, long)
        answer, second, submitted_ns = decode_beside(
            cluster, shipped[0][:ANSWER_TOKENS], long, options.tokens
        )
    write_trace(deployment, answer)
    trace, scale = Trace.read(file, options.scale), options.scale
    tokens = np.array(answer[0]["token_ns"]) / 1e6 / scale
    arrival, end = submitted_ns / 1e6 / scale, second[0]["token_ns"][0] / 1e6 / scale
    quiet = Interval.of(trace, tokens, tokens[0], arrival)
    reading = Interval.of(trace, tokens, arrival, end)
    beside_ms = ttft(second, submitted_ns)
    return {
        "method": method,
        "step_ratio": float(reading.steps.max() / np.median(quiet.steps)),
        "gap_ratio": quiet.ratio(reading),
        "ttft_ratio": beside_ms / alone_ms,
        "ttft_alone_ms": alone_ms / scale,
        "ttft_beside_ms": beside_ms / scale,
        "quiet": quiet.figures(),
        "reading": reading.figures(),
        "overruns_per_step": [overruns(first), overruns(answer)],
        "settings": experiment.overrides(overrides, folder),
    }


def main() -> None:
    parser = experiment.parser(__doc__)
    run_options.add_cluster(parser, machine="rtx3090_8")
    parser.set_defaults(scale=4.0)
    run_options.add_methods(parser, ("root", "best_first"), width=16)
    parser.add_argument("--prompt-tokens", type=int, default=8192, help="of the long one (8192)")
    parser.add_argument("--chunk", type=int, default=128, help="decode.prefill_chunk (128)")
    parser.add_argument(
        "--tokens", type=int, default=60, help="of the answer before the prompt (60)"
    )
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
    options.proposer = "demo"
    title = (
        f"{run_options.tags(options)}: a prompt of {options.prompt_tokens} tokens beside a running "
        f"answer, {options.stages} stages"
    )
    for each in found:
        for kind in ("quiet", "reading"):
            experiment.show(f"{each['method']}, {kind}", [each[kind]])
    experiment.publish(options, title, rows, measured=found)


if __name__ == "__main__":
    main()
