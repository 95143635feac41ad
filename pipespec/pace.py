"""Emulated stages: hold a step to a stated time after its real computation.

It exists so that nine processes on two cores can show what the runtime does on nine GPUs.
Results under a pace are emulated and are labelled so everywhere.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from pipespec.clock import monotonic_ns
from pipespec.errors import ConfigError


@dataclass(frozen=True)
class Pace:
    """Milliseconds that a stage's step and a draft round last at least; 0: as fast as they go."""

    stage_ms: float = 0.0
    draft_ms: float = 0.0

    def __post_init__(self) -> None:
        for name in ("stage_ms", "draft_ms"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"pace.{name} is {getattr(self, name)}, but must be 0 or more milliseconds."
                )

    def __bool__(self) -> bool:
        return self.stage_ms > 0 or self.draft_ms > 0


def hold(start_ns: int, milliseconds: float) -> bool:
    """Sleep until `milliseconds` after `start_ns`; False: that moment had passed already."""
    if milliseconds == 0:
        return True
    left = start_ns + milliseconds * 1e6 - monotonic_ns()
    if left > 0:
        time.sleep(left / 1e9)
    return left >= 0
