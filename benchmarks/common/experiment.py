"""The options, table, stored result and plot of every benchmark.

    parser = experiment.parser(__doc__, plot=True)
    parser.add_argument("--tokens", type=int, default=64)
    options = experiment.parse(parser, tokens=16)  # their values with --quick
    ...
    experiment.publish(options, title, rows, draw=partial(draw, title, rows), unit="ms")

A stored result is JSON with its hardware, commit, date and command. Its rows have one name per
figure, which is also the heading of a column of the table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pipespec.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]


def _commit() -> str:
    """The commit of this code, which is dirty if anything but stored results was changed."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)

    changed = git("diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results").returncode
    return git("rev-parse", "--short", "HEAD").stdout.strip() + "-dirty" * bool(changed)


COMMIT = _commit()  # when this run began, whatever is committed meanwhile


# --- options ------------------------------------------------------------------------------------


def parser(doc: str, *, plot: bool = False) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks; the first line of `doc` describes it.

    `plot`: the result can also be drawn.
    """
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--quick", action="store_true", help="a small run")
    made.add_argument("--json", type=Path, help="also write the result to this file")
    if plot:
        made.add_argument("--plot", type=Path, help="draw it: this path with .png and .svg")
    return made


def parse(parser: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """The options; with --quick those of `quick` have its values."""
    options = parser.parse_args()
    if options.quick:
        vars(options).update(quick)
    return options


def numbers(text: str) -> list[int]:
    """An option such as 1,2,4."""
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    return text.split(",")


# --- results ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One measured figure and, where the design states one, its budget."""

    name: str
    value: float
    budget: float | None = None


def publish(
    options: argparse.Namespace,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    draw: Callable[[Path], None] | None = None,
    **more: Any,
) -> None:
    """Print the rows; if the options say so, store them together with `more`, and draw them."""
    show(title, rows)
    if options.json:
        store(options.json, {"title": title, "rows": rows, **more})
    if draw is not None and options.plot:
        draw(options.plot)


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table; what a row lacks is left empty."""
    table = Table(title=title)
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    for heading in headings:
        number = any(isinstance(row.get(heading), int | float) for row in rows)
        table.add_column(heading.replace("_", " "), justify="right" if number else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(heading)) for heading in headings))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def store(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result with its provenance."""
    path.write_text(json.dumps({**provenance(), **result}, indent=2) + "\n")


def provenance(program: str | None = None) -> dict[str, Any]:
    """Date, commit, command, hardware and Python of this run."""
    program = program or f"python -m {module_of(Path(sys.argv[0]))}"
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
        "commit": COMMIT,
        "command": f"{program} {shlex.join(map(_without_folders, sys.argv[1:]))}".strip(),
        "hardware": f"{model}, {os.cpu_count()} cores",
        "python": platform.python_version(),
    }


def _without_folders(argument: str) -> str:
    """An argument without the folders of a path outside this repository."""
    inside = _relative(argument, (ROOT,))
    return Path(inside).name if Path(inside).is_absolute() else inside


def module_of(program: Path) -> str:
    """The name by which `python -m` runs a program of this repository."""
    inside = program.resolve().relative_to(ROOT) if program.is_absolute() else program
    return ".".join(inside.with_suffix("").parts).removesuffix(".__main__")


# --- stored configurations ----------------------------------------------------------------------


def settings(config: Config, *temporary: Path) -> dict[str, Any]:
    """A composed configuration as JSON, with the class of each part.

    Paths are relative to the repository, or to the `temporary` folders of a run.
    """
    plain = _plain(config, (ROOT, *temporary))
    assert isinstance(plain, dict)
    return plain


def overrides(given: Sequence[str], *temporary: Path) -> list[str]:
    """Overrides as they are stored: without the paths of this machine's folders."""
    return [_relative(text, (ROOT, *temporary)) for text in given]


def _plain(value: Any, folders: Sequence[Path]) -> Any:
    if is_dataclass(value):
        named = {field.name: _plain(getattr(value, field.name), folders) for field in fields(value)}
        return {"class": type(value).__name__, **named}
    if isinstance(value, Mapping):
        return {str(key): _plain(item, folders) for key, item in value.items()}
    if isinstance(value, str):
        return _relative(value, folders)
    # Also OmegaConf's lists, which occur in a policy's settings.
    if isinstance(value, Sequence):
        return [_plain(item, folders) for item in value]
    return value


def _relative(text: str, folders: Sequence[Path]) -> str:
    for folder in folders:
        text = text.replace(f"{folder}/", "")
    return text
