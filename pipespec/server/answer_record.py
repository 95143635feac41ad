"""A record of the token ids of requests and their answers, for `python -m tools.distill_draft
--answers`: in a folder that the user has named, and nowhere else. Off by default.

A line of JSON is an answer: the target's name, and the ids of `prompt` and `answer`. Files are
filled one after another; the oldest go, so that all together keep to a bound.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from pipespec.errors import ConfigError, print_error

# Of all files, some 13 million tokens, and of one, which the answer that fills it may exceed.
MOST_BYTES, FILE_BYTES = 64 * 2**20, 4 * 2**20
FILES = "answers-*.jsonl"
# Answers that wait for a slow disk; those beyond are left out.
MOST_WAITING = 64


def prepare_folder(name: str) -> Path:
    """The folder of a record, made if need be, which only this user may open. Raises
    ConfigError."""
    folder = Path(name).expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        shared = folder.stat().st_mode & 0o077
    except OSError as error:
        raise ConfigError(
            f"Answers cannot be kept in {name!r}: {error.strerror}; name a folder of yours."
        ) from None
    if shared or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"Answers are kept in a folder that only you may open, and {name!r} is open to others "
            "or closed to you; run chmod 700, or name another folder."
        )
    return folder


class AnswerRecord:
    """Writes answers in a thread of its own, which no request waits for. Close it when done."""

    def __init__(self, folder: Path, target: str):
        self._folder, self._target = folder, target
        self._thread = ThreadPoolExecutor(1, "answers")
        self._file: Path | None = None
        self._size = 0  # of the file
        self._waiting = 0
        self._failed = False  # or closed

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Write an answer, in an event loop. A failure ends the record with one sentence."""
        if self._failed or not answer or self._waiting >= MOST_WAITING:
            return
        self._waiting += 1
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(self._thread, self._write, [*prompt], [*answer])
        writing.add_done_callback(self._written)

    def close(self) -> None:
        self._failed = True  # nothing is added any more
        self._thread.shutdown()

    def _written(self, writing: asyncio.Future[None]) -> None:
        self._waiting -= 1
        error = writing.exception()
        if error is not None and not self._failed:
            self._failed = True
            print_error(f"Answers are no longer kept in {self._folder}: {error}.")

    def _write(self, prompt: list[int], answer: list[int]) -> None:
        if self._file is None or self._size > FILE_BYTES:
            self._file = self._next_file()
        line = {"target": self._target, "prompt": prompt, "answer": answer}
        with open(self._file, "a", encoding="ascii", opener=partial(os.open, mode=0o600)) as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._size = file.tell()

    def _next_file(self) -> Path:
        """In order of time, so that two servers have files of their own; makes room for it."""
        files = sorted(self._folder.glob(FILES))
        sizes = [each.stat().st_size for each in files]
        while sum(sizes) > MOST_BYTES - FILE_BYTES:
            files.pop(0).unlink(missing_ok=True)
            sizes.pop(0)
        return self._folder / FILES.replace("*", f"{time.time_ns():020}")
