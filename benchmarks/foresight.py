"""What a draft gains by knowing the noise that the target draws with (docs/sampling.md).

    python -m benchmarks.foresight --json benchmarks/results/foresight.json

For each way to sample: how often the drawn token is among the demo draft's k best, ranked by its
own probabilities and with the noise, and tokens per step of both over eight stages. Counts of
measured runs, whose ranks are threads of one process; answers are compared, token for token.
"""

from __future__ import annotations

import sys

from rich.progress import track

from benchmarks import emulated, experiment
from benchmarks.pair import Pair
from pipespec.controller.server import EmbeddedRedis
from pipespec.core import Sampling

WAYS = (
    Sampling(1.0, seed=1),
    Sampling(0.7, seed=1),
    Sampling(0.6, top_p=0.9, seed=1),
    Sampling(0.6, top_p=0.9, top_k=80, seed=1),
)
SHOWN = (1, 2, 4, 8, 16)
POLICIES = ("level", "best_first")


def called(sampling: Sampling) -> str:
    words = [f"temperature {sampling.temperature:g}"]
    words += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    words += [f"top-k {sampling.top_k}"] if sampling.top_k else []
    return ", ".join(words)


def main() -> None:
    parser = experiment.parser(__doc__)
    emulated.add_size(parser)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=15)
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=64)
    options = experiment.parse(parser, prompts=2, tokens=16)

    pair = Pair()
    prompts = pair.prompts(options.prompts, options.prompt_tokens)
    cluster = [f"cluster.stages={options.stages}", f"source.rounds={options.rounds}"]
    rows = []
    differing = 0
    with EmbeddedRedis() as server:
        for sampling in track(WAYS, "sampling", transient=True):
            plain = pair.decode(
                server, prompts, options.tokens, "cluster.stages=1", "feed=root", sampling=sampling
            )
            ranks = pair.foreseen(prompts, plain.answers, sampling)
            for ranked in ("plain", "foresight"):
                row: dict[str, str | float] = {"sampling": called(sampling), "ranked": ranked}
                row |= {f"top_{k}": float((ranks[ranked] < k).mean()) for k in SHOWN}
                for policy in POLICIES:
                    ran = pair.decode(
                        server,
                        prompts,
                        options.tokens,
                        *cluster,
                        *emulated.method(policy, options),
                        f"source.foresight={ranked == 'foresight'}",
                        sampling=sampling,
                    )
                    row[policy] = ran.tokens_per_step
                    differing += ran.answers != plain.answers
                rows.append(row)
    title = (
        f"Foresight of the demo draft, {len(prompts)} prompts × {options.tokens} drawn tokens; "
        f"tokens per step: {options.stages} stages, width {options.width}, {options.rounds} rounds"
    )
    experiment.publish(options, title, rows, differing_answers=differing)
    if differing:
        sys.exit(f"The answers of {differing} runs differ.")
    print("All answers are equal, token for token.")


if __name__ == "__main__":
    main()
