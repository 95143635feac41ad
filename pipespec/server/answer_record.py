"""A record of the token ids of requests and their answers, for `python -m tools.distill_draft
--answers`: in a folder that the user has named, and nowhere else. Off by default.

A line of JSON is an answer: the target's name, and the ids of `prompt` and `answer`. Files are
filled one after another; the oldest go, so that all together keep to a bound.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from threading import Lock

from pipespec.errors import ConfigError, print_error

# Of all files, some 13 million tokens, and of one, which the answer that fills it may exceed.
MOST_BYTES, FILE_BYTES = 64 * 2**20, 4 * 2**20
FILES = "answers-*.jsonl"


class AnswerRecord:
    """Writes answers, in any thread. Raises ConfigError unless the folder, made if need be, is one
    that only this user may open."""

    def __init__(self, name: str, target: str = ""):
        self.folder, self._target = Path(name).expanduser().absolute(), target
        self._lock = Lock()
        self._file: Path | None = None
        self._size = 0  # of the file
        self._failed = False
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            private = not self.folder.stat().st_mode & 0o077
        except OSError as error:
            raise ConfigError(
                f"Answers cannot be kept in {name!r}: {error.strerror}; name a folder of yours."
            ) from None
        if not private or not os.access(self.folder, os.W_OK | os.X_OK):
            raise ConfigError(
                f"Answers are kept in a folder that only you may open, and {name!r} is open to "
                "others or closed to you; run chmod 700, or name another folder."
            )

    def add(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Write prompts and their answers. A failure ends the record with one sentence."""
        with self._lock:
            try:
                for prompt, answer in texts:
                    if answer and not self._failed:
                        self._write(prompt, answer)
            except OSError as error:
                self._failed = True
                print_error(f"Answers are no longer kept in {self.folder}: {error.strerror}.")

    def _write(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        if self._file is None or self._size > FILE_BYTES:
            self._file = self._next_file()
        line = {"target": self._target, "prompt": prompt, "answer": answer}
        with open(self._file, "a", encoding="ascii", opener=partial(os.open, mode=0o600)) as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._size = file.tell()

    def _next_file(self) -> Path:
        """In order of time, so that two servers have files of their own; makes room for it."""
        files = sorted(self.folder.glob(FILES))
        sizes = [each.stat().st_size for each in files]
        while sum(sizes) > MOST_BYTES - FILE_BYTES:
            files.pop(0).unlink(missing_ok=True)
            sizes.pop(0)
        return self.folder / FILES.replace("*", f"{time.time_ns():020}")
