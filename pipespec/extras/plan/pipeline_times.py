"""How long the stages, the draft and the links of a planned pipeline take, and what `pipespec plan`
is told of them and of the draft: by options, or by a JSON file.

    {"stages": 8, "stage_ms": ["1:37.8", "64:41"], "hop_ms": 1.0, "draft_ms": 9.5,
     "curve": ["1:0.81", "8:0.99"], "spread": 0.5, "experts": [256, 8, 0.9]}

Every entry may be missing. `pipespec bench --profile` writes one from what it measured, with the
draft as it was along answers of the target. A curve says how good a draft is on the whole. Texts
differ, and within one hard stretches follow one another: so `pipespec plan` replays what the draft
proposed at every position of every text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from pipespec.errors import ConfigError
from pipespec.extras.emulation.machine import TimeCurve, all_with_experts, point
from pipespec.extras.emulation.synthetic_proposer import USUAL, USUAL_CURVE, Accuracy
from pipespec.head.in_flight import depth
from pipespec.limits import MAX_COUNT, MAX_MS, MAX_STAGES, check_number, check_whole
from pipespec.system.validation import from_fields, read_json, readable

NO_HOP = TimeCurve(((1, 0.0),))
MISSED = 0  # in place of a rank: the token was not among the candidates


@dataclass(frozen=True)
class Machine:
    """The stages, the draft and the links of a pipeline. Raises ConfigError.

    Attributes:
        stages: the times of each; those of a group count as one stage, with their sum.
        hop: from the end of a stage's computation to the start of the next one's, by the rows that
            it sends on; the verdict's way is that of one row.
        draft_ms: of a draft round, for any nodes or by the nodes that it expands.
        overlap: the draft works while the stages compute, else while they wait.
    """

    stages: tuple[TimeCurve, ...]
    hop: TimeCurve = NO_HOP
    draft_ms: float | TimeCurve = 0.0
    overlap: bool = True

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("A pipeline without stages cannot be planned; give 1 or more.")
        if not isinstance(self.draft_ms, TimeCurve):
            check_number("draft_ms", self.draft_ms, 0, MAX_MS)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def plain_tbt_ms(self) -> float:
        """Time between tokens of plain pipeline parallelism: one row goes through every stage."""
        return sum(curve.ms(1) + self.hop.ms(1) for curve in self.stages)

    def stage_ms(self, rows: Sequence[int]) -> list[float]:
        return [curve.ms(count) for curve, count in zip(self.stages, rows, strict=True)]

    def round_ms(self, nodes: int) -> float:
        if isinstance(self.draft_ms, TimeCurve):
            return self.draft_ms.ms(max(nodes, 1))
        return self.draft_ms

    def hop_ms(self, rows: Sequence[int]) -> list[float]:
        """The time after each stage in a step until what it sends has arrived, by its rows; the
        last one sends a verdict."""
        return [*(self.hop.ms(count) for count in rows[:-1]), self.hop.ms(min(rows[-1], 1))]

    def computed(self, in_flight: Sequence[int]) -> list[int]:
        """What each stage computes, of values of the batches in flight, the newest first: these are
        spread over the stages with the hops after them; a lone batch is in every stage once."""
        return [in_flight[i * len(in_flight) // self.num_stages] for i in range(self.num_stages)]

    def entering_ms(self, curve: TimeCurve, rows: int, each: int) -> float:
        """From one batch of so many rows to the next for a stage, which holds `each` batches with
        the hop after it, one of which it computes."""
        return _entering_ms(curve.ms(rows), self.hop.ms(rows), max(each, 1))

    def batch_ms(self, in_flight: Sequence[int]) -> float:
        """From one batch to the next, where batches of so many rows are in flight, the newest
        first: one of them, or a multiple of the number of stages. Each stage computes one
        meanwhile, and all batches go on by as much."""
        rows = self.computed(in_flight)
        ways = [*zip(self.stage_ms(rows), self.hop_ms(rows), strict=True)]
        if (each := len(in_flight) // self.num_stages) == 0:
            return sum(map(sum, ways))
        entering = (_entering_ms(*way, each) for way in ways)
        if each == 1:
            return max(entering)
        # Those that are computed already, or are on the link to the next stage.
        later = [max(in_flight[i + 1 : i + each]) for i in range(0, len(in_flight), each)]
        ways = [*zip(self.stage_ms(later), self.hop_ms(later), strict=True)]
        leaving = (min((stage + hop) / each, hop / (each - 1)) for stage, hop in ways)
        return max(*entering, *leaving)

    def windows(self) -> list[int]:
        """Batches in flight among which a head chooses, as many as stages first, the most last. A
        draft that works only while the stages wait has no others."""
        n = self.num_stages
        least_ms = max(*(curve.ms(1) for curve in self.stages), self.round_ms(1))
        most = depth(n, self.plain_tbt_ms, least_ms) if self.overlap else n
        doubled = [n << k for k in range(1, (most // n).bit_length())]
        return [n, *[1] * (n > 1), *doubled] if doubled else [n]

    def full_ms(self, rows: int) -> list[float]:
        """The time of each stage and of the hop after it, where all have batches of so many
        rows."""
        counts = [rows] * self.num_stages
        return [*map(sum, zip(self.stage_ms(counts), self.hop_ms(counts), strict=True))]


def _entering_ms(stage_ms: float, hop_ms: float, each: int) -> float:
    return max(stage_ms, (stage_ms + hop_ms) / each)


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


@dataclass(frozen=True)
class Profile:
    """Times in milliseconds; the defaults are SpecPipe's 8 stages of ten layers of a 70B on an
    RTX 3090, and the accuracy of a draft that was recorded.

    Attributes:
        stage_ms: of every stage, `ROWS:MS`, or one such list for each stage.
        hop_ms, draft_ms: a time for any rows or nodes, or a list like that of a stage.
        row_ms: what a hop takes longer for each row beyond those of hop_ms, its bytes over the
            bandwidth of the slowest link; null: as between the last two points of hop_ms.
        experts: of each layer, chosen by a row, their share of a row's time and, if known, the
            overlap of the choices of rows; empty: the model is dense.
        slot_ms, slots: what each KV slot that a batch reads adds, and how many it read when
            `stage_ms` was measured: of every stage, or one such number for each stage.
        overlap: the draft works while the stages compute; false: while they wait, as a draft does
            that shares a device with the only stage.
        texts: what the draft proposed along each text; its accuracy, in place of the curve.
        about: of what and when it was measured.
        figures: what was measured of hosts, for `pipespec plan HOSTS.yaml`.
    """

    stages: int = 8
    stage_ms: Sequence[str | float | Sequence[str | float]] = (37.8,)
    hop_ms: float | Sequence[str | float] = 0.0
    draft_ms: float | Sequence[str | float] = 0.0
    row_ms: float | None = None
    curve: Sequence[str] = tuple(USUAL_CURVE)
    spread: float = USUAL.spread
    experts: Sequence[float] = ()
    slot_ms: float | Sequence[float] = 0.0
    slots: float | Sequence[float] = 0.0
    overlap: bool = True
    texts: Sequence[TextRecord] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, file: str) -> Profile:
        """Raises ConfigError."""
        with readable(f"The profile {file!r} cannot be read", "see docs/planning.md"):
            return from_fields(cls, read_json(file, pipe=True))

    def replaced(self, **values: Any) -> Profile:
        """With every value that is not None in place of its own."""
        return replace(self, **{name: v for name, v in values.items() if v is not None})

    def machine(self) -> Machine:
        """Raises ConfigError."""
        stages = tuple(map(TimeCurve.parse, self._of_stages("stage_ms")))
        hop = TimeCurve.parse(self.hop_ms, "hop_ms")
        if self.row_ms is not None:
            check_number("row_ms", self.row_ms, 0, MAX_MS)
            rows, ms = hop.points[-1]
            hop = TimeCurve((*hop.points, (rows + 1, ms + self.row_ms)))
        return Machine(
            all_with_experts(stages, "experts", self.experts),
            hop,
            TimeCurve.parse(self.draft_ms, "draft_ms"),
            overlap=self.overlap,
        )

    def at_context(self, tokens: int) -> Profile:
        """With the times of stages whose batches read so many KV slots. Raises ConfigError."""
        given = (self._of_stages(name) for name in ("stage_ms", "slot_ms", "slots"))
        stage_ms = tuple(
            tuple(_later(entry, ms * (tokens - read)) for entry in points)
            for points, ms, read in zip(*given, strict=True)
        )
        return replace(self, stage_ms=stage_ms, slots=float(tokens))

    def _of_stages(self, name: str) -> list[Any]:
        """What is given of every stage, for each of them."""
        check_whole("stages", self.stages, 1, MAX_STAGES)
        value = getattr(self, name)
        if name == "stage_ms":  # points, or a list of them for each stage
            own = [[*each] for each in value if isinstance(each, list | tuple)]
            value = own or [[*value]] * self.stages
        elif isinstance(value, int | float):
            value = [value] * self.stages
        if len(value) != self.stages:
            raise ConfigError(
                f"{name} is given for {len(value)} stages, but there are {self.stages}."
            )
        return [*value]

    def accuracy(self) -> Accuracy | DraftRecord:
        """Raises ConfigError."""
        if self.texts:
            return DraftRecord(self.texts)
        return Accuracy.parse(list(self.curve), self.spread)


def _later(entry: str | float, ms: float) -> str:
    """A point of a stage's times, with so many milliseconds more."""
    rows, own = point(str(entry))
    return f"{rows}:{max(own + ms, 0.0):.5g}"
