"""The speed of answers that are constrained by a JSON schema (docs/serving.md).

    python -m benchmarks.drafts.json_schemas --json benchmarks/results/forms.json

Tokens per step of the demo pair without a schema and with twenty JSON schemas, one request at a
time: tokens that the schema forces are drafted with certainty. Counts of measured runs, whose ranks
are threads of one process; the answers of all policies are compared, token for token.
"""

from __future__ import annotations

import sys

from rich.progress import track

from benchmarks.common import experiment, run_options
from benchmarks.common.demo_pair import Pair
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.core import SamplingParams
from pipespec.engine.llguidance_backend import grammar_from_json_schema
from tools.rig.schemas import SCHEMAS

FREE = "free text"
POLICIES = ("root", "level", "best_first")
EOS = 0  # of the demo pair


def main() -> None:
    parser = experiment.parser(__doc__)
    run_options.add_size(parser)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=100, help="of an answer at most (100)")
    options = experiment.parse(parser, prompts=1, tokens=40)

    pair = Pair()
    prompts = pair.prompts(options.prompts, options.prompt_tokens)
    cluster = [f"cluster.stages={options.stages}", f"proposer.rounds={options.rounds}"]
    grammars = {
        FREE: "",
        **{name: grammar_from_json_schema(schema) for name, schema in SCHEMAS.items()},
    }
    rows = []
    differing = 0
    with EmbeddedRedis() as server:
        for name, grammar_text in track(grammars.items(), "decoding", transient=True):
            row: dict[str, str | float] = {"schema": name}
            answers = None
            for policy in POLICIES:
                decoded = pair.decode(
                    server,
                    prompts,
                    options.tokens,
                    *cluster,
                    *run_options.counted_method(policy, options),
                    sampling=SamplingParams(grammar=grammar_text),
                    eos=(EOS,) if grammar_text else (),
                )
                answers = answers or decoded.answers
                row["tokens"] = sum(map(len, decoded.answers)) / len(prompts)
                row[policy] = decoded.tokens_per_step
                differing += decoded.answers != answers
            rows.append(row)
    constrained = [row for row in rows if row["schema"] != FREE]
    tokens = [float(row["tokens"]) for row in constrained]
    total: dict[str, str | float] = {"schema": "together", "tokens": sum(tokens)}
    for policy in POLICIES:  # the first token of an answer is not counted
        steps = sum(
            (n - 1) / float(row[policy]) for n, row in zip(tokens, constrained, strict=True)
        )
        total[policy] = sum(n - 1 for n in tokens) / steps
    title = (
        f"Constrained answers, demo pair, {len(prompts)} prompts; tokens per step: "
        f"{options.stages} stages, width {options.width}, {options.rounds} rounds"
    )
    rows.append(total)
    experiment.publish(options, title, rows, differing_answers=differing)
    if differing:
        sys.exit(f"The answers of {differing} runs differ.")
    print("All answers are equal, token for token.")


if __name__ == "__main__":
    main()
