"""How long a server's event loop takes to answer a second client, as a process of its own.

    with watching(url, pid) as stalls:
        ...
    stalls.within(began_ns, ended_ns)    # seconds: the longest stall in that time

The second client asks for /health again and again over one connection. A late reply is the
server's fault only as far as the server was computing meanwhile: on a machine that does something
else, too, either side may have waited for a processor. So a stall is the shorter of both, the time
until the reply and the processor time of the server's process in that time.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Shorter ones are not kept.
KEPT_S = 0.01
PAUSE_S = 0.002
ANSWER_S = 60.0
ROOT = Path(__file__).parents[2]


class Stalls:
    """What was seen so far."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, int, float]] = []
        self._until_ns = 0  # all that began earlier is known
        self._news = threading.Condition()

    def add(self, began_ns: int, ended_ns: int, stall_s: float) -> None:
        with self._news:
            self._until_ns = began_ns
            if stall_s > KEPT_S:
                self._seen.append((began_ns, ended_ns, stall_s))
            self._news.notify_all()

    def within(self, began_ns: int, ended_ns: int) -> float:
        """The longest stall that overlaps this time of the monotonic clock, in seconds."""
        with self._news:
            assert self._news.wait_for(lambda: self._until_ns > ended_ns, ANSWER_S)
            return max(
                (
                    stall
                    for since, until, stall in self._seen
                    if since < ended_ns and until > began_ns
                ),
                default=0.0,
            )


@contextmanager
def watching(url: str, pid: int) -> Iterator[Stalls]:
    """Watch the server at `url`, whose process is `pid`, for as long as the block lasts."""
    found = Stalls()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.stalls", url.removeprefix("http://"), str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdin is not None and process.stdout is not None
    stdout = process.stdout
    assert stdout.readline() == "ready\n"

    def listen() -> None:
        for line in stdout:
            found.add(*json.loads(line))

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        yield found
    finally:
        process.stdin.close()
        listener.join()
        assert process.wait() == 0, "the second client failed"


def watch(address: str, pid: int) -> None:
    """Print each answer as [asked, answered, stall in s], the first two in ns of the monotonic
    clock, until the end of standard input."""
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    connection = http.client.HTTPConnection(address, timeout=ANSWER_S)
    # The processor clock of another process (clock_getcpuclockid): all its threads together.
    processor = (~pid << 3) | 2
    print("ready", flush=True)
    while not over.wait(PAUSE_S):
        used_ns, began_ns = time.clock_gettime_ns(processor), time.monotonic_ns()
        connection.request("GET", "/health")
        connection.getresponse().read()
        ended_ns = time.monotonic_ns()
        used_ns = time.clock_gettime_ns(processor) - used_ns
        stall_s = min(ended_ns - began_ns, used_ns) / 1e9
        print(json.dumps([began_ns, ended_ns, stall_s]), flush=True)


if __name__ == "__main__":
    watch(sys.argv[1], int(sys.argv[2]))
