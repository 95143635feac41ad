"""Greedy against sampled decoding, time between tokens per method: SpecPipe's Figure 15.

    python -m benchmarks.sampled --json benchmarks/results/sampled.json \\
        --plot benchmarks/results/sampled

The draft proposes what it finds probable in either case; a drawn token is more often one that
it did not have. One seed gives one text, whatever the method: the answers at each temperature
are compared with those of `root`, token for token.
"""

from __future__ import annotations

from functools import partial

from benchmarks import comparison, emulated, experiment, plot
from benchmarks.comparison import Case

SEED = 1


def verifier(temperature: float) -> list[str]:
    """The overrides that decode at this temperature; 0 is greedy."""
    if not temperature:
        return ["verify=greedy"]
    return ["verify=sample", f"verify.temperature={temperature:g}", f"verify.seed={SEED}"]


def called(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else "greedy"


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    emulated.add_cluster(parser, pace="rtx3090_8")
    emulated.add_prompts(parser, prompts=4, tokens=24)
    emulated.add_methods(parser)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--rounds", default="auto", help="draft rounds per step (auto)")
    parser.set_defaults(source="demo")
    options = experiment.parse(
        parser, tokens=8, methods=["root", "best_first"], temperatures=[0.0, 1.0]
    )

    machine = emulated.cluster(options)
    cases = [
        Case(
            {"verify": called(temperature), "method": method},
            machine,
            [*emulated.method(method, options), *verifier(temperature)],
            like=f"{called(temperature)}, root",
        )
        for temperature in options.temperatures
        for method in options.methods
    ]
    compared = comparison.decode(options, cases)
    rows = compared.rows()
    title = (
        f"{emulated.tags(options)}: greedy and sampled, {options.stages} stages, width "
        f"{options.width}, {len(compared.prompts)} prompts × {options.tokens} tokens"
    )
    drawn = partial(plot.speed_ups, title, rows, by="verify", size=(7.2, 3.6))
    comparison.publish(options, title, rows, compared, draw=drawn, seed=SEED)


if __name__ == "__main__":
    main()
