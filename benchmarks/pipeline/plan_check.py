"""The predictions of `pipespec plan` from a measured profile, beside real runs.

    python -m benchmarks.pipeline.plan_check --json benchmarks/results/plan_check.json

For each number of stages the pair is profiled once (`pipespec bench --profile`: a plain run
and one with the default policy); from that file each policy is predicted for each data set, and
then measured on clusters of its own. Stages and draft rounds are held to stated times, so times are
Emulated: two cores cannot be nine devices. With `--machine none` nothing is held, and ranks share
the cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.progress import track

from benchmarks.common import experiment, run_options
from benchmarks.common.experiment import names, numbers
from pipespec.config.compose import compose
from pipespec.extras.bench.dataset import Sample
from pipespec.extras.bench.measurement import bench
from pipespec.extras.bench.profiling import profile
from pipespec.extras.plan.advice import DecodingMethod, Prediction, predict
from pipespec.extras.plan.pipeline_times import Profile

ALL_TEXTS = 10**6  # more tokens than the texts have


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--stages", type=numbers, default=[2, 4, 8], help="(2,4,8)")
    parser.add_argument("--policies", type=names, default=["root", "level", "best_first"])
    run_options.add_size(parser)
    parser.add_argument("--machine", default="fixed", help="of conf/emulate/ (fixed)")
    parser.add_argument("--stage-ms", default="1:30 64:33", help='("1:30 64:33")')
    parser.add_argument("--draft-ms", default="6", help="of a round (6)")
    run_options.add_prompts(parser, prompts=8, tokens=32, prompt_tokens=64)
    options = experiment.parse(parser, num_prompts=4, tokens=12, stages=[2])

    samples = run_options.samples(options)
    rows, profiles = [], {}
    for stages in options.stages:
        settings = cluster(options, stages)
        found = profile(
            [*settings, *run_options.method("best_first", options)],
            samples,
            prompt_tokens=options.prompt_tokens,
        )
        profiles[stages] = {"stage_ms": found.stage_ms, "hop_ms": found.hop_ms}
        profiles[stages] |= {"draft_ms": found.draft_ms, "measured": found.about["measured"]}
        for policy in track(options.policies, f"decoding, {stages} stages"):
            rows += compare(options, stages, policy, found, settings, samples)
    pace = "Measured" if options.machine == "none" else "times emulated"
    if options.machine == "fixed":
        pace += f" ({options.stage_ms} ms a stage, {options.draft_ms} ms a draft round)"
    title = (
        f"Predicted from a profile and measured, demo pair, {len(samples)} prompts × "
        f"{options.tokens} tokens; {pace}"
    )
    experiment.publish(options, title, rows, profiles=profiles)


def cluster(options: argparse.Namespace, stages: int) -> list[str]:
    """The settings of all runs."""
    settings = [f"cluster.stages={stages}", "cluster.devices=[cpu]", f"emulate={options.machine}"]
    if options.machine == "fixed":
        settings += [
            f"emulate.stage_ms=['{options.stage_ms}']",
            f"emulate.draft_ms='{options.draft_ms}'",
        ]
    return [*settings, *run_options.answer(options.tokens)]


def compare(
    options: argparse.Namespace,
    stages: int,
    policy: str,
    found: Profile,
    settings: Sequence[str],
    samples: Sequence[Sample],
) -> list[dict[str, Any]]:
    """A row for each data set, and one for all."""
    overrides = run_options.method(policy, options)
    config = compose([*settings, *overrides])
    method = DecodingMethod(policy, config.policy, config.proposer.rounds)
    expected = predict(method, found.machine(), found.accuracy(), num_tokens=ALL_TEXTS)
    ran = bench(config, samples, prompt_tokens=options.prompt_tokens)
    measured = {row["benchmark"]: row for row in ran.by_benchmark()}
    rows = []
    for name, row in measured.items():
        mine = [text for text in expected.texts if text.benchmark == name]
        tokens = sum(text.tokens for text in mine)
        predicted_ms = sum(text.tbt_ms * text.tokens for text in mine) / tokens
        steps = sum(text.tokens / text.tokens_per_step for text in mine)
        rows.append(line(stages, policy, name, predicted_ms, tokens / steps, row))
    return [*rows, whole(stages, policy, expected, ran.summary())]


def whole(
    stages: int, policy: str, expected: Prediction, summary: dict[str, Any]
) -> dict[str, Any]:
    """The row of all data sets."""
    return line(stages, policy, "all", expected.tbt_ms, expected.tokens_per_step, summary)


def line(
    stages: int, policy: str, data_set: str, ms: float, tokens: float, measured: dict[str, Any]
) -> dict[str, Any]:
    return {
        "stages": stages,
        "policy": policy,
        "data_set": run_options.short(data_set),
        "predicted_ms": ms,
        "measured_ms": measured["mean_tbt_ms"],
        "ratio": measured["mean_tbt_ms"] / ms,
        "predicted_tokens_per_step": tokens,
        "measured_tokens_per_step": measured["tokens_per_step"],
    }


if __name__ == "__main__":
    main()
