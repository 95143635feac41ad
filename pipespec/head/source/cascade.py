"""A cascade of drafts: what a small one has grown, a mid-size model scores anew.

The small draft expands the tree in the head, round by round. The mid-size model works beside it, on
a device of its own, and nobody waits for it: a pass takes the likeliest nodes of all depths that it
has not seen (`pipespec.head.scoring`), and what it says of their children takes the place of what
the small draft said. Until then the small draft's word counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipespec.head.scoring import MID_ROWS
from pipespec.head.source.calibration import Calibrated
from pipespec.head.source.draft_model import DraftModel
from pipespec.head.source.protocol import TokenSource
from pipespec.head.source.synthetic import Accuracy, Synthetic, SyntheticSource, read_truth
from pipespec.limits import MAX_ROWS, check_whole


@dataclass(frozen=True)
class Cascade(DraftModel):
    """Settings of the small draft, and `mid_rows`: nodes that one pass of `model.mid` scores; 0:
    the small draft is alone."""

    mid_rows: int = MID_ROWS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("source.mid_rows", self.mid_rows, 0, MAX_ROWS)

    @property
    def needs_mid(self) -> bool:
        return self.mid_rows > 0

    def make_mid(self, mid: TokenSource | None, vocabulary: int) -> TokenSource:
        assert mid is not None
        return Calibrated(mid)


@dataclass(frozen=True)
class SyntheticCascade(Synthetic):
    """Both drafts are synthetic, of one seed: where one goes wrong the other tends to as well.
    `mid_curve` is the accuracy of the mid-size model; `mid_rows` as of `Cascade`."""

    mid_curve: list[str] = field(default_factory=lambda: ["1:0.81", "8:0.99"])
    mid_rows: int = MID_ROWS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("source.mid_rows", self.mid_rows, 0, MAX_ROWS)
        _ = self.mid_accuracy

    @property
    def mid_accuracy(self) -> Accuracy:
        return Accuracy.parse(self.mid_curve, self.spread)

    @property
    def needs_mid(self) -> bool:
        return False

    def make_mid(self, mid: TokenSource | None, vocabulary: int) -> TokenSource:
        return SyntheticSource(self.mid_accuracy, read_truth(self.truth), vocabulary, self.seed)
