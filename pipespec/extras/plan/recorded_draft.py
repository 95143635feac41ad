"""A draft as `pipespec bench --profile` recorded it along answers of a target, for simulation.

A curve says how good a draft is on the whole. Texts differ, and within one hard stretches follow
one another: so `pipespec plan` replays what the draft proposed at every position of every text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipespec.errors import ConfigError
from pipespec.limits import MAX_COUNT, check_whole

MISSED = 0  # in place of a rank: the token was not among the candidates


@dataclass(frozen=True)
class TextRecord:
    """What a draft proposed along one answer, given the target's own text before each token.

    Attributes:
        id, benchmark: of the prompt.
        ranks: of the target's tokens among the draft's candidates, from 1; MISSED: not among them.
        probabilities: of the candidates of each token, the likeliest first.

    Raises ConfigError.
    """

    id: str
    benchmark: str
    ranks: Sequence[int]
    probabilities: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        check_whole(f"The number of tokens of the text {self.id!r}", len(self.ranks), 2, MAX_COUNT)
        sizes = {len(row) for row in self.probabilities}
        if len(self.probabilities) != len(self.ranks) or len(sizes) != 1 or not min(sizes):
            raise ConfigError(
                f"The text {self.id!r} of the profile has {len(self.ranks)} tokens, but not as "
                "many candidates for each of them; measure it again."
            )
        for rank in self.ranks:
            check_whole(f"A rank of the text {self.id!r}", rank, MISSED, min(sizes))
        if not (self._stated >= 0).all() or not (self._stated.sum(1) <= 1.01).all():
            raise ConfigError(
                f"The probabilities of a token of the text {self.id!r} are not from 0 to 1."
            )

    @cached_property
    def _stated(self) -> np.ndarray:
        return np.array(self.probabilities, float)

    @cached_property
    def _indices(self) -> np.ndarray:
        """Of the target's tokens among the candidates, `[tokens]`."""
        ranks = np.array(self.ranks)
        return np.where(ranks == MISSED, self._stated.shape[1], ranks - 1)

    def draw(
        self, answer: np.ndarray, on_path: np.ndarray, confidence: np.ndarray, hit: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `DrawnDraft`. Off the path, and beyond the end, the draft is as it was at a position
        drawn at random: it does not know that it went wrong."""
        inside = on_path & (answer >= 0) & (answer < len(self.ranks))
        drawn = (confidence * len(self.ranks)).astype(np.int64)
        at = np.where(inside, answer, drawn)
        return self._stated[at], self._indices[at]


@dataclass(frozen=True)
class DraftRecord:
    """A draft along several texts, and its accuracy over all of them. Raises ConfigError."""

    texts: Sequence[TextRecord]

    def __post_init__(self) -> None:
        if not self.texts:
            raise ConfigError("The profile holds no text; measure it again.")

    def curve(self) -> list[str]:
        """How often the target's token is among the k best, as `rank:share`.

        Shares are sorted, as by chance a later rank may be hit more often than an earlier one.
        """
        ranks = [rank for text in self.texts for rank in text.ranks]
        most = max(len(text.probabilities[0]) for text in self.texts)
        hits = np.bincount(ranks, minlength=most + 1)[1:] / len(ranks)
        return [f"{k}:{hit:.6f}" for k, hit in enumerate(np.sort(hits)[::-1].cumsum(), 1)]

    def confidence(self) -> float:
        """The mean probability of the best candidate: the curve's first point, if calibrated."""
        return float(np.mean(self._best))

    def spread(self) -> float:
        """How much it varies: its variance, as a share of the largest possible one."""
        mean = self.confidence()
        return float(np.var(self._best) / (mean * (1 - mean))) if 0 < mean < 1 else 0.0

    @property
    def _best(self) -> list[float]:
        return [row[0] for text in self.texts for row in text.probabilities]

    def sample(self, num_tokens: int) -> Iterator[TextRecord]:
        """Texts at equal distances from all of them, with about so many tokens."""
        mean = sum(len(text.ranks) for text in self.texts) / len(self.texts)
        count = min(len(self.texts), max(1, round(num_tokens / mean)))
        return (self.texts[i * len(self.texts) // count] for i in range(count))
