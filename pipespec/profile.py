"""What `pipespec plan` is told about machine and draft: by options, or by a JSON file.

    {"stages": 8, "stage_ms": ["1:37.8", "64:41"], "hop_ms": 1.0, "draft_ms": 9.5,
     "curve": ["1:0.81", "8:0.99"], "spread": 0.5}

Every entry may be missing. For stages that differ, `stage_ms` is a list of such lists.
`benchmarks/plan_check.py` writes one from what it measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pipespec.errors import ConfigError
from pipespec.limits import MAX_STAGES, check_whole
from pipespec.pace import TimeCurve, point
from pipespec.plan import Machine
from pipespec.source.synthetic import Accuracy

Curve = Sequence[str | float]


@dataclass(frozen=True)
class Profile:
    """Times in milliseconds; the defaults are SpecPipe's 8 stages of ten layers of a 70B on an
    RTX 3090, and a draft that is right at once for 81 of 100 tokens."""

    stages: int = 8
    stage_ms: Curve | Sequence[Curve] = (37.8,)
    hop_ms: float = 0.0
    draft_ms: float = 0.0
    curve: Sequence[str] = ("1:0.81", "8:0.99")
    spread: float = 0.5

    @classmethod
    def read(cls, file: str) -> Profile:
        """Raises ConfigError."""
        try:
            values = json.loads(Path(file).read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"The profile {file!r} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise ConfigError(f"The profile {file!r} is not JSON: {error}.") from error
        known = {f.name for f in fields(cls)}
        if not isinstance(values, dict) or not values.keys() <= known:
            raise ConfigError(
                f"The profile {file!r} must be a JSON object of {', '.join(sorted(known))}."
            )
        return cls(**values)

    def replaced(self, **values: Any) -> Profile:
        """With every value that is not None in place of its own."""
        return replace(self, **{name: v for name, v in values.items() if v is not None})

    def machine(self) -> Machine:
        """Raises ConfigError."""
        check_whole("stages", self.stages, 1, MAX_STAGES)
        _list("stage_ms", self.stage_ms)
        curves = [[*c] for c in self.stage_ms if isinstance(c, list | tuple)]
        if curves and len(curves) != self.stages:
            raise ConfigError(
                f"stage_ms has times of {len(curves)} stages, but there are {self.stages}."
            )
        per_stage = curves or [[*self.stage_ms]] * self.stages
        stages = tuple(
            TimeCurve(tuple(point(str(entry)) for entry in curve)) for curve in per_stage
        )
        return Machine(stages, _number("hop_ms", self.hop_ms), _number("draft_ms", self.draft_ms))

    def accuracy(self) -> Accuracy:
        """Raises ConfigError."""
        _list("curve", self.curve)
        return Accuracy.parse([str(point) for point in self.curve], _number("spread", self.spread))


def _list(name: str, value: Any) -> None:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name} is {value!r}, but must be a list.")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} is {value!r}, but must be a number.")
    return float(value)
