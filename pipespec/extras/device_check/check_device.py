"""Runs the parts of the check, each in a process of its own, and says what they found.

A part that crashes, hangs or damages the state of the device fails alone: its process ends, and
with it everything that it has on the device.

    python -m pipespec.extras.device_check.check_device PART DEVICE

runs one of them, and prints its findings as a line of JSON. `wrong` among them are clauses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import yaml  # type: ignore[import-untyped]

from pipespec.config.entries import numbered

MODULE = "pipespec.extras.device_check.check_device"
# Seconds for all parts together.
LIMIT_S = 600.0
# The last line of what a part prints is its findings.
MARK = "findings: "
# A killed part must not leave the compiler's own processes behind.
ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
LAST_WORDS = 300


@dataclass(frozen=True)
class Part:
    """A part of the check: its function in `correctness`, what it is about, and the seconds that it
    may take."""

    name: str
    title: str
    limit_s: float


PARTS = (
    Part("machine", "Software and devices", 30),
    Part("attention", "Attention backends, beside attention by its definition", 120),
    Part("graphs", "CUDA graphs of layers and output head", 80),
    Part("packed_weights", "Products of weights in few bits", 60),
    Part("compiled", "torch.compile", 200),
)


def check_device(
    device: str, on_part: Callable[[Part, Mapping[str, Any]], None] = lambda part, found: None
) -> dict[str, Any]:
    """All findings, as JSON values, of a device as torch names it. `on_part` is called after each
    part with its findings."""
    began = time.monotonic()
    found: dict[str, Any] = {}
    for part in PARTS:
        left = LIMIT_S - (time.monotonic() - began)
        found[part.name] = _run(part, device, min(part.limit_s, left))
        on_part(part, found[part.name])
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "seconds": round(time.monotonic() - began, 1),
        "ok": not any(map(faults, found.values())),
        "parts": found,
    }


def _run(part: Part, device: str, limit_s: float) -> dict[str, Any]:
    if limit_s <= 0:
        return {"failed": f"it was not begun, as {LIMIT_S:.0f} s had passed"}
    try:
        ended = subprocess.run(
            [sys.executable, "-m", MODULE, part.name, device],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"it was ended after {limit_s:.0f} s"}
    lines = ended.stdout.splitlines()
    if ended.returncode == 0 and lines and lines[-1].startswith(MARK):
        answer: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
        return answer
    last_words = " ".join(ended.stderr.split())[-LAST_WORDS:] or "it wrote nothing"
    return {"failed": f"its process ended with {ended.returncode}: {last_words}"}


def main() -> None:
    import torch

    from pipespec.extras.device_check import correctness
    from pipespec.system.device_copy import make_current

    name, device = sys.argv[1:]
    part = next(part for part in PARTS if part.name == name)
    device = numbered(device)
    make_current(device)
    with torch.inference_mode():
        found = getattr(correctness, part.name)(torch.device(device))
    print(MARK + json.dumps(found), flush=True)


# --- what is said of the findings -------------------------------------------------------------


def faults(found: Mapping[str, Any]) -> list[str]:
    """What is wrong in the findings of a part, as clauses."""
    return [*([found["failed"]] if "failed" in found else []), *found.get("wrong", [])]


def page(found: Mapping[str, Any]) -> str:
    """The findings as a page of text, to attach to a report; ends with a newline."""
    parts: Mapping[str, Any] = found["parts"]
    wrong = [f"- {part.title}: {why}" for part in PARTS for why in faults(parts[part.name])]
    lines = [
        f"pipespec doctor --gpu, {found['device']}, {found['date']}, {found['seconds']} s",
        "",
        "Not everything passed:" if wrong else "Everything that ran passed.",
        *wrong,
    ]
    titled = json.dumps({part.title: parts[part.name] for part in PARTS})
    rounded = json.loads(titled, parse_float=lambda number: float(f"{float(number):.3g}"))
    text = yaml.safe_dump(rounded, sort_keys=False, width=100).replace(": null\n", ": passes\n")
    return "\n".join(lines) + f"\n\n{text}"


if __name__ == "__main__":
    main()
