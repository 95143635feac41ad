"""When the tokens of requests leave Redis: a reader of the log that does nothing but look.

    python -m benchmarks.tap

Each line in is {"url", "namespace", "first", "count"}: so many requests from a number on, which
nobody may have asked yet; the line out, once all have finished, is the moment in ns at which each
token was read, by request, on the machine's monotonic clock. It is a process of its own because a
reader that shares one with others waits for them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any, Self

from benchmarks.experiment import ROOT
from pipespec.client.registry import RunningCluster
from pipespec.controller.connection import Pipe
from pipespec.controller.following import Following, block_ms
from pipespec.controller.records import Accepted

WAIT_S = 1.0


class Tap:
    """The process, and how to speak to it."""

    def __init__(self, running: RunningCluster):
        self._asked = {"url": running.url, "namespace": running.namespace}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.tap"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def listen(self, first: int, count: int) -> None:
        """Read these requests from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**self._asked, "first": first, "count": count}))
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def heard(self) -> dict[int, list[int]]:
        """What it has read, once all have finished."""
        assert self._process.stdout is not None
        told: dict[str, list[int]] = json.loads(self._process.stdout.readline())
        return {int(number): moments for number, moments in told.items()}


def read(asked: dict[str, Any]) -> dict[int, list[int]]:
    """The moment of each token of each request."""
    following = Following(asked["namespace"])
    found: dict[int, list[int]] = {}
    for number in range(asked["first"], asked["first"] + asked["count"]):
        following.add(number, known=True)
        found[number] = []
    pipe = Pipe(asked["url"])
    try:
        while following:
            reply = pipe.call(*following.read(WAIT_S), timeout=block_ms(WAIT_S) / 1000)
            now = time.monotonic_ns()
            for number, event in following.events(reply):
                if isinstance(event, Accepted):
                    found[number] += [now] * len(event.tokens)
    finally:
        pipe.close()
    return found


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(read(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
