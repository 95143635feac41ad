"""Tokens per step of a plain and of a parallel draft (PARD), at one and more rounds a step.

    python -m benchmarks.drafts.parallel_draft --json benchmarks/results/parallel.json
    python -m benchmarks.drafts.parallel_draft --prompts 4 --tokens 32 --rounds 1

Whole runs of the product on the demo target; the answers are compared, token for token. The
parallel draft also runs with one token per pass, which shows the effect of its training on the
accuracy of single tokens. Counts, which depend on no machine.
"""

from __future__ import annotations

from pathlib import Path

from rich.progress import track

from benchmarks.common import experiment, run_options
from benchmarks.common.demo_pair import Pair
from benchmarks.common.experiment import numbers
from pipespec.config.compose import compose
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.system.folders import resource_dir


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--children", type=int, default=8)
    parser.add_argument("--rounds", type=numbers, default=[1, 3], help="per step (1,3)")
    parser.add_argument("--per-pass", type=numbers, default=[1, 2, 4], help="tokens (1,2,4)")
    parser.add_argument("--parallel", type=Path, default=resource_dir("demo") / "draft_pard")
    parser.add_argument("--prompts", type=int, help="how many of the shipped prompts (all)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="cut prompts to (128)")
    parser.add_argument("--tokens", type=int, default=64, help="decoded after each prompt (64)")
    options = experiment.parse(parser, prompts=4, tokens=16, rounds=[1], per_pass=[1, 4])

    plain, parallel = Pair(), Pair(draft=options.parallel)
    prompts = plain.prompts(options.prompts, options.prompt_tokens)
    variants = [
        (name, pair, tokens, rounds)
        for rounds in options.rounds
        for name, pair, tokens in (
            ("plain", plain, 1),
            *(("parallel", parallel, tokens) for tokens in options.per_pass),
        )
    ]
    overrides = [
        [
            f"cluster.stages={options.stages}",
            *run_options.counted_method("best_first", options),
            f"proposer.rounds={rounds}",
            f"proposer.parallel={tokens}",
        ]
        for _, _, tokens, rounds in variants
    ]
    rows = []
    expected: list[list[int]] | None = None
    with EmbeddedRedis() as server:
        for (name, pair, tokens, rounds), settings in track(
            [*zip(variants, overrides, strict=True)], "decoding"
        ):
            decoded = pair.decode(server, prompts, options.tokens, *settings)
            expected = expected or decoded.answers
            assert decoded.answers == expected, f"{name} changed the text"
            rows.append(
                {
                    "draft": name,
                    "tokens_per_pass": tokens,
                    "rounds": rounds,
                    "tokens_per_step": decoded.tokens_per_step,
                    "hit_rate": decoded.mean("hit_rate"),
                    "rows_per_step": decoded.mean("rows_per_step"),
                    "rounds_per_step": decoded.mean("draft_rounds_per_step"),
                }
            )
    title = (
        f"{options.stages} stages, demo target, {len(prompts)} prompts × {options.tokens} tokens, "
        f"best_first of width {options.width}, equal text in all rows"
    )
    experiment.publish(
        options,
        title,
        rows,
        overrides=overrides,
        settings=[experiment.settings(compose(settings)) for settings in overrides],
    )


if __name__ == "__main__":
    main()
