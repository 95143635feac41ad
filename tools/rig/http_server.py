"""`pipespec serve` as a process with its own cluster, and the processes of both.

with HttpServer(folder, "cluster.stages=2") as server:
    stream = await open_stream(server.address.connect, "/v1/completions", {...})
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Self
from unittest import mock

from redis import Redis

from pipespec.client.registry import RunningCluster
from pipespec.controller.cluster_status import read_status
from pipespec.controller.membership import Membership
from tools.rig.testbed import Testbed

ROOT = Path(__file__).resolve().parents[2]
NAME = "bench"
STATE_VARIABLE = "XDG_STATE_HOME"  # the variable that says where the registry is
END_S = 60.0
NO_ENVIRONMENT: Mapping[str, str] = {}


class ServerFailed(Exception):
    """The server did not start, or answered something unexpected."""


class HttpServer:
    """A server and its cluster; both end with the block.

    The registry and temporary files are in `folder`; this process uses that registry too until the
    block ends. Raises ServerFailed.
    """

    def __init__(
        self,
        folder: Path,
        *settings: str,
        bed: Testbed | None = None,
        environment: Mapping[str, str] = NO_ENVIRONMENT,
    ):
        """`bed`: a test bed, in whose first host the server runs; None: this machine.
        `environment`: variables that its processes have besides this one's."""
        self._registry = mock.patch.dict(os.environ, {STATE_VARIABLE: str(folder)})
        self._registry.start()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "pipespec", "serve"]
        command += ["--json", "--port", "0", "--name", NAME, *settings]
        popen = subprocess.Popen if bed is None else partial(bed.popen, bed.hosts[0])
        self.process = popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": path, **environment},
            start_new_session=True,  # Ctrl-C is for us
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.__exit__()
            raise ServerFailed("The server did not start.")
        self.address = ServerAddress(json.loads(line)["url"], bed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(END_S)
        self._registry.stop()


class ServerAddress:
    """The address of a server."""

    def __init__(self, url: str, bed: Testbed | None = None):
        host, _, port = url.removesuffix("/v1").removeprefix("http://").rpartition(":")
        self._address = (host, int(port))
        self._bed = bed

    def connect(self) -> socket.socket:
        """A connection to it."""
        if self._bed is None:
            return socket.create_connection(self._address)
        made = self._bed.socket(self._bed.hosts[0])
        made.connect(self._address)
        return made


# --- its cluster -------------------------------------------------------------------------------


def current_epoch(running: RunningCluster) -> int:
    """The epoch that a cluster is in. Raises Unreachable."""
    found = read_status(running.url, running.namespace)
    return found.epoch if found else 0


def rank_pids(running: RunningCluster) -> dict[int, int]:
    """The process id of every rank of the current epoch. Raises Unreachable."""
    now = current_epoch(running)
    with Membership(running.url, running.namespace) as shared:
        return shared.attached(now)


def redis_pid(running: RunningCluster) -> int:
    """The process id of a cluster's Redis."""
    with Redis.from_url(running.url) as server:
        return int(server.info("server")["process_id"])
