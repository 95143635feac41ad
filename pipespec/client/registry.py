"""The registry of clusters that stay up: files that say how to reach them.

`pipespec up` holds its cluster's name from before the start until the end, by a lock on
`<name>.lock`, which also says which process holds it; once the cluster is ready there is an entry
beside it, `<name>.json`. What a killed process left behind counts for nothing, but for the requests
in `<name>.data`, with which the next cluster of that name goes on. An entry holds the password of
the cluster's Redis, so folder and files are for this user alone. Copied to the same folder on
another host, it lets that host ask the cluster too. Above 350 lines, as all files of the folder are
read and written here."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from signal import Signals
from typing import TypeVar

import psutil

from pipespec.client.model_info import ModelInfo
from pipespec.errors import ConfigError
from pipespec.system.files import lock_file, write_atomically
from pipespec.system.folders import state_folder
from pipespec.system.process_identity import find_process, is_ours, own_start_time
from pipespec.system.validation import Missing, Unreadable, from_fields, parse_json, read_text

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
# A file's name has 255 bytes at most, and the longest ending, ".log.4194304", must find room.
LONGEST_NAME = 240
ENTRY, LOCK, LOG = ".json", ".lock", ".log"
# The server that started it, the data of a private Redis, and what lets hosts join by hand.
SERVER, DATA, INVITATION = ".server", ".data", ".invitation"
# What a process that has joined a cluster elsewhere says of it, by the process's number.
JOINED = ".joined"
# The kernel's own id of this run of it: where it is the same, process ids and clocks are ours.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
T = TypeVar("T")


@dataclass(frozen=True)
class Owner:
    """A process, identified by its id and start time. `created` is when it began, in seconds since
    the machine's start; `machine` is where its number means it. `waits_for`: for which hosts a
    cluster that it starts waits, and what to run on them."""

    pid: int
    created: float
    machine: str
    waits_for: str | None = field(default=None, compare=False)

    @classmethod
    def this(cls) -> Owner:
        return cls(os.getpid(), own_start_time(), _machine())

    @property
    def here(self) -> bool:
        """Whether its number and its clock mean something on this machine."""
        return self.machine == _machine()

    @property
    def gone(self) -> bool:
        """Whether it is known to have ended; of a process elsewhere nothing is known."""
        return self.here and find_process(self.pid, self.created) is None

    def end(self) -> None:
        """Ask it to end, if it still runs here. Raises ConfigError if it is another user's."""
        process = find_process(self.pid, self.created)
        if process is None or not self.here:
            return
        try:
            if not is_ours(process):
                raise ConfigError(
                    f"Process {self.pid} is of user {process.username()}; ask that user to end it."
                )
            process.send_signal(Signals.SIGTERM)  # unless the number is another's by now
        except psutil.NoSuchProcess:
            return  # it ended just now


@dataclass(frozen=True)
class RunningCluster:
    """How to reach a running cluster, and what its users must know of it.

    `url` and `namespace` lead to its request log, `owner` is its `pipespec up`, on the machine
    `host`. `epoch` is the one it began with. `overrides` made the cluster, except those of
    `controller`; those of `decode` and `sampling` are a request's defaults. `started` is in seconds
    since 1970. `joins_through`: the socket of its machine at which invitations for more hosts are
    asked for (`pipespec.cluster.host_link.join_server`); None: no host can join.
    """

    name: str
    url: str = field(repr=False)
    namespace: str
    epoch: int
    owner: Owner
    host: str
    overrides: tuple[str, ...]
    served: ModelInfo
    num_ranks: int
    started: float
    joins_through: str | None = None


@dataclass(frozen=True)
class Entry:
    """A name that is taken. `cluster` is None while the cluster starts."""

    name: str
    owner: Owner
    cluster: RunningCluster | None


@dataclass(frozen=True)
class JoinedCluster:
    """A cluster elsewhere of which this host computes a part, as the process `owner` says: `name`
    is what it calls this host, `launcher` its address, `state` the newest sentence for this
    host."""

    name: str
    launcher: str
    owner: Owner
    state: str

    def __str__(self) -> str:
        return (
            f"This host has joined the cluster of {self.launcher} as {self.name!r} (process "
            f"{self.owner.pid}): {self.state}. `pipespec status` and `pipespec logs` on the host "
            "that started it say more."
        )


def folder() -> Path:
    return state_folder()


@contextmanager
def claim(name: str) -> Iterator[Callable[[str | None], None]]:
    """Hold a name; entry and lock are removed afterwards. Yields what notes for which hosts the
    start waits. Raises ConfigError if the name cannot be used, or a cluster that lives holds it."""

    def note(waits_for: str | None) -> None:
        assert descriptor is not None
        text = json.dumps(asdict(replace(Owner.this(), waits_for=waits_for))).encode()
        # In one piece, and never shorter, as others read it at any time.
        os.pwrite(descriptor, text.ljust(os.fstat(descriptor).st_size), 0)

    check_name(name)
    with kept_folder() as here:
        lock, stored = here / (name + LOCK), here / (name + ENTRY)
        descriptor = lock_file(lock)
    if descriptor is None:
        raise _taken(name)
    try:
        with kept_folder():
            stored.unlink(missing_ok=True)
            os.ftruncate(descriptor, 0)
            note(None)
        yield note
    finally:
        stored.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _taken(name: str) -> ConfigError:
    return ConfigError(
        f"A cluster named {name!r} is up already; end it with `pipespec down {name}`, or choose "
        "another --name."
    )


@contextmanager
def serving(name: str) -> Iterator[None]:
    """Say that this process serves the cluster of a name, and starts it again should it die. Raises
    ConfigError, also if another does."""
    if server_of(name) is not None:
        raise _taken(name)
    with kept_folder() as here:
        file = here / (name + SERVER)
        write_atomically(file, json.dumps(asdict(Owner.this())).encode())
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


@contextmanager
def noting_joined(launcher: str, name: str) -> Iterator[Callable[[str], None]]:
    """Yields what notes how it goes with a cluster that this process has joined, for `joined`. The
    host computes as well where nothing can be noted. What processes that were killed have noted is
    removed."""
    file = folder() / f"{os.getpid()}{JOINED}"
    for other in folder().glob(f"*{JOINED}"):
        with suppress(ConfigError, OSError):
            if (killed := _read(other, JoinedCluster)) is not None and killed.owner.gone:
                other.unlink()

    def note(state: str) -> None:
        found = JoinedCluster(name, launcher, Owner.this(), state)
        with suppress(ConfigError), kept_folder():
            write_atomically(file, json.dumps(asdict(found)).encode())

    try:
        note("it has just been let in")
        yield note
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def joined() -> list[JoinedCluster]:
    """The clusters that processes of this host have joined. Raises ConfigError."""
    found = (_read(file, JoinedCluster) for file in sorted(folder().glob(f"*{JOINED}")))
    return [each for each in found if each is not None and each.owner.here and not each.owner.gone]


def server_of(name: str) -> Owner | None:
    """The process here that serves a cluster and starts it again, if any. Raises ConfigError."""
    owner = _read(folder() / (name + SERVER), Owner)
    return owner if owner is not None and owner.here and not owner.gone else None


def left(name: str) -> bool:
    """Whether a cluster that died here left something under its name. Raises ConfigError."""
    check_name(name)
    if not any((folder() / (name + ending)).exists() for ending in (LOCK, DATA, INVITATION)):
        return False
    return _free(name) and held(name) is None


def up_here(name: str) -> bool:
    """Whether a process here holds a name, or will start its cluster again. Raises ConfigError."""
    found = held(name)
    return (found is not None and found.owner.here) or server_of(name) is not None


def asked_to_end(cluster: RunningCluster) -> bool:
    """Whether a cluster that ran here has ended on request: unlike one that has died, it has left
    nothing and no process will start it again. Raises ConfigError."""
    return cluster.owner.gone and not up_here(cluster.name) and not left(cluster.name)


def log_of(name: str) -> Path | None:
    """The file with the messages of the cluster that runs here under a name, or ran last; None:
    there is none, such as where they go to a terminal. Raises ConfigError."""
    found, log = held(name), folder() / (name + LOG)
    if found is not None:
        if not found.owner.here:
            return None
        with suppress(OSError):  # it is just ending
            log = Path(f"/proc/{found.owner.pid}/fd/2").readlink()
    return log if log.is_file() else None


def log_line(source: str, line: str) -> str:
    return f"{time.strftime('%m-%d %H:%M:%S')} {source}: {line}"


def note_end(name: str) -> None:
    """Say in the log of a cluster that runs in the background that `pipespec down` ends it. Raises
    ConfigError."""
    log, said = log_of(name), f"`pipespec down` (process {os.getpid()}) ends the cluster"
    with suppress(OSError):  # a full disk keeps no cluster up
        if log is not None and log.parent.samefile(folder()):
            with log.open("a") as stream:
                stream.write(f"{log_line(name, said)}\n")


def clear(name: str) -> None:
    """Remove what a cluster has left, but for its log. Raises ConfigError if one lives."""
    with claim(name):  # which removes entry and lock
        remove_data(name)
        for ending in (INVITATION, SERVER):
            (folder() / (name + ending)).unlink(missing_ok=True)


def remove_data(name: str) -> None:
    """Remove what the private Redis of a cluster kept, once it has ended. Raises ConfigError."""
    with kept_folder() as here, suppress(FileNotFoundError):
        shutil.rmtree(here / (name + DATA))


def publish(cluster: RunningCluster) -> Path:
    """Write the entry of a name that this process holds; its file. Raises ConfigError."""
    with kept_folder() as here:
        file = here / (cluster.name + ENTRY)
        write_atomically(file, json.dumps(asdict(cluster)).encode())
    return file


def held(name: str) -> Entry | None:
    """The holder of a name; None: there is none. Raises ConfigError if the entry cannot be read."""
    # The lock's holder is asked first: the other file may be a killed one's.
    owner = _read(folder() / (name + LOCK), Owner)
    # Once this machine was started anew, its own processes look as if they were another's.
    if owner is not None and not owner.here and _free(name):
        return None
    cluster = _read(folder() / (name + ENTRY), RunningCluster)
    if owner is not None and not owner.gone:
        ready = cluster is not None and cluster.owner == owner
        return Entry(name, owner, cluster if ready else None)
    if cluster is not None and not cluster.owner.here:
        return Entry(name, cluster.owner, cluster)
    return None


def entries() -> list[Entry]:
    """Every name that is taken, in order: by a process that lives, or on another machine. Raises
    ConfigError if an entry cannot be read."""
    names = {path.stem for path in folder().glob("*") if path.suffix in (ENTRY, LOCK)}
    found = map(held, sorted(filter(NAME.fullmatch, names)))
    return [entry for entry in found if entry is not None]


def entry(name: str | None) -> Entry:
    """The cluster of that name, or the only one there is. Raises ConfigError."""
    if name is not None:
        check_name(name)
        if (found := held(name)) is not None:
            return found
    taken = entries()
    names = ", ".join(entry.name for entry in taken)
    if name is None:
        if len(taken) > 1:
            raise ConfigError(f"Several clusters are up: {names}; name one.")
        if not taken:
            here = " ".join(map(str, joined()))
            raise ConfigError(here or "No cluster is up; start one with `pipespec up`.")
        return taken[0]
    others = f"these are: {names}" if taken else "start it with `pipespec up`"
    log = folder() / (name + LOG)
    last = f" (the last one's log is {log})" if log.exists() else ""
    here = "".join(f" {each}" for each in joined())
    raise ConfigError(f"No cluster named {name!r} is up; {others}{last}.{here}")


def find(name: str | None) -> RunningCluster:
    """A cluster that is ready: of that name, or the only one. Raises ConfigError."""
    found = entry(name)
    if found.cluster is None:
        raise ConfigError(
            f"The cluster {found.name!r} is still loading; ask again when it is ready."
        )
    return found.cluster


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"The name of a cluster is {name!r}, but must be letters, digits, '_', '-' and '.', "
            "and not begin with '.'."
        )
    if len(name) > LONGEST_NAME:
        raise ConfigError(
            f"The name of a cluster has {len(name)} characters, but may have {LONGEST_NAME}; "
            "choose a shorter --name."
        )


@contextmanager
def kept_folder() -> Iterator[Path]:
    """The folder of the registry, made if need be; whatever fails in it is a ConfigError."""
    try:
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        yield folder()
    except OSError as error:
        raise ConfigError(
            f"The folder of running clusters {str(folder())!r} cannot be used "
            f"({error.strerror}); set XDG_STATE_HOME to a folder of yours that has room."
        ) from error


def _read(file: Path, kind: type[T]) -> T | None:
    """The entry in a file; None if there is no such file. Raises ConfigError."""
    try:
        text = read_text(file)
        # A lock that is just being taken says nothing yet.
        return from_fields(kind, parse_json(text)) if text else None
    except Missing:
        return None
    except Unreadable as error:
        raise ConfigError(
            f"The file {str(file)!r} cannot be read ({error}); remove it if its cluster is gone."
        ) from error


def _free(name: str) -> bool:
    """Whether no process holds a name, on any machine with this folder. Raises ConfigError."""
    with kept_folder() as here:
        descriptor = lock_file(here / (name + LOCK))
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None


def _machine() -> str:
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
