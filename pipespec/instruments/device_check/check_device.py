"""Runs the parts of the check, each in a process of its own.

A part that crashes, hangs or damages the state of the device fails alone: its process ends, and
with it everything that it has on the device.
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

from pipespec.instruments.device_check.verdict import fastest, faults

MODULE = "pipespec.instruments.device_check.run_part"
# Seconds for all parts together.
LIMIT_S = 600.0
# The last line of what a part prints is its findings.
MARK = "findings: "
# A killed part must not leave the compiler's own processes behind.
ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
LAST_WORDS = 300


@dataclass(frozen=True)
class Part:
    """A part of the check: its name, what it is about, and the seconds that it may take."""

    name: str
    title: str
    limit_s: float


PARTS = (
    Part("machine", "Software and devices", 30),
    Part("attention", "Attention backends, beside attention by its definition", 120),
    Part("graphs", "CUDA graphs of layers and output head", 80),
    Part("packed_weights", "Products of weights in few bits", 60),
    Part("hops", "Batches from one process to the next", 40),
    Part("stage", "A stage, by rows and context, beside what reading its memory takes", 120),
    Part("draft", "A draft's round", 60),
    Part("eager", "Transformers in eager mode", 40),
    Part("compile", "torch.compile", 200),
)


def check_device(
    device: str, on_part: Callable[[Part, Mapping[str, Any]], None] = lambda part, found: None
) -> dict[str, Any]:
    """All findings, as JSON values.

    Args:
        device: as torch names it, "cuda:0" or "cpu".
        on_part: called after each part with its findings.
    """
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
        "ok": not any(True for name, each in found.items() for _ in faults(name, each)),
        "fastest": fastest(found),
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
    return {"failed": f"its process ended with {ended.returncode}: {_last_words(ended.stderr)}"}


def _last_words(errors: str) -> str:
    return " ".join(errors.split())[-LAST_WORDS:] or "it wrote nothing"
