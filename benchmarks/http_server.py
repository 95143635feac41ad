"""`pipespec serve` as a process with a cluster of its own, and what can be known of both.

with HttpServer(folder, "cluster.stages=2") as server:
    asyncio.run(ask(server.door, "/v1/completions", {...}))
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.experiment import ROOT
from pipespec.client import registry
from pipespec.client.registry import RunningCluster
from pipespec.controller.connection import Pipe
from pipespec.controller.membership import Membership
from pipespec.controller.overview import look
from tools.rig.testbed import Testbed

NAME = "bench"
STATE = "XDG_STATE_HOME"  # the variable that says where the registry is
ANSWER_S = 120.0
END_S = 60.0


class Failed(Exception):
    """The server said something else than it should."""


class HttpServer:
    """A server and its cluster, once it answers; both end with the block.

    Registry and temporary files lie in `folder`; this process looks there too, for as long.
    Raises Failed.
    """

    def __init__(self, folder: Path, *settings: str, bed: Testbed | None = None):
        """`bed`: a test bed in whose first host it runs; None: this machine."""
        self._before = os.environ.get(STATE)
        os.environ[STATE] = str(folder)
        self.process = start(folder, settings, bed)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.__exit__()
            raise Failed("The server did not start.")
        self.place = Place(json.loads(line)["url"], bed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(END_S)
        if self._before is None:
            del os.environ[STATE]
        else:
            os.environ[STATE] = self._before


def start(folder: Path, settings: Sequence[str], bed: Testbed | None) -> subprocess.Popen[str]:
    """The process; the first line that it prints says where it listens."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pipespec", "serve"]
    command += ["--json", "--port", "0", "--name", NAME, *settings]
    options: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "text": True,
        "env": {**os.environ, STATE: str(folder), "TMPDIR": str(folder), "PYTHONPATH": path},
        "start_new_session": True,  # Ctrl-C is for us
    }
    if bed is None:
        return subprocess.Popen(command, **options)
    return bed.popen(bed.hosts[0], command, **options)


class Place:
    """Where a server listens, and what it says of itself."""

    def __init__(self, url: str, bed: Testbed | None = None):
        self.root = url.removesuffix("/v1")
        host, _, port = self.root.removeprefix("http://").rpartition(":")
        self._address = (host, int(port))
        self._bed = bed

    def door(self) -> socket.socket:
        """A connection to it."""
        if self._bed is None:
            return socket.create_connection(self._address)
        made = self._bed.socket(self._bed.hosts[0])
        made.connect(self._address)
        return made

    def get(self, path: str) -> str:
        """The reply to a GET."""
        with urllib.request.urlopen(self.root + path, timeout=ANSWER_S) as reply:
            text: str = reply.read().decode()
        return text

    def figure(self, name: str) -> float:
        """A figure of /metrics; of several lines of one name their sum. Raises Failed."""
        lines = [line for line in self.get("/metrics").splitlines() if not line.startswith("#")]
        found = [line for line in lines if line.partition("{")[0].partition(" ")[0] == name]
        if not found:
            raise Failed(f"/metrics has no figure {name}.")
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def load(self) -> int:
        """How many answers are waited for."""
        return int(json.loads(self.get("/load"))["server_load"])


# --- the cluster behind it ----------------------------------------------------------------------


def cluster(name: str = NAME) -> RunningCluster:
    """The cluster of a name, as it is now."""
    return registry.find(name)


def epoch(running: RunningCluster) -> int:
    """The epoch that it is in. Raises Unreachable."""
    told = look(running.url, running.namespace)
    return told.epoch if told else 0


def ranks(running: RunningCluster) -> dict[int, int]:
    """The process of every rank that takes part now. Raises Unreachable."""
    now = epoch(running)
    with Membership(running.url, running.namespace) as shared:
        return shared.attached(now)


def redis_pid(running: RunningCluster) -> int:
    """The process of its Redis."""
    pipe = Pipe(running.url)
    try:
        told: bytes = pipe.call("INFO", "server")
    finally:
        pipe.close()
    (line,) = [line for line in told.decode().splitlines() if line.startswith("process_id:")]
    return int(line.partition(":")[2])


def processes(server: int, running: RunningCluster) -> dict[str, psutil.Process]:
    """Server, launcher, Redis and ranks, by name."""
    found = {"server": server, "launcher": running.owner.pid, "redis": redis_pid(running)}
    for rank, pid in sorted(ranks(running).items()):
        found[f"stage {rank}" if rank else "head"] = pid
    return {name: psutil.Process(pid) for name, pid in found.items()}


def cpu_s(process: psutil.Process) -> float:
    """Processor time of a process so far."""
    used: Any = process.cpu_times()
    return float(used.user + used.system)
