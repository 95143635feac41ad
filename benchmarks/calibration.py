"""Whether what sources state comes true, and what each yields: replays of known texts.

    python -m benchmarks.calibration --json benchmarks/results/calibration.json
    python -m benchmarks.calibration --prompts 8 --tokens 32

The texts are what the demo target says after the shipped prompts, greedy and drawn, and the
references of the repetitive prompts. Counts, no times: they depend on no machine. By deciles of the
stated probability: the share of the guesses that came, of all that were proposed below accepted
text, and the same of those that were fed, by their probability to lie on the accepted path; the
worst is of those deciles that have enough guesses. Tokens per step also by data set.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import emulated, experiment
from benchmarks.pair import Pair, shipped
from benchmarks.repetitive import FILE
from benchmarks.replay import Replay
from pipespec.cluster import build
from pipespec.config.compose import compose
from pipespec.controller.server import EmbeddedRedis
from pipespec.core import Sampling
from pipespec.engine import tokenizer
from pipespec.head.feed.best_first import BestFirst
from pipespec.head.source.calibration import Calibrated, Calibration
from tools.rig import cluster

SOURCES = ("suffix", "draft_model", "hybrid")
DRAWN = Sampling(temperature=1.0, seed=7)

# A decile of fewer guesses says little.
ENOUGH = 100


class Text(NamedTuple):
    """A prompt of a data set, what follows it, and how that is decided."""

    data_set: str
    prompt: list[int]
    answer: list[int]
    how: Sampling


class Observed(Calibration):
    """A calibration that keeps what it said and what came."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[np.ndarray] = []
        self.came: list[np.ndarray] = []

    def observe(self, text: int, stated: np.ndarray, depth: int, hit: int | None) -> None:
        said = self.correct(text, stated[None], np.array([depth]))[0]
        there = said > 0
        self.said.append(said[there])
        self.came.append((np.arange(len(said)) == (-1 if hit is None else hit))[there])
        super().observe(text, stated, depth, hit)


def deciles(stated: np.ndarray, came: np.ndarray) -> list[dict[str, float]]:
    """Of each decile of the stated probability that has any: how many, stated and came."""
    places = np.minimum((stated * 10).astype(int), 9)
    return [
        {
            "from": place / 10,
            "guesses": int(mine.sum()),
            "stated": float(stated[mine].mean()),
            "came": float(came[mine].mean()),
        }
        for place in range(10)
        if (mine := places == place).any()
    ]


def texts(pair: Pair, which: str, count: int | None, tokens: int) -> list[Text]:
    if which == "repetitive":
        encode = tokenizer.load(pair.target).encode
        items = [json.loads(line) for line in FILE.read_text().splitlines()][: count and count * 2]
        return [
            Text(
                item["benchmark"],
                encode(item["prompt"]),
                encode(item["reference"])[: 4 * tokens],
                Sampling(),
            )
            for item in items
        ]
    names = [item["benchmark"] for item in shipped(count)]
    prompts = pair.prompts(count, 128)
    if which == "greedy":
        answers = cluster.reference(pair.target, prompts, tokens)
        how = Sampling()
    else:
        how = DRAWN
        with EmbeddedRedis() as server:
            plain = ("cluster.stages=1", "feed=root", "source=suffix")
            answers = pair.decode(server, prompts, tokens, *plain, sampling=how).answers
    return [Text(*each, how) for each in zip(names, prompts, answers, strict=True)]


def measured(pair: Pair, source: str, given: Sequence[Text], stages: int) -> dict[str, Any]:
    """One source through all texts."""
    chosen = [f"source={source}", f"cluster.stages={stages}"]
    deployment = cluster.make_deployment(pair.target, pair.draft, *chosen)
    model = build.load_model(deployment, 0)
    runner = None if model is None else build.SliceRunner(model, model.num_slots)
    made = build.make_source(deployment, runner)
    assert isinstance(made, Calibrated)
    made.calibration = observed = Observed()
    rounds = deployment.config.source.rounds
    assert isinstance(rounds, int)
    policy = BestFirst(16, 8, row_cost=0.0001)
    replay = Replay(policy, made, stages=stages, rounds=rounds)
    for text in given:
        replay.decode(text.prompt, text.answer, text.how)
    result = replay.result
    said, came = np.concatenate(observed.said), np.concatenate(observed.came)
    proposed = deciles(said, came)
    enough = [each for each in proposed if each["guesses"] >= ENOUGH]
    counts: dict[str, list[tuple[int, int]]] = {}
    for text, count in zip(given, result.by_text, strict=True):
        counts.setdefault(emulated.short(text.data_set), []).append(count)
    return {
        "source": source,
        "tokens_per_step": result.tokens_per_step,
        "rows_per_step": result.rows / result.steps,
        "worst": max((abs(each["stated"] - each["came"]) for each in enough), default=None),
        "tokens_per_step_by_set": {
            name: sum(tokens for tokens, _ in mine) / sum(steps for _, steps in mine)
            for name, mine in counts.items()
        },
        "proposed": proposed,
        "fed": deciles(np.array(result.stated), np.array(result.came)),
    }


def show(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    hidden = ("proposed", "fed", "tokens_per_step_by_set")
    return [{k: v for k, v in row.items() if k not in hidden} for row in rows]


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--prompts", type=int, help="how many of the shipped prompts (all)")
    parser.add_argument("--tokens", type=int, default=96, help="decoded after each prompt (96)")
    parser.add_argument("--sources", default=",".join(SOURCES))
    options = experiment.parse(parser, prompts=3, tokens=16)
    torch.set_num_threads(1)
    pair = Pair()
    rows = []
    for which in ("repetitive", "greedy", "drawn"):
        given = texts(pair, which, options.prompts, options.tokens)
        for source in options.sources.split(","):
            rows.append({"texts": which, **measured(pair, source, given, options.stages)})
            print(
                show(rows)[-1],
                [f"{d['guesses']}:{d['stated']:.2f}/{d['came']:.2f}" for d in rows[-1]["proposed"]],
                flush=True,
            )
    title = f"Stated and observed acceptance, demo pair, {options.stages} stages"
    settings = [experiment.settings(compose([f"source={row['source']}"])) for row in rows]
    if options.json:
        experiment.store(options.json, {"title": title, "rows": rows, "settings": settings})
    experiment.show(title, show(rows))


if __name__ == "__main__":
    main()
