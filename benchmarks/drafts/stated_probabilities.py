"""Whether proposers' stated probabilities are right, and their tokens per step: replayed texts.

    python -m benchmarks.drafts.stated_probabilities --json FILE
    python -m benchmarks.drafts.stated_probabilities --prompts 8 --tokens 32

The texts are the demo target's answers to the shipped prompts, greedy and sampled, and the
references of the repetitive prompts. Counts, which depend on no machine. By deciles of the stated
probability: the share of accepted draft tokens, of all that were proposed after accepted text;
`worst` is the largest difference in deciles with enough draft tokens. Tokens per step also by data
set.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common import experiment, run_options
from benchmarks.common.demo_pair import Pair, shipped
from benchmarks.drafts.replay import REPETITIVE_PROMPTS, Replay, proposer_of
from pipespec.config.compose import compose
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.core import SamplingParams
from pipespec.engine.checkpoint import tokenizer
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.proposers.calibration import CalibratedProposer, Calibration
from tools.rig import cluster

# The draft rounds of a step of each: a measured number would depend on the machine's speed.
PROPOSERS = {"suffix": 1, "draft_model": 2, "hybrid": 2}
DRAWN = SamplingParams(temperature=1.0, seed=7)

# A decile of fewer draft tokens is not considered.
ENOUGH = 100


class Text(NamedTuple):
    """A prompt of a data set, the text after it, and the sampling of that text."""

    data_set: str
    prompt: list[int]
    answer: list[int]
    sampling: SamplingParams


class RecordedCalibration(Calibration):
    """A calibration that records its stated probabilities and the outcomes."""

    def __init__(self) -> None:
        super().__init__()
        self.corrected: list[np.ndarray] = []
        self.outcomes: list[np.ndarray] = []

    def observe(self, text: int, stated: np.ndarray, depth: int, hit: int | None) -> None:
        corrected = self.correct(text, stated[None], np.array([depth]))[0]
        present = corrected > 0
        self.corrected.append(corrected[present])
        self.outcomes.append((np.arange(len(corrected)) == (-1 if hit is None else hit))[present])
        super().observe(text, stated, depth, hit)


def deciles(stated: np.ndarray, accepted: np.ndarray) -> list[dict[str, float]]:
    """The count, mean stated probability and accepted share of each decile that has any."""
    places = np.minimum((stated * 10).astype(int), 9)
    return [
        {
            "from": place / 10,
            "guesses": int(in_decile.sum()),
            "stated": float(stated[in_decile].mean()),
            "came": float(accepted[in_decile].mean()),
        }
        for place in range(10)
        if (in_decile := places == place).any()
    ]


def texts(pair: Pair, which: str, count: int | None, tokens: int) -> list[Text]:
    if which == "repetitive":
        encode = tokenizer.load(pair.target).encode
        items = [json.loads(line) for line in REPETITIVE_PROMPTS.read_text().splitlines()][
            : count and count * 2
        ]
        return [
            Text(
                item["benchmark"],
                encode(item["prompt"]),
                encode(item["reference"])[: 4 * tokens],
                SamplingParams(),
            )
            for item in items
        ]
    names = [item["benchmark"] for item in shipped(count)]
    prompts = pair.prompts(count, 128)
    if which == "greedy":
        answers = cluster.reference(pair.target, prompts, tokens)
        sampling = SamplingParams()
    else:
        sampling = DRAWN
        with EmbeddedRedis() as server:
            plain = ("cluster.stages=1", "policy=root", "proposer=suffix")
            answers = pair.decode(server, prompts, tokens, *plain, sampling=sampling).answers
    return [Text(*each, sampling) for each in zip(names, prompts, answers, strict=True)]


def replay_all(pair: Pair, proposer: str, replayed: Sequence[Text], stages: int) -> dict[str, Any]:
    """One proposer through all texts."""
    chosen = [f"proposer={proposer}", f"cluster.stages={stages}"]
    deployment = cluster.make_deployment(pair.target, pair.draft, *chosen)
    made = proposer_of(deployment)
    assert isinstance(made, CalibratedProposer)
    made.calibration = observed = RecordedCalibration()
    policy = BestFirst(16, 8, row_cost=0.0001)
    replay = Replay(policy, made, stages=stages, rounds=PROPOSERS[proposer])
    for text in replayed:
        replay.decode(text.prompt, text.answer, text.sampling)
    result = replay.result
    proposed = deciles(np.concatenate(observed.corrected), np.concatenate(observed.outcomes))
    large = [each for each in proposed if each["guesses"] >= ENOUGH]
    counts: dict[str, list[tuple[int, int]]] = {}
    for text, count in zip(replayed, result.by_text, strict=True):
        counts.setdefault(run_options.short(text.data_set), []).append(count)
    return {
        "source": proposer,
        "tokens_per_step": result.tokens_per_step,
        "rows_per_step": result.rows / result.steps,
        "worst": max((abs(each["stated"] - each["came"]) for each in large), default=None),
        "tokens_per_step_by_set": {
            name: sum(tokens for tokens, _ in of_set) / sum(steps for _, steps in of_set)
            for name, of_set in counts.items()
        },
        "proposed": proposed,
    }


def show(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    hidden = ("proposed", "tokens_per_step_by_set")
    return [{k: v for k, v in row.items() if k not in hidden} for row in rows]


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--prompts", type=int, help="how many of the shipped prompts (all)")
    parser.add_argument("--tokens", type=int, default=96, help="decoded after each prompt (96)")
    parser.add_argument("--proposers", default=",".join(PROPOSERS))
    options = experiment.parse(parser, prompts=3, tokens=16)
    torch.set_num_threads(1)
    pair = Pair()
    rows = []
    for which in ("repetitive", "greedy", "drawn"):
        replayed = texts(pair, which, options.prompts, options.tokens)
        for proposer in options.proposers.split(","):
            rows.append({"texts": which, **replay_all(pair, proposer, replayed, options.stages)})
            print(
                show(rows)[-1],
                [f"{d['guesses']}:{d['stated']:.2f}/{d['came']:.2f}" for d in rows[-1]["proposed"]],
                flush=True,
            )
    title = f"Stated and observed acceptance, demo pair, {options.stages} stages"
    settings = [experiment.settings(compose([f"proposer={row['source']}"])) for row in rows]
    if options.json:
        experiment.store(options.json, {"title": title, "rows": rows, "settings": settings})
    experiment.show(title, show(rows))


if __name__ == "__main__":
    main()
