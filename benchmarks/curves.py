"""How often the target's token is among a draft's k best, per data set: SpecPipe's Figure 7.

    python -m benchmarks.curves --json benchmarks/results/curves.json \\
        --plot benchmarks/results/curves

The target answers greedily (one stage, no guesses); then the draft reads the same text and its
rank of every token of the answer is counted. Measured, on any machine the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from benchmarks import comparison, emulated, experiment, plot
from benchmarks.comparison import ALL
from benchmarks.pair import RANKS, Guess, Pair
from pipespec.head.source.synthetic import Accuracy

SHOWN = (1, 2, 4, 8, 16)


def curve(guess: Guess) -> list[tuple[int, float]]:
    """(k, share of tokens among the k best), k from 1."""
    return [*Accuracy.parse(guess.curve, guess.spread).curve.items()]


def draw(title: str, curves: Mapping[str, list[tuple[int, float]]], path: Path) -> None:
    series = {emulated.short(name): points for name, points in curves.items()}
    sets = [name for name in series if name != ALL]
    with plot.figure(path, title, size=(6.0, 3.8)) as (axes,):
        plot.lines(
            axes,
            series,
            colours=dict(zip(sets, plot.COLOURS, strict=False)),
            xlabel="k",
            ylabel="target's token among the draft's k best",
            dashed=[ALL],
        )
        axes.set_xticks(range(1, RANKS + 1))
        axes.set_ylim(0, 1)


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    emulated.add_prompts(parser, prompts=48, tokens=64, prompt_tokens=128)
    options = experiment.parse(parser, num_prompts=8, tokens=32)

    plain = ["cluster.stages=1", "cluster.devices=[cpu]", "feed=root", "source=suffix"]
    ran = comparison.run(
        "the target's answers",
        [*plain, *emulated.answer(options.tokens)],
        emulated.samples(options),
        prompt_tokens=options.prompt_tokens,
    )
    sets = list(dict.fromkeys(request.benchmark for request in ran.requests))
    pair = Pair()
    guesses: dict[str, Guess] = {}
    tokens: dict[str, int] = {}
    for name in [*sets, ALL]:
        mine = [request for request in ran.requests if name in (request.benchmark, ALL)]
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
        f"Draft accuracy of the demo pair, {len(ran.requests)} prompts × {options.tokens} greedy "
        "tokens"
    )
    curves = {name: curve(guess) for name, guess in guesses.items()}
    experiment.publish(
        options,
        title,
        rows,
        draw=partial(draw, title, curves),
        curves=curves,
        overrides=ran.given,
        settings=ran.settings,
    )


if __name__ == "__main__":
    main()
