"""An emulated machine with the times of a profile: `emulate=FILE.json`."""

from __future__ import annotations

from dataclasses import dataclass

from pipespec.instruments.emulation.machine import EmulatedMachine
from pipespec.instruments.plan.machine_profile import Profile
from pipespec.settings import REQUIRED, setting


@dataclass(frozen=True, kw_only=True)
class ProfiledMachine(EmulatedMachine):
    """Stages and draft last as long as in a file that `pipespec profile` wrote."""

    file: str = setting(REQUIRED, "The profile, which replaces stage_ms, experts and draft_ms.")

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        machine = Profile.read(self.file).machine()
        curves = [_written(curve.points) for curve in machine.stages]
        draft = machine.draft_ms
        values = {
            "stage_ms": curves,
            "experts": [],
            "draft_ms": draft if isinstance(draft, float) else _written(draft.points),
            "mid_ms": machine.mid_ms,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        super().__post_init__()


def _written(points: tuple[tuple[int, float], ...]) -> str:
    return " ".join(f"{rows}:{ms:g}" for rows, ms in points)
