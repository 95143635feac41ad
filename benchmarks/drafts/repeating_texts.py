"""Texts that repeat earlier text: the suffix automaton beside n-grams, in tokens per step.

    python -m benchmarks.drafts.repeating_texts --json benchmarks/results/repeating.json

The references of the 40 prompts of `benchmarks/data/repetitive`, replayed by
`benchmarks.drafts.replay`: edited code, quoted passages, continued tables, corrected paragraphs.
Tokens per step are counts; what a step's draft rounds take is measured, on one thread. N-grams
propose one level per round and have four rounds; the suffix automaton proposes whole paths in one
round.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any

from benchmarks.common import experiment
from benchmarks.common.run_options import TARGET
from benchmarks.drafts.ngram import NGramProposer
from benchmarks.drafts.replay import REPETITIVE_PROMPTS, Replay, Replayed
from pipespec.engine.checkpoint import tokenizer
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.proposers.proposer import Proposer
from pipespec.head.proposers.suffix import SuffixConfig

ALL = "all"
# Draft rounds per step.
ROUNDS = {"ngram": 4, "suffix": 1}


def make_proposer(name: str) -> Proposer:
    """A proposer with its default settings; it does not learn from earlier texts."""
    if name == "ngram":
        return NGramProposer()
    return SuffixConfig(past=0).make(None, 0, lambda text: [])


@dataclass(frozen=True)
class Text:
    """One text replayed with one proposer: the counts, and the time of all draft rounds."""

    result: Replayed
    draft_ms: float

    @classmethod
    def of(cls, name: str, text: tuple[list[int], list[int]], stages: int, width: int) -> Text:
        spent = 0

        def timed(expand: Callable[[], list]) -> list:
            nonlocal spent
            start = time.perf_counter_ns()
            found = expand()
            spent += time.perf_counter_ns() - start
            return found

        policy = BestFirst(width, 8, row_cost=0.0001)
        proposer = make_proposer(name)
        replay = Replay(policy, proposer, stages=stages, rounds=ROUNDS[name], around_round=timed)
        replay.decode(*text)
        return cls(replay.result, spent / 1e6)


@dataclass(frozen=True)
class Texts:
    """Sums over several texts."""

    texts: list[Text]

    @property
    def tokens(self) -> int:
        return sum(each.result.tokens for each in self.texts)

    @property
    def steps(self) -> int:
        return sum(each.result.steps for each in self.texts)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps

    @property
    def draft_ms(self) -> float:
        """Per step."""
        return sum(each.draft_ms for each in self.texts) / self.steps


def row(kind: str, ngram: Texts, suffix: Texts) -> dict[str, Any]:
    pairs = zip(suffix.texts, ngram.texts, strict=True)
    return {
        "texts": kind,
        "prompts": len(suffix.texts),
        "tokens": suffix.tokens,
        "ngram_tokens_per_step": ngram.tokens_per_step,
        "suffix_tokens_per_step": suffix.tokens_per_step,
        "ratio": suffix.tokens_per_step / ngram.tokens_per_step,
        "mean_ratio": mean(
            ours.result.tokens_per_step / theirs.result.tokens_per_step for ours, theirs in pairs
        ),
        "ngram_ms": ngram.draft_ms,
        "suffix_ms": suffix.draft_ms,
    }


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=384, help="of an answer at most (384)")
    options = experiment.parse(parser, tokens=48)
    encode = tokenizer.load(TARGET).encode
    done: dict[str, dict[str, list[Text]]] = {}
    for item in map(json.loads, REPETITIVE_PROMPTS.read_text().splitlines()):
        text = encode(item["prompt"]), encode(item["reference"])[: options.tokens]
        for name in ROUNDS:
            one = Text.of(name, text, options.stages, options.width)
            for kind in (item["id"].partition("/")[0], ALL):
                done.setdefault(kind, {}).setdefault(name, []).append(one)
    rows = [
        row(kind, *(Texts(by_proposer[name]) for name in ROUNDS))
        for kind, by_proposer in done.items()
    ]
    title = (
        f"N-grams and the suffix automaton on texts that repeat, {options.stages} stages, width "
        f"{options.width}, 8 children; ms of draft rounds per step"
    )
    experiment.publish(options, title, sorted(rows, key=lambda each: each["texts"] == ALL))


if __name__ == "__main__":
    main()
