"""How often the target's token is among a draft's k best, per data set: SpecPipe's Figure 7.

    python -m benchmarks.curves --json benchmarks/results/curves.json \\
        --plot benchmarks/results/curves

The target answers greedily (one stage, no guesses); then the draft reads the same text and its
rank of every token of the answer is counted. Measured, on any machine the same.
"""

from __future__ import annotations

import argparse

from benchmarks import emulated
from benchmarks.pair import RANKS, Guess, Pair
from benchmarks.report import publish_table
from pipespec.client.bench import bench
from pipespec.config.compose import compose
from pipespec.head.source.synthetic import Accuracy

SHOWN = (1, 2, 4, 8, 16)
ALL = "all"


def curve(guess: Guess) -> list[tuple[int, float]]:
    """(k, share of tokens among the k best), k from 1."""
    return [*Accuracy.parse(guess.curve, guess.spread).curve.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    emulated.add_output(parser)
    emulated.add_prompts(parser, prompts=48, tokens=64, prompt_tokens=128)
    options = parser.parse_args()
    if options.quick:
        options.num_prompts, options.tokens = 8, 32

    overrides = [
        "cluster.stages=1",
        "cluster.devices=[cpu]",
        "feed=root",
        "source=ngram",
        *emulated.answer(options),
    ]
    config = compose(overrides)
    done = bench(config, emulated.samples(options), prompt_tokens=options.prompt_tokens)
    sets = list(dict.fromkeys(request.benchmark for request in done.requests))
    pair = Pair()
    guesses: dict[str, Guess] = {}
    tokens: dict[str, int] = {}
    for name in [*sets, ALL]:
        mine = [request for request in done.requests if name in (request.benchmark, ALL)]
        tokens[name] = sum(len(request.token_ids) for request in mine)
        guesses[name] = pair.accuracy([r.prompt_ids for r in mine], [r.token_ids for r in mine])
    rows = []
    for name, guess in guesses.items():
        found = dict(curve(guess))
        rows.append(
            {"data_set": emulated.short(name), "tokens": tokens[name]}
            | {f"top_{k}": found[k] for k in SHOWN}
            | {"confidence": guess.confidence, "spread": guess.spread}
        )
    title = (
        f"Draft accuracy of the demo pair, {len(done.requests)} prompts × {options.tokens} greedy "
        "tokens"
    )
    publish_table(
        title,
        rows,
        path=options.json,
        curves={name: curve(guess) for name, guess in guesses.items()},
        overrides=overrides,
        settings=emulated.settings(config),
    )
    if options.plot:
        from benchmarks import plot

        with plot.figure(options.plot, title, size=(6.0, 3.8)) as (axes,):
            plot.lines(
                axes,
                {emulated.short(name): curve(guess) for name, guess in guesses.items()},
                colours=dict(zip(map(emulated.short, sets), plot.COLOURS, strict=False)),
                xlabel="k",
                ylabel="target's token among the draft's k best",
                dashed=[ALL],
            )
            axes.set_xticks(range(1, RANKS + 1))
            axes.set_ylim(0, 1)


if __name__ == "__main__":
    main()
