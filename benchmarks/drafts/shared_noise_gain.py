"""The gain of a draft that knows the target's sampling noise (docs/sampling.md).

    python -m benchmarks.drafts.shared_noise_gain --json benchmarks/results/foresight.json

For several sampling parameters: how often the sampled token is among the demo draft's k best,
ranked by its own probabilities and with the shared noise, and tokens per step of both with eight
stages. Counts of measured runs, whose ranks are threads of one process; answers are compared, token
for token.
"""

from __future__ import annotations

import sys

from rich.progress import track

from benchmarks.common import experiment, run_options
from benchmarks.common.demo_pair import Pair
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.core import SamplingParams

SAMPLINGS = (
    SamplingParams(1.0, seed=1),
    SamplingParams(0.7, seed=1),
    SamplingParams(0.6, top_p=0.9, seed=1),
    SamplingParams(0.6, top_p=0.9, top_k=80, seed=1),
)
SHOWN = (1, 2, 4, 8, 16)
POLICIES = ("level", "best_first")


def describe(sampling: SamplingParams) -> str:
    words = [f"temperature {sampling.temperature:g}"]
    words += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    words += [f"top-k {sampling.top_k}"] if sampling.top_k else []
    return ", ".join(words)


def main() -> None:
    parser = experiment.parser(__doc__)
    run_options.add_size(parser)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=15)
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=64)
    options = experiment.parse(parser, prompts=2, tokens=16)

    pair = Pair()
    prompts = pair.prompts(options.prompts, options.prompt_tokens)
    cluster = [f"cluster.stages={options.stages}", f"proposer.rounds={options.rounds}"]
    rows = []
    differing = 0
    with EmbeddedRedis() as server:
        for sampling in track(SAMPLINGS, "sampling", transient=True):
            plain = pair.decode(
                server,
                prompts,
                options.tokens,
                "cluster.stages=1",
                "policy=root",
                sampling=sampling,
            )
            ranks = pair.draft_ranks(prompts, plain.answers, sampling)
            for ranked in ("plain", "foresight"):
                row: dict[str, str | float] = {"sampling": describe(sampling), "ranked": ranked}
                row |= {f"top_{k}": float((ranks[ranked] < k).mean()) for k in SHOWN}
                for policy in POLICIES:
                    decoded = pair.decode(
                        server,
                        prompts,
                        options.tokens,
                        *cluster,
                        *run_options.counted_method(policy, options),
                        f"proposer.foresight={ranked == 'foresight'}",
                        sampling=sampling,
                    )
                    row[policy] = decoded.tokens_per_step
                    differing += decoded.answers != plain.answers
                rows.append(row)
    title = (
        f"Shared noise, demo draft, {len(prompts)} prompts × {options.tokens} sampled tokens; "
        f"tokens per step: {options.stages} stages, width {options.width}, {options.rounds} rounds"
    )
    experiment.publish(options, title, rows, differing_answers=differing)
    if differing:
        sys.exit(f"The answers of {differing} runs differ.")
    print("All answers are equal, token for token.")


if __name__ == "__main__":
    main()
