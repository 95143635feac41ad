"""The stored results of the benchmarks, and how a page of documentation cites them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tools.docs.markdown import ROOT, table

RESULTS = ROOT / "benchmarks" / "results"
# Options that say where a result is written.
WRITTEN = re.compile(r" --(?:json|plot) [^\s`]+")
# Results of an earlier day are said to be of older code: those of this day and later are of at most
# COMMITS commits ago, which `tests/unit/test_results.py` checks.
OLDER, COMMITS = "2026-11-30", 200
# The heading of a table's column, and the format of its cells.
Column = tuple[str, str]
# What older results call the modules of today, and with which options.
CHANGED = {
    "pipespec check --gpu": "pipespec doctor --gpu",
}


def result(name: str) -> dict[str, Any]:
    """A stored result: rows, and the hardware, commit, date and command that made it."""
    stored: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return stored


def row(stored: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """The only row of a result with these values."""
    found: list[dict[str, Any]] = [x for x in stored["rows"] if values.items() <= x.items()]
    assert len(found) == 1, f"{len(found)} rows have {values}"
    return found[0]


def origin(stored: Mapping[str, Any]) -> str:
    """Hardware, commit and date of a result."""
    hardware = stored["hardware"].replace("Intel(R) Xeon(R) Processor", "Intel Xeon")
    older = ", older code" if stored["date"] < OLDER else ""
    return f"{hardware}, {stored['commit']}, {stored['date']}{older}"


def command_today(stored: Mapping[str, Any]) -> str:
    """The command that made a result, in the names of today."""
    command: str = stored["command"]
    for old, new in CHANGED.items():
        command = command.replace(old, new)
    return command


def printed(stored: Mapping[str, Any]) -> str:
    """That command as a page prints it, with the names that it had."""
    earlier = [old for old in CHANGED if old in stored["command"]]
    return f"`{command_today(stored)}`" + "".join(f" (then `{old}`)" for old in earlier)


def source(name: str) -> str:
    """Where a figure comes from: file, command, hardware, commit and date."""
    stored = result(name)
    return f"`{name}.json`: {WRITTEN.sub('', printed(stored))}; {origin(stored)}"


def command_of(*results: Mapping[str, Any]) -> str:
    """The lines under a table: where its results were made, and with which commands of today."""
    lines = [f"{origin(stored)}: {printed(stored)}" for stored in results]
    return "\n" + ";\n".join(lines) + "\n"


def brief(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.{max(0, 2 - int(math.log10(max(value, 1))))}f}"


def with_range(of: Mapping[str, float]) -> str:
    """A median, with the least and the greatest where they differ."""
    if of["min"] == of["max"]:
        return brief(of["median"])
    return f"{brief(of['median'])} ({brief(of['min'])}..{brief(of['max'])})"


def columns(listed: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> str:
    """A Markdown table with a line for each row. A column is its heading and the format of its
    cells, in which names are those of the row's values."""
    return table(
        [heading for heading, _ in listed],
        [[cell.format_map(row) for _, cell in listed] for row in rows],
    )
