"""Tries grammars in a process of its own.

llguidance bounds neither the time nor the memory in which it compiles one, of `multipleOf` or of
patterns that must all match. The system ends the process if that takes too long."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import IO

from pipespec.engine.checkpoint.tokenizer import BackendTokenizer
from pipespec.engine.llguidance_backend import TOO_COMPLEX, Grammars
from pipespec.sampling.grammar import GrammarFailed

# Seconds of processor time after which the process is ended, some more than any grammar may take.
MOST_S = 1


class GrammarProbe:
    """Checks grammars for the tokens of one model, for any thread, one at a time. The process
    starts with the first, and ends with its standard input."""

    def __init__(self, tokenizer: BackendTokenizer, vocab_size: int, eos: tuple[int, ...]):
        self._model = tokenizer.backend, vocab_size, eos
        self._turn = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end: Callable[[], object] = lambda: None

    def check(self, grammar: str) -> None:
        """Raise GrammarFailed as `Grammars.check` does, and for a grammar that takes too long."""
        with self._turn:
            if self._process is None:
                self._process = self._start()
            assert self._process.stdin is not None and self._process.stdout is not None
            try:
                _write(self._process.stdin, grammar)
                why = json.loads(self._process.stdout.readline())
            except (BrokenPipeError, ValueError):  # it has ended
                why, self._process = TOO_COMPLEX, None
                self._end()
        if why:
            raise GrammarFailed(why)

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            process_group=0,  # Ctrl-C is for the server
        )
        self._end = weakref.finalize(self, _kill, process)
        assert process.stdin is not None
        _write(process.stdin, self._model)
        return process


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _write(stream: IO[str], value: object) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


def serve() -> None:
    """Reply to each grammar of standard input why it cannot be followed; "": it can be."""
    backend, vocab_size, eos = json.loads(sys.stdin.readline())
    grammars = Grammars(lambda: BackendTokenizer(backend), vocab_size, eos)
    for line in sys.stdin:
        try:
            grammars.read_tokens()
            most = math.ceil(time.process_time()) + MOST_S
            resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
            grammars.check(json.loads(line))
            why = ""
        except GrammarFailed as error:
            why = str(error)
        _write(sys.stdout, why)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(5)  # before it come the tokens of others
    serve()
