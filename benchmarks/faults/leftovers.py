"""What a run of `benchmarks.faults.chaos` holds, and what is left behind after its end.

All processes of a run have TMPDIR set to one folder, and are found by that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from pipespec.client import registry
from tools.rig.testbed import Testbed

# Seconds within which every process of a cluster must end after it.
GRACE_S = 10.0
# A folder that torch keeps for the user's next program.
CACHE = "torchinductor_"
SHARED_MEMORY = Path("/dev/shm")


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
            listener = "tools.rig.sshd" in process.cmdline()  # of the bed
            zombie = process.status() == psutil.STATUS_ZOMBIE
            if (marked or process.pid in inside) and not listener and not zombie:
                yield process


def unused_shared_memory(since_s: float) -> list[str]:
    """Segments created since `since_s` (seconds since 1970) that no process has mapped."""
    made = []
    for path in SHARED_MEMORY.glob("*"):
        with suppress(FileNotFoundError):
            made += [path] if path.stat().st_mtime >= since_s else []
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps") if made else ():
        with suppress(OSError):  # it ended
            mapped += maps.read_text()
    return sorted(path.name for path in made if path.exists() and str(path) not in mapped)


def namespaces() -> set[str]:
    """The names of all network namespaces."""
    with suppress(FileNotFoundError):
        return set(os.listdir("/run/netns"))
    return set()
