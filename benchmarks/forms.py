"""What holding answers to a form does to their speed (docs/serving.md).

    python -m benchmarks.forms --json benchmarks/results/forms.json

Tokens per step of the demo pair without a form and under twenty JSON schemas, one request at a
time: what must follow is guessed for certain. Counts of measured runs, whose ranks are threads of
one process; the answers of all policies are compared, token for token.
"""

from __future__ import annotations

import sys

from rich.progress import track

from benchmarks import emulated, experiment
from benchmarks.pair import Pair
from pipespec.controller.server import EmbeddedRedis
from pipespec.core import Sampling
from pipespec.engine import grammar
from tools.rig.schemas import SCHEMAS

FREE = "free text"
POLICIES = ("root", "level", "best_first")
EOS = 0  # of the demo pair


def main() -> None:
    parser = experiment.parser(__doc__)
    emulated.add_size(parser)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=100, help="of an answer at most (100)")
    options = experiment.parse(parser, prompts=1, tokens=40)

    pair = Pair()
    prompts = pair.prompts(options.prompts, options.prompt_tokens)
    cluster = [f"cluster.stages={options.stages}", f"source.rounds={options.rounds}"]
    forms = {FREE: "", **{name: grammar.of_json_schema(each) for name, each in SCHEMAS.items()}}
    rows = []
    differing = 0
    with EmbeddedRedis() as server:
        for name, form in track(forms.items(), "decoding", transient=True):
            row: dict[str, str | float] = {"schema": name}
            answers = None
            for policy in POLICIES:
                ran = pair.decode(
                    server,
                    prompts,
                    options.tokens,
                    *cluster,
                    *emulated.method(policy, options),
                    *(["feed.row_cost=0.0001"] if policy == "best_first" else []),
                    sampling=Sampling(grammar=form),
                    eos=(EOS,) if form else (),
                )
                answers = answers or ran.answers
                row["tokens"] = sum(map(len, ran.answers)) / len(prompts)
                row[policy] = ran.tokens_per_step
                differing += ran.answers != answers
            rows.append(row)
    formed = [row for row in rows if row["schema"] != FREE]
    tokens = [float(row["tokens"]) for row in formed]
    together: dict[str, str | float] = {"schema": "together", "tokens": sum(tokens)}
    for policy in POLICIES:  # the first token of an answer is not counted
        steps = sum((n - 1) / float(row[policy]) for n, row in zip(tokens, formed, strict=True))
        together[policy] = sum(n - 1 for n in tokens) / steps
    title = (
        f"Answers held to a form, demo pair, {len(prompts)} prompts; tokens per step: "
        f"{options.stages} stages, width {options.width}, {options.rounds} rounds"
    )
    rows.append(together)
    experiment.publish(options, title, rows, differing_answers=differing)
    if differing:
        sys.exit(f"The answers of {differing} runs differ.")
    print("All answers are equal, token for token.")


if __name__ == "__main__":
    main()
