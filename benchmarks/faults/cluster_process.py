"""The cluster in which `benchmarks.faults.chaos` causes faults, as a process of its own.

It runs `tools.rig.driver`, on this machine or on the first host of a test bed. All processes that
it starts have TMPDIR set to one folder of the run, and are found by that.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
import yaml

from benchmarks.common.experiment import ROOT
from pipespec.client import registry
from tools.rig.testbed import Testbed

# Log lines that are shown when something goes wrong.
KEPT_LINES = 60
# Seconds within which every process of a cluster must end after it.
GRACE_S = 10.0
# A folder that torch keeps for the user's next program.
CACHE = "torchinductor_"
NO_ENVIRONMENT: Mapping[str, str] = {}


class ClusterFailed(Exception):
    """The cluster ended, or did not answer in time."""


class ClusterProcess:
    """A running cluster.

    Args:
        overrides: of the cluster.
        folder: a new folder for its temporary files.
        bed: the test bed, on whose first host the launcher runs; None: this machine.
        patience_s: how long an answer may take.
    """

    def __init__(
        self, overrides: Sequence[str], folder: Path, bed: Testbed | None, patience_s: float
    ):
        self.folder = folder
        self._bed = bed
        self._patience_s = patience_s
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.log: deque[str] = deque(maxlen=KEPT_LINES)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        options: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
            "env": {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": path},
            "start_new_session": True,  # Ctrl-C is for us
        }
        argv = [sys.executable, "-m", "tools.rig.driver", *overrides]
        if bed is None:
            self._process = subprocess.Popen(argv, **options)
        else:
            self._process = bed.popen(bed.hosts[0], argv, **options)
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Self:
        try:
            self.expect("ready")
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(GRACE_S if kind else self._patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the driver; `expect` fails if the driver has ended."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def expect(self, *kinds: str) -> dict[str, Any]:
        """The next message, which has one of these keys. Raises ClusterFailed."""
        try:
            message = self._messages.get(timeout=self._patience_s)
        except queue.Empty:
            raise ClusterFailed(f"The cluster was silent for {self._patience_s:g} s.") from None
        if message is None:
            raise ClusterFailed("The cluster ended.")
        assert any(kind in message for kind in kinds), f"the driver sent {message}"
        return message

    def settle(self, epoch: int) -> int:
        """Wait until all ranks are in this epoch or a later one; the epoch that they are in."""
        self.send({"settle": epoch})
        return int(self.expect("settled")["settled"])

    def resource_counts(self) -> dict[str, int]:
        """The cluster's processes, descriptors and threads."""
        return resource_counts(self.folder, self._bed)

    def leftovers(self) -> dict[str, list[str]]:
        """Processes, sockets and files that exist after the cluster's end."""
        return leftovers(self.folder, self._bed)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith("{"):
                self.log.append(line.rstrip())
                continue
            message = json.loads(line)
            if "log" in message:
                self.log.append(f"{message['log']}: {message['line']}")
            else:
                self._messages.put(message)
        self._messages.put(None)


def resource_counts(folder: Path, bed: Testbed | None) -> dict[str, int]:
    """Processes, descriptors and threads of a cluster with its temporary files in `folder`."""
    found = dict.fromkeys(("processes", "descriptors", "threads"), 0)
    for process in processes(folder, bed):
        with suppress(psutil.NoSuchProcess):
            found["descriptors"] += process.num_fds()
            found["threads"] += process.num_threads()
            found["processes"] += 1
    return found


def leftovers(folder: Path, bed: Testbed | None) -> dict[str, list[str]]:
    """Processes, sockets and files of such a cluster some seconds after its end, except logs."""
    deadline = time.monotonic() + GRACE_S
    while (left := list(processes(folder, bed))) and time.monotonic() < deadline:
        time.sleep(0.1)
    sockets: list[str] = []
    names: list[str] = []
    for process in left:
        with suppress(psutil.Error):
            names.append(" ".join(process.cmdline())[:80])
            sockets += [str(socket.laddr) for socket in process.net_connections("all")]
    files: list[str] = []
    for path in sorted(folder.rglob("*")):
        inner = path.is_dir() and any(path.iterdir())
        kept = path.name.startswith(CACHE) or path.suffix == registry.LOG
        if not inner and not kept:
            kind = sockets if path.is_socket() else files
            kind.append(str(path.relative_to(folder)))
    return {"processes": names, "sockets": sockets, "files": files}


def processes(folder: Path, bed: Testbed | None) -> Iterator[psutil.Process]:
    """All processes that a cluster has started, whichever parent they have now."""
    inside = {pid for host in bed.hosts for pid in bed.processes(host)} if bed else set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            marked = process.environ().get("TMPDIR", "").startswith(str(folder))
            listener = "[listener]" in " ".join(process.cmdline())
            zombie = process.status() == psutil.STATUS_ZOMBIE
            if (marked or process.pid in inside) and not listener and not zombie:
                yield process


def hosts_file(
    bed: Testbed, stages: int, folder: Path, environment: Mapping[str, str] = NO_ENVIRONMENT
) -> Path:
    """A hosts file that spreads a head and `stages` stages evenly over the bed's hosts.

    Their processes have the variables of `environment` too.
    """
    each, more = divmod(stages + 1, len(bed.hosts))
    path = bed.hosts_file({host: each + (i < more) for i, host in enumerate(bed.hosts)})
    hosts_file = yaml.safe_load(path.read_text())
    own = {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    hosts_file["defaults"]["env"] |= {**own, **environment}
    path.write_text(yaml.safe_dump(hosts_file, sort_keys=False))
    return path


def agent_pid(bed: Testbed, host: str) -> int | None:
    """The process id of a host's agent; None: it has none now."""
    for pid in bed.processes(host):
        with suppress(psutil.Error):
            if "pipespec.cluster.agent" in psutil.Process(pid).cmdline():
                return pid
    return None


def send_signal(pid: int | None, number: signal.Signals) -> bool:
    """Send a signal; False if there is no such process."""
    if pid is None:
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
