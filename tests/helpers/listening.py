"""What processes listen on, from the kernel's own tables, and what strangers are told there.

with watched(lambda: family(process.pid)) as seen:
    ...     # every socket on which the process or a descendant listened meanwhile is in `seen`
"""

import ipaddress
import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

RUIN = "import pathlib; pathlib.Path({!r}).touch()"
# Runs as another user: what opens up, byte for byte, at every place given as JSON.
VISITOR = """
    import json, os, socket, sys
    places, messages = json.loads(sys.argv[1])
    "".encode("idna")  # imported while this user may read Python's files
    os.setgid(65534); os.setuid(65534)
    heard = []
    for kind, address, port in places:
        heard.append(told := [])
        for message in messages:
            try:
                if kind == "unix":
                    with socket.socket(socket.AF_UNIX) as door:
                        door.connect(address)
                        told.append("entered")
                    continue
                with socket.create_connection((address, port), timeout=5) as door:
                    door.settimeout(0.05)
                    door.sendall(bytes.fromhex(message))
                    told.append(door.recv(4096).hex())
            except OSError as error:
                told.append(type(error).__name__)
    print(json.dumps(heard))
"""

TCP_LISTEN, UDP_UNCONNECTED = "0A", "07"
UNIX_ACCEPTS = 0x10000
LOOK_S = 0.1


@dataclass(frozen=True, order=True)
class Listening:
    """A socket that takes what others send. `kind` is tcp, udp or unix; `place` is an IP address
    and a port, or a path (an abstract name begins with @)."""

    pid: int
    kind: str
    address: str
    port: int

    @property
    def wildcard(self) -> bool:
        """Whether it can be reached at every address of the machine."""
        return self.kind != "unix" and ipaddress.ip_address(self.address).is_unspecified


def listening(pids: Iterable[int]) -> set[Listening]:
    """The sockets of these processes, each in its own network namespace."""
    found = set()
    for pid in pids:
        with suppress(OSError):  # it ended just now
            inodes = set(_sockets(pid))
            if inodes:
                found |= {Listening(pid, *place) for inode, place in _open(pid) if inode in inodes}
    return found


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


@contextmanager
def watched(pids: Callable[[], Iterable[int]]) -> Iterator[set[Listening]]:
    """What these processes listen on within the block, however shortly, as far as a look every
    LOOK_S seconds sees it."""
    seen: set[Listening] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_S):
            seen.update(listening(pids()))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def assert_private(seen: set[Listening], addresses: set[str]) -> None:
    """Nothing listens on all addresses, on another than these, or where others can go in."""
    assert not [each for each in seen if each.wildcard]
    assert not [each for each in seen if each.kind == "udp"]
    assert {each.address for each in seen if each.kind == "tcp"} <= addresses
    for each in seen:
        if each.kind == "unix":
            assert each.address.startswith("/"), "an abstract socket asks nobody who he is"


class Ruin:
    """Unpickled, it leaves a file."""

    def __init__(self, file: Path):
        self._file = file

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, (RUIN.format(str(self._file)),)


def here(argv: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a program on this machine."""
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


def visit(
    seen: set[Listening], file: Path, run: Callable[..., Any] = here
) -> dict[Listening, list[str]]:
    """What a stranger is told at each place, message after message: bytes in hexadecimal, or the
    name of an error. `run` runs him, as root; one of his messages would make the file."""
    messages = [
        b"",
        b"\x00\x01",
        b"GET / HTTP/1.0\r\n\r\n",
        b"PING\r\n",
        pickle.dumps(Ruin(file)),
        *(number.to_bytes(8, "little") for number in range(4)),
        os.urandom(4096),
    ]
    doors = sorted(seen)
    places = [(door.kind, door.address, door.port) for door in doors]
    given = json.dumps([places, [message.hex() for message in messages]])
    done = run([sys.executable, "-c", textwrap.dedent(VISITOR), given])
    assert done.returncode == 0, done.stderr
    return dict(zip(doors, json.loads(done.stdout), strict=True))


def _sockets(pid: int) -> Iterator[str]:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                yield target[8:-1]


def _open(pid: int) -> Iterator[tuple[str, tuple[str, str, int]]]:
    """Inode and place of every socket in the namespace of a process that takes messages."""
    for name, state in (("tcp", TCP_LISTEN), ("udp", UDP_UNCONNECTED)):
        for version in ("", "6"):
            for words in _table(pid, name + version):
                address, port = words[1].split(":")
                if words[3] == state:
                    yield words[9], (name, _address(address), int(port, 16))
    for words in _table(pid, "unix"):
        if int(words[3], 16) & UNIX_ACCEPTS:
            yield words[6], ("unix", words[7] if len(words) > 7 else "", 0)


def _table(pid: int, name: str) -> Iterator[list[str]]:
    with suppress(FileNotFoundError):  # a kernel without IPv6
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            yield line.split()


def _address(digits: str) -> str:
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)
