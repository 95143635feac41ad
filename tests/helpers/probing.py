"""A client in a process of its own that asks a server again and again, and the longest that it
waited: how long something held up the server's event loop.

with probing(url) as probe:
    probe.worst()       # since the last call, in seconds
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection

EVERY_S = 0.002


class Probe:
    """The other client, as the test sees it."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process
        self.worst()  # it runs

    def worst(self) -> float:
        """The longest wait since the last call, in seconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


@contextmanager
def probing(url: str) -> Iterator[Probe]:
    """A probe that ends with the block."""
    place = url.removeprefix("http://").split(":")
    with subprocess.Popen(
        [sys.executable, "-m", __name__, *place],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Probe(process)
        process.kill()


def main(host: str, port: int) -> None:
    worst = 0.0
    turn = threading.Lock()

    def ask() -> None:
        nonlocal worst
        with closing(HTTPConnection(host, port)) as connection:
            while True:
                began = time.perf_counter()
                connection.request("GET", "/version")
                reply = connection.getresponse()
                reply.read()
                assert reply.status == 200
                with turn:
                    worst = max(worst, time.perf_counter() - began)
                time.sleep(EVERY_S)

    threading.Thread(target=ask, daemon=True).start()
    for _ in sys.stdin:
        with turn:
            told, worst = worst, 0.0
        print(told, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
