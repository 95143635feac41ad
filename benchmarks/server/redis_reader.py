"""When the tokens of requests leave Redis: a process that only reads the request log.

    python -m benchmarks.server.redis_reader

Each input line is {"url", "namespace", "first", "count"}: `count` requests from number `first`,
which may not exist yet. The output line, once all have finished, has the time in ns at which each
token was read, by request, on the machine's monotonic clock. It is a separate process because a
reader that shares a process with others waits for them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any, Self

from benchmarks.common.experiment import ROOT
from pipespec.client.registry import RunningCluster
from pipespec.controller.async_request_log import MOST_ENTRIES, block_ms
from pipespec.controller.log_records import Accepted, Finished, entries_of, event_from
from pipespec.controller.redis_connection import RedisConnection
from pipespec.controller.redis_keys import RedisKeys

WAIT_S = 1.0


class RedisReader:
    """The process, and the messages to it."""

    def __init__(self, running: RunningCluster):
        self._cluster = {"url": running.url, "namespace": running.namespace}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.server.redis_reader"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def watch(self, first: int, count: int) -> None:
        """Start reading these requests."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**self._cluster, "first": first, "count": count}))
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def token_times(self) -> dict[int, list[int]]:
        """The times of each request's tokens, once all have finished."""
        assert self._process.stdout is not None
        times: dict[str, list[int]] = json.loads(self._process.stdout.readline())
        return {int(number): moments for number, moments in times.items()}


def read(wanted: dict[str, Any]) -> dict[int, list[int]]:
    """The time of each token of each request."""
    keys = RedisKeys(wanted["namespace"])
    numbers = range(wanted["first"], wanted["first"] + wanted["count"])
    found: dict[int, list[int]] = {number: [] for number in numbers}
    of_stream = {keys.events(number).encode(): number for number in numbers}
    positions = dict.fromkeys(of_stream, "0")
    options = ("COUNT", MOST_ENTRIES, "BLOCK", block_ms(WAIT_S))
    with RedisConnection(wanted["url"]) as pipe:
        while positions:
            command = ("XREAD", *options, "STREAMS", *positions, *positions.values())
            reply = pipe.call(*command, timeout=WAIT_S)
            now = time.monotonic_ns()
            for stream, entries in reply or []:
                for entry, fields in entries_of(entries):
                    positions[stream], event = entry, event_from(fields)
                    if isinstance(event, Accepted):
                        found[of_stream[stream]] += [now] * len(event.tokens)
                if isinstance(event, Finished):
                    del positions[stream]
    return found


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(read(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
