"""The cluster that `benchmarks.chaos` does its faults to: asked, struck, and counted at its end.

The cluster runs in a process of its own (`tools.rig.driver`), on this machine or from the first
host of a test bed. Whatever it starts finds its temporary files in one folder of the run, and is
found by that folder: the environment names it.
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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
import yaml

from benchmarks.experiment import ROOT
from tools.rig.testbed import Testbed

# Log lines that are shown when something goes wrong.
KEPT_LINES = 60
# Seconds within which all has ended that ends by itself after the cluster.
GRACE_S = 10.0
# A folder that torch keeps for the user's next program.
CACHE = "torchinductor_"


class Broken(Exception):
    """The cluster ended, or said nothing for too long."""


class Victim:
    """A running cluster.

    Args:
        overrides: of the cluster.
        folder: new; for all its temporary files.
        bed: the test bed in whose first host the launcher runs; None: this machine.
        patience_s: how long an answer may take.
    """

    def __init__(
        self, overrides: Sequence[str], folder: Path, bed: Testbed | None, patience_s: float
    ):
        self.folder = folder
        self._bed = bed
        self._patience_s = patience_s
        self._told: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
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
        """Say something to the driver; that it has ended shows in what it says."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def expect(self, *kinds: str) -> dict[str, Any]:
        """The next message, which has one of these keys. Raises Broken."""
        try:
            told = self._told.get(timeout=self._patience_s)
        except queue.Empty:
            raise Broken(f"The cluster said nothing for {self._patience_s:g} s.") from None
        if told is None:
            raise Broken("The cluster ended.")
        assert any(kind in told for kind in kinds), f"the driver said {told}"
        return told

    def settle(self, epoch: int) -> int:
        """Wait until all ranks are in this epoch or a later one; its number."""
        self.send({"settle": epoch})
        return int(self.expect("settled")["settled"])

    def census(self) -> dict[str, int]:
        """How many processes the cluster has, and what they hold."""
        found = dict.fromkeys(("processes", "descriptors", "threads"), 0)
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                found["descriptors"] += process.num_fds()
                found["threads"] += process.num_threads()
                found["processes"] += 1
        return found

    def left_behind(self) -> dict[str, list[str]]:
        """What is still there some seconds after the cluster's end."""
        deadline = time.monotonic() + GRACE_S
        while (left := list(self._processes())) and time.monotonic() < deadline:
            time.sleep(0.1)
        sockets: list[str] = []
        names: list[str] = []
        for process in left:
            with suppress(psutil.Error):
                names.append(" ".join(process.cmdline())[:80])
                sockets += [str(socket.laddr) for socket in process.net_connections("all")]
        files: list[str] = []
        for path in sorted(self.folder.rglob("*")):
            inner = path.is_dir() and any(path.iterdir())
            if not inner and not path.name.startswith(CACHE):
                kind = sockets if path.is_socket() else files
                kind.append(str(path.relative_to(self.folder)))
        return {"processes": names, "sockets": sockets, "files": files}

    def _processes(self) -> Iterator[psutil.Process]:
        """All that the cluster started, whoever is its parent now."""
        bed = self._bed
        inside = {pid for host in bed.hosts for pid in bed.processes(host)} if bed else set()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                marked = process.environ().get("TMPDIR", "").startswith(str(self.folder))
                listener = "[listener]" in " ".join(process.cmdline())
                zombie = process.status() == psutil.STATUS_ZOMBIE
                if (marked or process.pid in inside) and not listener and not zombie:
                    yield process

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
                self._told.put(message)
        self._told.put(None)


def hosts_file(bed: Testbed, stages: int, folder: Path) -> Path:
    """A hosts file of the bed's hosts with a head and so many stages, as evenly as can be."""
    each, more = divmod(stages + 1, len(bed.hosts))
    path = bed.hosts_file({host: each + (i < more) for i, host in enumerate(bed.hosts)})
    hosts_file = yaml.safe_load(path.read_text())
    hosts_file["defaults"]["env"] |= {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    path.write_text(yaml.safe_dump(hosts_file, sort_keys=False))
    return path


def agent_of(bed: Testbed, host: str) -> int | None:
    """The process id of a host's agent; None: there is none now."""
    for pid in bed.processes(host):
        with suppress(psutil.Error):
            if "pipespec.cluster.agent" in psutil.Process(pid).cmdline():
                return pid
    return None


def signalled(pid: int | None, number: signal.Signals) -> bool:
    """Whether a process was there to be sent a signal."""
    if pid is None:
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
