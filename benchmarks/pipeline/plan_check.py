"""The predictions of `pipespec plan` beside real runs.

    python -m benchmarks.pipeline.plan_check --json benchmarks/results/plan_check.json
    python -m benchmarks.pipeline.plan_check --prompts 2 --tokens 48 --widths 16 --rounds 1,2

Two drafts: the synthetic one of a stated accuracy curve (the same draft in prediction and run, so a
difference is due to the simulation), and the demo pair's own, whose curve is measured first (a
difference is also due to what a curve leaves out). Stages and draft are held to stated times, so
the times are EMULATED; the hop is measured in the run of `root` and used to predict the others.
Ranks are threads of one process, which on few cores lengthens wide steps.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from rich.progress import track

from benchmarks.common import experiment, run_options
from benchmarks.common.demo_pair import Measured, Pair
from benchmarks.common.experiment import numbers
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.instruments.emulation.machine import TimeCurve
from pipespec.instruments.emulation.synthetic_proposer import Accuracy
from pipespec.instruments.plan.advice import DecodingMethod, choices, predict
from pipespec.instruments.plan.pipeline_times import Machine

# Tokens recorded beyond those decoded, so that the synthetic draft has enough of the answer.
BEYOND = 64
POLICIES = ("static_tree", "level", "best_first")


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--widths", type=numbers, default=[16, 64])
    parser.add_argument("--rounds", type=numbers, default=[1, 2, 3])
    parser.add_argument("--curve", default="1:0.81,8:0.99")
    parser.add_argument("--spread", type=float, default=0.8)
    parser.add_argument("--stage-ms", type=float, default=60.0, help="pace of a stage (60)")
    parser.add_argument("--draft-ms", type=float, default=10.0, help="pace of a round (10)")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument(
        "--profile", type=Path, help="write the measured profile for `pipespec plan`"
    )
    options = experiment.parse(parser, prompts=2, tokens=24, widths=[16], rounds=[1])

    pair = Pair()
    prompts = pair.prompts(options.prompts, options.prompt_tokens)
    cluster = [f"cluster.stages={options.stages}"]
    pace = [
        "emulate=fixed",
        f"emulate.stage_ms={options.stage_ms}",
        f"emulate.draft_ms={options.draft_ms}",
    ]
    synthetic = Accuracy.parse(options.curve.split(","), options.spread)
    with EmbeddedRedis() as server, tempfile.TemporaryDirectory() as folder:
        answers = pair.decode(
            server, prompts, options.tokens + BEYOND, "cluster.stages=1", "policy=root"
        ).answers
        measured = pair.accuracy(prompts, answers)
        own = Accuracy.parse(measured.curve, measured.spread)
        truth = Path(folder) / "truth.jsonl"
        texts = [p + a for p, a in zip(prompts, answers, strict=True)]
        truth.write_text("".join(json.dumps(text) + "\n" for text in texts))
        of_synthetic = run_options.synthetic(truth, options.curve, options.spread)

        root = pair.decode(server, prompts, options.tokens, "policy=root", *cluster, *pace)
        hop_ms = max(root.tbt_ms / options.stages - options.stage_ms, 0.0)
        stage = TimeCurve(((1, options.stage_ms),))
        hop = TimeCurve(((1, hop_ms),))
        machine = Machine((stage,) * options.stages, hop, options.draft_ms)
        methods = list(choices(POLICIES, options.widths, [8], options.rounds))
        rows = []
        for draft, accuracy, settings in (
            ("SYNTHETIC", synthetic, of_synthetic),
            ("demo pair", own, ["proposer=draft_model"]),
        ):
            for method in track(methods, f"decoding, {draft}"):
                decoded = pair.decode(
                    server, prompts, options.tokens, *cluster, *pace, *settings, *method.settings
                )
                same = [answer[: options.tokens] for answer in answers]
                assert decoded.answers == same, f"{method.name} changed the text"
                rows.append(compare(draft, method, decoded, machine, accuracy))
    profile = {
        "stages": options.stages,
        "stage_ms": [f"1:{options.stage_ms}"],
        "hop_ms": hop_ms,
        "draft_ms": options.draft_ms,
        "curve": measured.curve,
        "spread": measured.spread,
    }
    title = (
        f"Predicted and measured, {options.stages} stages, {len(prompts)} prompts × "
        f"{options.tokens} tokens; times EMULATED ({options.stage_ms:g} ms a stage, "
        f"{options.draft_ms:g} ms a draft round, hop {hop_ms:.1f} ms measured)"
    )
    experiment.publish(
        options,
        title,
        rows,
        synthetic={"curve": options.curve, "spread": options.spread},
        demo_pair=profile | {"confidence": measured.confidence},
    )
    if options.profile is not None:
        options.profile.write_text(json.dumps(profile, indent=2) + "\n")


def compare(
    draft: str, method: DecodingMethod, decoded: Measured, machine: Machine, accuracy: Accuracy
) -> dict[str, str | int | float]:
    """One row of the table."""
    expected = predict(method, machine, accuracy, num_tokens=2000)
    return {
        "draft": draft,
        "policy": method.name,
        "width": method.policy.max_rows,
        "rounds": str(method.rounds),
        "predicted_tokens_per_step": expected.tokens_per_step,
        "measured_tokens_per_step": decoded.tokens_per_step,
        "tokens_ratio": decoded.tokens_per_step / expected.tokens_per_step,
        "predicted_tbt_ms": expected.tbt_ms,
        "measured_tbt_ms": decoded.tbt_ms,
        "tbt_ratio": decoded.tbt_ms / expected.tbt_ms,
        "predicted_hits": expected.hit_rate,
        "measured_hits": decoded.mean("hit_rate"),
    }


if __name__ == "__main__":
    main()
