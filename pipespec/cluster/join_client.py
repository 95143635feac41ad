"""A host that joins a running cluster and runs the programs of its launcher, until it leaves.

It makes every connection itself. The programs are those that the launcher starts over SSH on other
hosts, and no others: the agent with its workers, what fetches weights, and what measures devices
and links.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, Self

from pipespec.cluster.agent_lock import PATIENCE_S
from pipespec.cluster.join_link import (
    END_INPUT,
    ERRORS,
    EXITED,
    HEAD,
    INPUT,
    JOIN,
    OUTPUT,
    PROGRAM,
    PROVING_S,
    RETURN,
    JoinLink,
    connect,
    introduce,
)
from pipespec.cluster.join_token import Refused, Token, id_of
from pipespec.errors import HostFailed

PROGRAMS = (
    "pipespec.cluster.agent",
    "pipespec.cluster.weight_host",
    "pipespec.instruments.diagnostics.measure_devices",
    "pipespec.instruments.diagnostics.probe",
)
# Seconds without a sign of life after which the launcher is connected to anew, between two tries
# to do so, and in which one must succeed.
SILENCE_S, RETRY_S, AWAY_S = 10.0, 1.0, 60.0
CHUNK_BYTES = 2**16
# Seconds beyond those of an agent that a program may take to end.
LONGER_S = 3.0


@dataclass(frozen=True)
class Admission:
    """What the launcher of a token calls this host, and the secret of its connections from now
    on."""

    token: Token
    name: str
    known_as: str
    key: bytes = field(repr=False)

    def connect(self, purpose: str, **saying: Any) -> JoinLink:
        """Another connection. Raises Refused, HostFailed, OSError."""
        link, _ = connect(self.token)
        try:
            introduce(link, self.token.fingerprint, purpose, self.known_as, self.key, saying)
        except BaseException:
            link.close()
            raise
        return link


def enter(
    token: Token, name: str, devices: Sequence[str], address: str | None
) -> tuple[Admission, JoinLink]:
    """Join with the token of an invitation; the control connection. `address`: where other hosts
    reach this one; None: where it reaches the launcher from. Raises HostFailed."""
    where, secret = f"{token.address}:{token.port}", token.secret
    link, own = connect(token)
    try:
        host = {"name": name, "address": address or own, "devices": list(devices)}
        introduce(link, token.fingerprint, JOIN, id_of(secret), secret, {"host": host})
        answer = link.receive(PROVING_S)
        if answer is None:
            raise ConnectionError("it has closed the connection")
        if "refused" in answer:
            raise Refused(answer["refused"])
        key = bytes.fromhex(answer["key"])
        return Admission(token, str(answer["name"]), str(answer["id"]), key), link
    except (OSError, Refused, KeyError, ValueError) as error:
        link.close()
        raise HostFailed(f"{where} does not let this host in: {error}") from error


class JoinedHost:
    """This host, from its admission until it has left. Leaving the block ends its programs.

    Attributes:
        leaving: it has asked to leave, and was not told to stay.

    Args:
        say: called with sentences of the launcher.
    """

    def __init__(self, admission: Admission, link: JoinLink, say: Callable[[str], None]) -> None:
        self._admission, self._say = admission, say
        self._link: JoinLink | None = link
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._programs: set[_Program] = set()
        self.leaving = self._over = False

    def __enter__(self) -> Self:
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self) -> None:
        """Serve until the launcher lets this host go. Raises HostFailed if it dismisses it, or
        cannot be reached any more. After an interrupt it may be called again."""
        while (message := self._events.get()) is not None:
            if "start" in message:
                threading.Thread(target=self._start, args=(message,), daemon=True).start()
            elif "say" in message:
                self._say(str(message["say"]))
                if message.get("stays"):
                    self.leaving = False
            elif "over" in message:
                if message.get("failed"):
                    raise HostFailed(str(message["over"]))
                self._say(str(message["over"]))
                return
        raise HostFailed(
            f"the launcher could not be reached for {AWAY_S:g} s; check that the cluster is up"
        )

    def leave(self) -> None:
        """Ask the launcher to go on without this host; `run` returns once it does."""
        self.leaving = True
        link = self._link
        if link is not None:
            with suppress(OSError):
                link.send({"leave": True})

    def _end(self) -> None:
        self._over = True
        programs = list(self._programs)
        for program in programs:
            program.link.end()
        for program in programs:
            program.done.wait(PATIENCE_S + LONGER_S)
        if self._link is not None:
            self._link.end()

    def _listen(self) -> None:
        """Hand over what comes over the control connection, which is made anew when it breaks."""
        lost_at: float | None = None
        while not self._over:
            link = self._link
            if link is None:
                assert lost_at is not None
                if time.monotonic() - lost_at > AWAY_S:
                    self._events.put(None)
                    return
                try:
                    self._link = self._admission.connect(RETURN)
                except Refused as refused:
                    self._events.put({"over": str(refused), "failed": True})
                    return
                except (OSError, HostFailed):
                    time.sleep(RETRY_S)
                    continue
                if self.leaving:
                    self.leave()
                continue
            lost_at = None
            try:
                while (message := link.receive(SILENCE_S)) is not None:
                    if message:
                        self._events.put(message)
                    else:
                        link.send({})  # this host lives, too
                    if "over" in message:
                        return
            except OSError:
                pass
            self._link, lost_at = None, time.monotonic()
            link.close()

    def _start(self, message: dict[str, Any]) -> None:
        module, args = str(message["module"]), list(map(str, message["args"]))
        try:
            link = self._admission.connect(PROGRAM, number=message["start"])
        except (OSError, HostFailed, Refused):
            return  # the launcher waits for it no longer, or will start it again
        program = _Program(link)
        self._programs.add(program)
        try:
            if not self._over:
                program.run(module, args)
        finally:
            program.done.set()
            self._programs.discard(program)
            link.close()


class _Program:
    """A program of the launcher's on this host."""

    def __init__(self, link: JoinLink) -> None:
        self.link = link
        self.done = threading.Event()

    def run(self, module: str, args: Sequence[str]) -> None:
        """Run it to its end, or until the connection ends."""
        if module not in PROGRAMS:
            self._frame(ERRORS, f"No module named {module} for hosts that join".encode())
            self._frame(EXITED, b"1")
            return
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            # Ctrl-C is for this process, which has the launcher go on without the host first.
            start_new_session=True,
        )
        assert process.stdin and process.stdout and process.stderr
        outputs = [
            threading.Thread(target=self._pass_on, args=(kind, stream), daemon=True)
            for kind, stream in ((OUTPUT, process.stdout), (ERRORS, process.stderr))
        ]
        for thread in outputs:
            thread.start()
        threading.Thread(target=self._finish, args=(process, outputs), daemon=True).start()
        stdin = process.stdin
        try:
            while (frame := self.link.read_frame()) is not None:
                kind, payload = frame
                with suppress(OSError, ValueError):  # it has ended, or hung up
                    if kind == INPUT:
                        stdin.write(payload)
                        stdin.flush()
                    elif kind == END_INPUT:
                        stdin.close()
        except OSError:
            pass
        finally:
            with suppress(OSError):
                stdin.close()
            try:
                process.wait(PATIENCE_S + LONGER_S)
            except subprocess.TimeoutExpired:
                _kill_group(process)
            for thread in outputs:
                thread.join(PATIENCE_S)
            if any(thread.is_alive() for thread in outputs):
                _kill_group(process)

    def _finish(
        self, process: subprocess.Popen[bytes], outputs: Sequence[threading.Thread]
    ) -> None:
        """Report its end, once all of its output is sent."""
        code = process.wait()
        for thread in outputs:
            thread.join()
        with suppress(OSError):
            self._frame(EXITED, str(code).encode())

    def _pass_on(self, kind: int, stream: IO[bytes]) -> None:
        connected = True
        while chunk := os.read(stream.fileno(), CHUNK_BYTES):
            try:
                if connected:
                    self._frame(kind, chunk)
            except OSError:
                connected = False  # what is still written must not wait for a reader

    def _frame(self, kind: int, payload: bytes) -> None:
        self.link.write(HEAD.pack(kind, len(payload)) + payload)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    # Its output is held by a process of the group, so that its number is no other's.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
