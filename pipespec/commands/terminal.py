"""What the commands print, and how."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pipespec.errors import PipespecError


class OutputClosedError(Exception):
    """Whoever read our standard output has gone away."""


def write(text: str) -> None:
    """Show text at once. Raises OutputClosedError if nobody reads any more."""
    with output():
        sys.stdout.write(text)
        sys.stdout.flush()


@contextmanager
def output() -> Iterator[None]:
    """Around whatever writes to standard output: its failures, in our words."""
    try:
        yield
    except BrokenPipeError as error:
        raise OutputClosedError from error
    except OSError as error:
        raise PipespecError(f"Standard output cannot be written: {error.strerror}.") from error


@contextmanager
def progress(*names: str) -> Iterator[list[Callable[[int, int], None]]]:
    """Bars on a terminal, one per name, that go when all are full; else nothing.

    Yields what moves each bar: how much is done, and of how much.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(
        console=console, transient=True, redirect_stdout=False, disable=not console.is_terminal
    ) as bars:

        def mover(name: str) -> Callable[[int, int], None]:
            bar = bars.add_task(name, total=None)

            def move(done: int, of: int) -> None:
                bars.update(bar, completed=done, total=of)
                if bars.finished:
                    bars.stop()

            return move

        yield [mover(name) for name in names]


def labelled(labels: Mapping[str, Any]) -> str:
    """What a title must say of its figures (`pipespec.answers.labels`); "" if they are plain.

    Times of an emulated machine never look like measured ones, guesses that were made from the
    answer never like those of a draft, and a text that the target alone might not have said
    never like one that it would.
    """
    emulated = ", times EMULATED" if labels["emulated"] else ""
    synthetic = ", guesses SYNTHETIC" if labels["synthetic"] else ""
    lossy = ", text LOSSY by the verifier" if labels["lossy"] else ""
    return emulated + synthetic + lossy


def shown(value: Any) -> str:
    """A statistic as text."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return " ".join(shown(item) for item in value)
    if isinstance(value, float):
        return f"{value:.2f}"
    return "-" if value is None else str(value)
