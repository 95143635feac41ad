"""Draft tokens made from the answer, for benchmarks alone: a draft of any stated accuracy. Above
350 lines, as accuracies, what is drawn from them and both proposers belong together."""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Protocol

import numpy as np

from pipespec.core import Verdict
from pipespec.errors import ConfigError
from pipespec.head.proposer import (
    Context,
    Encode,
    Proposal,
    ProposalRequest,
    Proposer,
    ProposerConfig,
)
from pipespec.head.tree import ROOT, Tree
from pipespec.limits import MAX_SEED, check_whole
from pipespec.settings import REQUIRED, setting
from pipespec.system.validation import Unreadable, parse_json, read_text, readable, typed

POINT = re.compile(r"(\d{1,9}):(\d*\.?\d+)", re.ASCII)
MAX_RANK = 65536
# A miss rate below this is none, where a curve is interpolated in its logarithm.
SMALLEST_MISS = 1e-9
# A later rank may be likelier than an earlier one by so much: the points are rounded.
ROUNDING = 1e-5
# Quantiles of the confidence that are tabulated.
QUANTILES = 1 << 14
# Streams of random numbers of one node: its confidence, the answer's rank, the wrong tokens.
CONFIDENCE, RANK, TOKENS, OFF_PATH = range(1, 5)


@dataclass(frozen=True)
class Accuracy:
    """How good a draft is. Raises ConfigError.

    `curve`: how often the target's token is among the draft's k best, for some k. Between these the
    miss rate follows a power law of the rank; beyond the last the draft proposes nothing. `spread`,
    from 0 to 1: how much the confidence varies from token to token; at 0 every first candidate is
    stated with the same probability, towards 1 with nearly 0 or 1. The stated probabilities are
    calibrated: of the tokens stated with p, the share p is the target's.
    """

    curve: Mapping[int, float]
    spread: float = 0.5

    def __post_init__(self) -> None:
        ranks, hits = list(self.curve), list(self.curve.values())
        if not ranks or ranks[0] != 1 or ranks != sorted(set(ranks)):
            raise ConfigError(
                f"The accuracy curve has the ranks {ranks}, but must begin at top-1 and rise."
            )
        check_whole("The last rank of the accuracy curve", ranks[-1], 1, MAX_RANK)
        if hits != sorted(hits) or not 0 < hits[0] <= hits[-1] <= 1:
            raise ConfigError(
                f"The accuracy curve has the shares {hits}, but must rise from above 0 to at "
                "most 1."
            )
        if not 0 <= self.spread < 1:
            raise ConfigError(
                f"The spread of the confidence is {self.spread}, but must be from 0 to below 1."
            )
        shares = self.shares
        for rank, (better, worse) in enumerate(pairwise(shares), 2):
            if worse > better + ROUNDING:
                raise ConfigError(
                    f"The accuracy curve makes rank {rank} ({worse:.3f}) likelier than rank "
                    f"{rank - 1} ({better:.3f}); state more of its points, such as top-{rank}."
                )

    @classmethod
    def parse(cls, points: Sequence[str], spread: float) -> Accuracy:
        """From texts such as "1:0.81", "8:0.99"."""
        curve = {}
        for point in points:
            match = POINT.fullmatch(point.strip())
            if match is None:
                raise ConfigError(
                    f"{point!r} is not a point of an accuracy curve; write rank:share, as in 8:.99."
                )
            curve[int(match[1])] = float(match[2])
        return cls(dict(sorted(curve.items())), spread)

    def hit_rate(self, rank: int) -> float:
        """How often the target's token is among the `rank` best candidates."""
        return float(self.shares[:rank].sum())

    @cached_property
    def shares(self) -> np.ndarray:
        """Probability that the target's token has rank 1, 2, ... `[ranks]`."""
        given = np.array(list(self.curve))
        misses = np.maximum(1 - np.array(list(self.curve.values())), SMALLEST_MISS)
        ranks = np.arange(1, given[-1] + 1)
        miss = np.exp(np.interp(np.log(ranks), np.log(given), np.log(misses)))
        return -np.diff(miss, prepend=1.0)

    def distributions(self, uniform: np.ndarray) -> np.ndarray:
        """One stated distribution per node, `[nodes, ranks]`, from uniform numbers `[nodes]`.

        Rank 1 gets a Beta-distributed probability whose mean is the curve's, never less than
        rank 2; the other ranks share the rest as the curve says. So the mean over many nodes
        is the curve, whatever the spread.
        """
        first, rest = self.shares[0], self.shares[1:]
        rest = rest / (1 - first) if first < 1 else rest
        best = self._confidences[(uniform * QUANTILES).astype(np.int64)]
        return np.column_stack((best, (1 - best)[:, None] * rest))

    def draw(
        self, answer: np.ndarray, on_path: np.ndarray, confidence: np.ndarray, hit: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `DrawnDraft`; every position of a text is like the others."""
        stated = self.distributions(confidence)
        return stated, (hit[:, None] >= stated.cumsum(1)).sum(1)

    @cached_property
    def _confidences(self) -> np.ndarray:
        """The quantiles of rank 1's probability, `[QUANTILES]`."""
        first = float(self.shares[0])
        second = float(self.shares[1]) / (1 - first) if len(self.shares) > 1 and first < 1 else 0.0
        least = second / (1 + second)  # where rank 1 and rank 2 are equally likely
        mean = (first - least) / (1 - least)
        if self.spread == 0 or not SMALLEST_MISS < mean < 1 - SMALLEST_MISS:
            return np.full(QUANTILES, first)
        return least + (1 - least) * _quantiles(mean, self.spread)


@lru_cache(maxsize=16)
def _quantiles(mean: float, spread: float) -> np.ndarray:
    """Of the Beta distribution with that mean whose variance is that share of the largest one,
    `[QUANTILES]`."""
    # The variance of Beta(mean * s, (1 - mean) * s) is mean * (1 - mean) / (s + 1).
    s = 1 / spread - 1
    drawn = np.random.default_rng(0).beta(mean * s, (1 - mean) * s, 64 * QUANTILES)
    quantiles = np.sort(drawn).reshape(QUANTILES, 64).mean(1)
    return np.clip(quantiles, SMALLEST_MISS, 1 - SMALLEST_MISS)


# What is assumed of a draft of which nothing is known: Qwen2.5-Coder-0.5B-Instruct before its 1.5B,
# recorded in chats by data set (docs/benchmarks.md#accuracy-of-drafts). It is a close pair: a 1B
# before a 70B is less accurate.
RECORDED = {
    "self-instruct seed": Accuracy({1: 0.770, 2: 0.874, 4: 0.946, 16: 0.988}, 0.39),
    "GSM8K": Accuracy({1: 0.899, 2: 0.978, 4: 0.998, 16: 1.000}, 0.30),
    "HumanEval": Accuracy({1: 0.894, 2: 0.968, 4: 0.994, 16: 0.999}, 0.32),
    "HumanEval-X": Accuracy({1: 0.897, 2: 0.975, 4: 0.994, 8: 0.997}, 0.31),
    "all": Accuracy({1: 0.873, 2: 0.955, 4: 0.986, 16: 0.998}, 0.36),
}
USUAL = RECORDED["all"]
USUAL_CURVE = [f"{rank}:{share:g}" for rank, share in USUAL.curve.items()]
# From a text on which a draft errs often to one on which it hardly errs.
RANGE = (RECORDED["self-instruct seed"], USUAL, RECORDED["GSM8K"])


class DrawnDraft(Protocol):
    """What a synthetic draft states of the children of nodes, and how good it is there."""

    def draw(
        self, answer: np.ndarray, on_path: np.ndarray, confidence: np.ndarray, hit: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The stated probabilities of the candidates of nodes, `[nodes, ranks]`, the likeliest
        first, and the index among them of the target's own token, `[nodes]`; `ranks`: of none.
        `answer` says which token of the answer follows each node, from 0, `on_path` whether the
        node agrees with the answer; the others are uniform random numbers, all `[nodes]`."""
        ...


@dataclass(frozen=True)
class SyntheticConfig(ProposerConfig):
    """Settings of a synthetic draft."""

    truth: str = setting(
        REQUIRED,
        "File of one JSON list of token ids per line: a prompt and the target's answer to it.",
    )
    curve: list[str] = setting(
        USUAL_CURVE,
        "Accuracy of the draft, as rank:share: how often the target's token is among so many best "
        "candidates.",
    )
    spread: float = setting(
        USUAL.spread,
        "How much the draft's confidence varies: from 0, every token is equally likely to be "
        "right, to nearly 1, each is certainly right or wrong.",
    )
    seed: int = setting(0, "Seed of the random numbers.", limits=(0, MAX_SEED))

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.accuracy  # raises now, before any rank starts
        if not os.path.isfile(self.truth):
            raise ConfigError(
                f"proposer.truth is {self.truth!r}, but must name a file with a JSON list of token "
                "ids per line: a prompt and what the target says after it."
            )

    @property
    def accuracy(self) -> Accuracy:
        return Accuracy.parse(self.curve, self.spread)

    @property
    def synthetic(self) -> bool:
        return True

    def make(self, draft: Proposer | None, vocabulary: int, encode: Encode) -> Proposer:
        return SyntheticProposer(self.accuracy, read_truth(self.truth), vocabulary, self.seed)


def read_truth(file: str) -> list[list[int]]:
    texts = []
    with readable(f"The truth file {file!r} cannot be read"):
        lines = read_text(file).splitlines()
    for number, line in enumerate(lines, 1):
        try:
            texts.append([*typed("it", parse_json(line), Sequence[int])])
        except Unreadable:
            raise ConfigError(f"Line {number} of {file} is not a JSON list of token ids.") from None
    return texts


class SyntheticProposer:
    """Proposes the target's own next token at a drawn rank, among wrong tokens.

    The draws for a position depend on the seed, the prompt and the position alone, so that every
    policy and width has the same draft. Nodes off the answer's path get children with the same
    confidence, as a real draft does not know that it went wrong. Nothing is proposed after the end
    of the answer.
    """

    def __init__(
        self, draft: DrawnDraft, truth: Sequence[Sequence[int]], vocabulary: int, seed: int
    ):
        self.draft = draft
        one = np.zeros(1)
        draft.draw(np.zeros(1, np.int64), np.ones(1, bool), one, one)  # makes its tables now
        self.truth = truth
        self.vocabulary = vocabulary
        self.seed = seed
        # Of a sequence: its text, and the key and the length of its prompt.
        self._answers: dict[int, tuple[Context, np.ndarray, np.ndarray, int]] = {}

    def start_sequence(self, context: Context) -> None:
        known = context.tokens
        prompt = known[: context.prompt_len or len(known)]
        for text in self.truth:
            if list(text[: len(known)]) == known[: len(text)]:
                key = np.array([zlib.crc32(np.array(prompt).tobytes())])
                self._answers[context.sequence] = context, np.array(text), key, len(prompt)
                return
        raise ConfigError(
            f"proposer.truth holds no text that begins with the prompt of a request "
            f"({len(prompt)} tokens); record the target's answer to it first."
        )

    def accept_verdict(self, verdict: Verdict) -> None:
        """Raises ConfigError if the target's answer differs from the file's."""
        context, answer, *_ = self._answers[verdict.sequence]
        decided = context.tokens[verdict.base :][: max(0, len(answer) - verdict.base)]
        expected = answer[verdict.base : verdict.base + len(decided)].tolist()
        if decided != expected:
            raise ConfigError(
                f"proposer.truth is not this target's answer: after {verdict.base} tokens it "
                f"holds {expected}, the target decided {decided}; record it anew."
            )

    def end_sequence(self, sequence: int) -> None:
        del self._answers[sequence]

    def propose(self, requests: Sequence[ProposalRequest], children: int) -> list[Proposal | None]:
        return [self._proposal(each.context, each.tree, each.nodes, children) for each in requests]

    def _proposal(self, context: Context, tree: Tree, nodes: np.ndarray, children: int) -> Proposal:
        _, answer, prompt, length = self._answers[context.sequence]
        right = self._on_path(tree, answer)[nodes]
        position = tree.position[nodes]
        key = np.where(right, position, tree.id[nodes])
        off = np.where(right, 0, OFF_PATH)
        stated, rank = self.draft.draw(
            position + 1 - length,
            right,
            self._uniform(CONFIDENCE, key, off, prompt),
            self._uniform(RANK, key, off, prompt),
        )
        count = min(children, stated.shape[1], self.vocabulary - 1)
        known = right & (position + 1 < len(answer))
        truth = answer[np.where(known, position + 1, 0)]
        tokens = self._wrong(self._uniform(TOKENS, key, off, prompt), truth, count)
        shown = np.flatnonzero(known & (rank < count))
        tokens[shown, rank[shown]] = truth[shown]
        with np.errstate(divide="ignore"):  # a rank that never hits is no candidate
            logps = np.log(stated[:, :count])
        logps[right & ~known] = -np.inf
        return Proposal(nodes, tokens, logps)

    def _on_path(self, tree: Tree, answer: np.ndarray) -> np.ndarray:
        """Which nodes agree with the answer, those above them included, bool `[nodes]`."""
        right = np.zeros(len(tree), bool)
        right[ROOT] = True
        inside = np.minimum(tree.position, len(answer) - 1)
        agrees = (tree.token == answer[inside]) & (tree.position < len(answer))
        for node in np.flatnonzero(agrees).tolist():  # parents first
            right[node] |= right[tree.parent[node]]
        return right

    def _wrong(self, uniform: np.ndarray, truth: np.ndarray, count: int) -> np.ndarray:
        """Distinct tokens that are not the truth, `[nodes, count]`."""
        others = self.vocabulary - 1
        stride = next(s for s in range(others // 2 + 1, 0, -1) if math.gcd(s, others) == 1)
        steps = (uniform * others).astype(np.int64)[:, None] + stride * np.arange(count)
        return (truth[:, None] + 1 + steps % others) % self.vocabulary

    def _uniform(self, stream: int, *keys: np.ndarray) -> np.ndarray:
        """Numbers in [0, 1) that depend on the seed, the stream and the keys alone, `[nodes]`.

        A key may be `[1]`, for all nodes. The generator is counter-based: the finaliser of
        SplitMix64 over the keys, the stream first: added to a position it would give one stream
        the numbers of another at the next position.
        """
        state = np.full(len(keys[0]), self.seed, np.uint64)
        for key in (np.array([stream]), *keys):
            state += key.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state ^= state >> np.uint64(31)
        return (state >> np.uint64(11)) / float(1 << 53)
