"""How long a server's event loop takes to answer a second client, as a process of its own.

    with watching(url, pid) as stalls:
        ...
    longest(stalls, began_ns, ended_ns)    # seconds: the longest stall in that time

The second client asks for /health again and again over one connection. A late reply is the
server's fault only as far as the server was computing meanwhile: on a machine that does something
else, too, either side may have waited for a processor. So a stall is the shorter of both, the time
until the reply and the processor time of the server's process in that time.
"""

import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# Shorter ones are not kept.
KEPT_S = 0.01
PAUSE_S = 0.002
ANSWER_S = 60.0
ROOT = Path(__file__).parents[2]
# When it was asked and answered, in ns of the monotonic clock, and the stall in seconds.
Stall = tuple[int, int, float]


@contextmanager
def watching(url: str, pid: int) -> Iterator[list[Stall]]:
    """Watch the server at `url`, whose process is `pid`, for as long as the block lasts, at whose
    end the list is filled."""
    found: list[Stall] = []
    command = [sys.executable, "-m", __name__, url.removeprefix("http://"), str(pid)]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, text=True, cwd=ROOT)
        try:
            yield found
        finally:
            process.communicate()
            assert process.returncode == 0, "the second client failed"
            out.seek(0)
            found += [tuple(json.loads(line)) for line in out]


def longest(stalls: Sequence[Stall], began_ns: int, ended_ns: int) -> float:
    """The longest stall that overlaps this time of the monotonic clock, in seconds."""
    within = (s for since, until, s in stalls if since < ended_ns and until > began_ns)
    return max(within, default=0.0)


def watch(address: str, pid: int) -> None:
    """Print each stall until the end of standard input."""
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    connection = http.client.HTTPConnection(address, timeout=ANSWER_S)
    # The processor clock of another process (clock_getcpuclockid): all its threads together.
    processor = (~pid << 3) | 2
    while not over.wait(PAUSE_S):
        used_ns, began_ns = time.clock_gettime_ns(processor), time.monotonic_ns()
        connection.request("GET", "/health")
        connection.getresponse().read()
        ended_ns = time.monotonic_ns()
        used_ns = time.clock_gettime_ns(processor) - used_ns
        stall_s = min(ended_ns - began_ns, used_ns) / 1e9
        if stall_s > KEPT_S:
            print(json.dumps([began_ns, ended_ns, stall_s]))


if __name__ == "__main__":
    watch(sys.argv[1], int(sys.argv[2]))
