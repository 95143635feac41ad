"""What every benchmark prints and stores: a table, and JSON with hardware, commit and date."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Row:
    """One measured figure and, where the design states one, its budget."""

    name: str
    value: float
    budget: float | None = None


def circumstances() -> dict[str, Any]:
    """Where and when: what a reader needs to repeat a figure or to distrust it."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "command": " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "hardware": f"{model}, {os.cpu_count()} cores",
        "python": platform.python_version(),
    }


def publish(title: str, rows: list[Row], *, unit: str, path: Path | None) -> None:
    """Print the rows as a table; with `path`, store them too."""
    table = Table(title=title)
    for heading in ("what", unit, "budget"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for row in rows:
        budget = "" if row.budget is None else f"{row.budget:g}"
        table.add_row(row.name, f"{row.value:.4f}", budget)
    Console().print(table)
    if path is not None:
        store(path, {"title": title, "unit": unit, "rows": [asdict(row) for row in rows]})


def publish_table(
    title: str, rows: Sequence[Mapping[str, Any]], *, path: Path | None, **more: Any
) -> None:
    """Print rows that have several figures each; with `path`, store them and `more` too."""
    table = Table(title=title)
    for heading, value in rows[0].items():
        number = isinstance(value, int | float)
        table.add_column(heading.replace("_", " "), justify="right" if number else "left")
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(table)
    if path is not None:
        store(path, {"title": title, "rows": rows, **more})


def store(path: Path, result: dict[str, Any]) -> None:
    """Write a result with its circumstances."""
    path.write_text(json.dumps(circumstances() | result, indent=2) + "\n")
