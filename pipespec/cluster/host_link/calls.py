"""The program at the other end of a `Conversation` (`programs`): its functions are called over its
standard input and output, one after the other.

A call is a line of JSON, `{"do": NAME, ...}`, and its answer one, `{"result": ...}` or
`{"error": SENTENCE}`. Before the first answer comes `{"version": ...}`, and before each of them may
come notes, objects with other keys. Empty lines are signs of life, in both directions. The program
ends with its standard input, or once that is silent.
"""

from __future__ import annotations

import json
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import IO, Any

from pipespec.errors import PipespecError
from pipespec.system.versions import own_version

# Seconds between two signs of life, and without any after which the other side has ended.
ALIVE_S, SILENCE_S = 5.0, 40.0


def lines_of(stream: IO[bytes]) -> Iterator[bytes]:
    """The lines of a pipe that are not empty, until it ends or is silent for too long. Every part
    of a line is a sign of life."""
    line, readable = bytearray(), select.poll()  # as `select.select` takes no descriptor above 1023
    readable.register(stream, select.POLLIN)
    while readable.poll(SILENCE_S * 1e3):
        if not (chunk := os.read(stream.fileno(), 2**16)):
            return
        *ended, rest = chunk.split(b"\n")
        for each in ended:
            if line + each:
                yield bytes(line + each)
            line.clear()
        line += rest


class Answers:
    """Standard output as the caller reads it; what else is printed goes to standard error."""

    def __init__(self) -> None:
        self._stream = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        self._writing = threading.Lock()
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def note(self, **said: Any) -> None:
        """Tell the caller something; nothing: that this lives."""
        text = json.dumps(said, default=asdict) if said else ""
        with self._writing, suppress(BrokenPipeError):
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def answer_calls(self, call: Callable[..., Any]) -> None:
        """Have `call` do what is asked for, given a name and the arguments, until the end of this
        process. It raises PipespecError with a sentence for users."""
        calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.note(version=own_version())
        for task in (self._show_life, lambda: _receive(calls)):
            threading.Thread(target=task, daemon=True).start()
        while True:
            asked = json.loads(calls.get())
            try:
                self.note(result=call(asked.pop("do"), **asked))
            except PipespecError as error:
                self.note(error=str(error))
            except Exception as error:  # noqa: BLE001 - the caller reports it
                self.note(error=f"{type(error).__name__}: {error}")

    def _show_life(self) -> None:
        while True:
            self.note()
            time.sleep(ALIVE_S)


def _receive(calls: queue.SimpleQueue[bytes]) -> None:
    try:
        for line in lines_of(sys.stdin.buffer):
            calls.put(line)
    finally:
        os._exit(0)  # threads may still work, and dismantling torch takes a second
