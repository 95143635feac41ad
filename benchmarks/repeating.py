"""Texts that repeat what is known: the suffix automaton beside n-grams, in tokens per step.

    python -m benchmarks.repeating --json benchmarks/results/repeating.json

The references of the 40 prompts of `benchmarks.repetitive`, replayed (`benchmarks.replay`): edited
code, quoted passages, continued tables, corrected paragraphs. Tokens per step are counts; what a
step's draft rounds take is measured, on one thread. N-grams grow a level per round and have four,
as they had when they were a source; the suffix automaton hands over paths, in one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any

from benchmarks import experiment
from benchmarks.emulated import TARGET
from benchmarks.ngram import NGramSource
from benchmarks.repetitive import FILE
from benchmarks.replay import Replay, Replayed
from pipespec.engine import tokenizer
from pipespec.head.feed.best_first import BestFirst
from pipespec.head.source.protocol import TokenSource
from pipespec.head.source.suffix import Suffix

ALL = "all"
# Draft rounds per step.
ROUNDS = {"ngram": 4, "suffix": 1}


def source(name: str) -> TokenSource:
    """As it stands in a cluster by default; every text is a conversation of its own."""
    if name == "ngram":
        return NGramSource()
    return Suffix(past=0).make(None, 0, lambda text: [])


@dataclass(frozen=True)
class Text:
    """One text through one source: what happened, and what all draft rounds took."""

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
        made = source(name)
        replay = Replay(policy, made, stages=stages, rounds=ROUNDS[name], expanding=timed)
        replay.decode(*text)
        return cls(replay.result, spent / 1e6)


@dataclass(frozen=True)
class Texts:
    """Several together."""

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
    for item in map(json.loads, FILE.read_text().splitlines()):
        text = encode(item["prompt"]), encode(item["reference"])[: options.tokens]
        for name in ROUNDS:
            one = Text.of(name, text, options.stages, options.width)
            for kind in (item["id"].partition("/")[0], ALL):
                done.setdefault(kind, {}).setdefault(name, []).append(one)
    rows = [
        row(kind, *(Texts(by_source[name]) for name in ROUNDS)) for kind, by_source in done.items()
    ]
    title = (
        f"N-grams and the suffix automaton on texts that repeat, {options.stages} stages, width "
        f"{options.width}, 8 children; ms of draft rounds per step"
    )
    experiment.publish(options, title, sorted(rows, key=lambda each: each["texts"] == ALL))


if __name__ == "__main__":
    main()
