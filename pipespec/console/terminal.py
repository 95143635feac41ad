"""What the commands print, and how."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from pipespec.errors import PipespecError
from pipespec.system.exit_codes import OutputClosedError
from pipespec.system.validation import MOST_BYTES, Unreadable, decode


def write(text: str) -> None:
    """Show text at once. Raises OutputClosedError if its reader has closed it."""
    with output():
        sys.stdout.write(text)
        sys.stdout.flush()


def show(*parts: str | Table, stderr: bool = False) -> None:
    """Show sentences and tables, without markup. Raises OutputClosedError."""
    with output("Standard error" if stderr else "Standard output"):
        out = _console(stderr=stderr)
        for part in parts:
            # A sentence may be copied, and is wrapped by the terminal.
            out.print(part, soft_wrap=isinstance(part, str))


def standard_input() -> str:
    """All that comes through standard input. Raises Unreadable."""
    try:
        data = sys.stdin.buffer.read(MOST_BYTES + 1)
    except OSError as error:
        raise Unreadable(error.strerror or "unknown error") from None
    if len(data) > MOST_BYTES:
        raise Unreadable(f"it has more than {MOST_BYTES} bytes")
    return decode(data)


def _console(*, stderr: bool) -> Console:
    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise OutputClosedError

    return Plain(stderr=stderr, markup=False, emoji=False, highlight=False)


@contextmanager
def output(name: str = "Standard output") -> Iterator[None]:
    """Around whatever writes to standard output: its failures, in our words."""
    try:
        yield
    except BrokenPipeError as error:
        raise OutputClosedError from error
    except OSError as error:
        raise PipespecError(f"{name} cannot be written: {error.strerror}.") from error
    except UnicodeEncodeError as error:
        raise PipespecError(
            f"{name} cannot be written: it takes {error.encoding} alone; set PYTHONUTF8=1."
        ) from error


def _bars(*columns: ProgressColumn) -> Progress:
    out = _console(stderr=True)
    hidden = not out.is_terminal
    return Progress(*columns, console=out, transient=True, redirect_stdout=False, disable=hidden)


@contextmanager
def progress(*names: str, of_bytes: bool = False) -> Iterator[list[Callable[[int, int], None]]]:
    """Bars on a terminal until all are full, with the time that they have taken, and `of_bytes`
    their speed; one of which nothing is done yet moves to and fro. Yields what moves each: how
    much, of how much."""
    speed = [TransferSpeedColumn()] if of_bytes else []
    shown = TextColumn("{task.description}"), BarColumn(), *speed, TimeElapsedColumn()
    with _bars(*shown) as bars:

        def move(bar: TaskID, done: int, of: int) -> None:
            bars.update(bar, completed=done, total=of if done else None)
            if bars.finished:
                bars.stop()

        yield [partial(move, bars.add_task(name, total=None)) for name in names]


@contextmanager
def named_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Bars of bytes on a terminal, which go when the block ends; else nothing. Yields what moves
    the bar of a name: bytes done, and of how many. It may be called from several threads."""
    shown = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with _bars(*shown) as bars:
        names: dict[str, TaskID] = {}

        def move(name: str, done: int, of: int) -> None:
            if name not in names:
                names[name] = bars.add_task(name, total=None)
            bars.update(names[name], completed=done, total=of)

        yield move


def table_of(title: str, *headings: str, left: int = 1) -> Table:
    """A table with `left` columns that are aligned to the left, and others to the right."""
    table = Table(box=SIMPLE_HEAD, padding=0, title=title or None, title_justify="left")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < left else "right")
    return table


def labelled(labels: Mapping[str, Any]) -> str:
    """What a title must say of its figures (`client.answers.labels`); "" if they are plain. Times
    of an emulated machine never look like measured ones, draft tokens that were made from the
    answer never like those of a draft, and a text that the target alone might not have said never
    like one that it would."""
    emulated = ", times EMULATED" if labels["emulated"] else ""
    synthetic = ", draft tokens SYNTHETIC" if labels["synthetic"] else ""
    lossy = ", text LOSSY by the verifier" if labels["lossy"] else ""
    return emulated + synthetic + lossy


def shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        pairs = any(isinstance(item, list | tuple) for item in value)
        between = "; " if any(isinstance(item, dict) for item in value) else ", " * pairs or " "
        return between.join(shown(item) for item in value)
    if isinstance(value, float):
        return f"{value:.2f}"
    return "-" if value is None else str(value)
