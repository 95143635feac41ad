"""The findings of the check as a page of text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pipespec.instruments.device_check.check_device import PARTS
from pipespec.instruments.device_check.verdict import faults


def page(found: Mapping[str, Any]) -> str:
    """A page to attach to a report; ends with a newline."""
    parts: Mapping[str, Any] = found["parts"]
    lines = [
        f"pipespec doctor --gpu, {found['device']}, {found['date']}, {found['seconds']} s",
        "",
        found["fastest"],
        "Everything that ran passed." if not _faults(parts) else "Not everything passed:",
        *(f"- {fault}" for fault in _faults(parts)),
    ]
    for part in PARTS:
        lines += ["", part.title, *_lines(parts[part.name])]
    return "\n".join(lines) + "\n"


def _faults(parts: Mapping[str, Any]) -> list[str]:
    return [f"{part.title}: {why}" for part in PARTS for why in faults(part.name, parts[part.name])]


def _lines(value: Any, depth: int = 1) -> Iterator[str]:
    """Nested findings, one line for each value."""
    blank = "  " * depth
    for name, each in value.items():
        if isinstance(each, Mapping) and each:
            if all(isinstance(inner, int | float) for inner in each.values()):
                row = ", ".join(f"{key}: {_number(inner)}" for key, inner in each.items())
                yield f"{blank}{name}: {row}"
            else:
                yield f"{blank}{name}"
                yield from _lines(each, depth + 1)
        elif isinstance(each, list) and each and isinstance(each[0], Mapping):
            for inner in each:
                yield f"{blank}{name}: {', '.join(f'{key} {part}' for key, part in inner.items())}"
        else:
            yield f"{blank}{name}: {_number(each)}"


def _number(value: Any) -> str:
    if value is None:
        return "passes"
    if isinstance(value, float):
        return f"{value:.3g}"
    return value if isinstance(value, str) else json.dumps(value)
