"""A host that joins a running cluster and runs the programs of its launcher, until it leaves.

It makes the connection itself, and again when it breaks (`join_server`). The programs are those
that the launcher starts over SSH on other hosts, and no others: the agent with its workers, what
fetches weights, and what measures devices and links.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import queue
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Self

import asyncssh

from pipespec.cluster.host_link import loop
from pipespec.cluster.host_link.agent_lock import PATIENCE_S
from pipespec.cluster.host_link.connection import CONNECT_TIMEOUT, QUIET, pump, reason_of
from pipespec.cluster.host_link.host_session import message
from pipespec.cluster.host_link.join_server import CONTROL, KEY, PROVING_S, SILENCE_S
from pipespec.cluster.host_link.token import Refused, Token, fingerprint_of, key_of
from pipespec.errors import HostFailed
from pipespec.system.versions import own_version

PROGRAMS = (
    "pipespec.cluster.processes.agent",
    "pipespec.cluster.weights.host",
    "pipespec.cluster.diagnostics.probe",
)
# Seconds between two tries to connect anew, and in which one must succeed.
RETRY_S, AWAY_S = 1.0, 60.0
# Seconds beyond those of an agent that a program may take to end.
LONGER_S = 3.0


class JoinedHost:
    """This host, from its admission until it has left. Leaving the block ends its programs. `name`:
    what the cluster calls it. `leaving`: it has asked to leave, and was not told to stay.
    `address`: where other hosts reach this one; None: where it reaches the launcher from. Raises
    HostFailed if it is not let in."""

    def __init__(
        self, token: Token, name: str, devices: Sequence[str], address: str | None
    ) -> None:
        self._where, self._token = f"{token.address}:{token.port}", token
        self._said = {"name": name, "address": address, "devices": list(devices)}
        self._key = asyncssh.generate_private_key(KEY)  # of later connections
        self._admitted: Future[str] = Future()
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._control: asyncssh.SSHWriter[bytes] | None = None
        self._running: set[asyncio.Task[None]] = set()
        self.leaving = self._over = False
        try:
            self._connection = loop.call(self._connect(key_of(token.secret)))
            self.name = self._admitted.result(PROVING_S)
        except (Refused, TimeoutError) as error:
            raise HostFailed(
                f"{self._where} does not let this host in: {error or 'timed out'}"
            ) from error
        self._staying = loop.start(self._stay())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        loop.call(self._end())

    def run(self, say: Callable[[str], None]) -> None:
        """Serve until the launcher lets this host go; `say` is called with its sentences. Raises
        HostFailed if it dismisses it, or cannot be reached any more. After an interrupt it may be
        called again."""
        while (said := self._events.get()) is not None:
            if "say" in said:
                say(str(said["say"]))
                if said.get("stays"):
                    self.leaving = False
            elif said.get("failed"):
                raise HostFailed(str(said["over"]))
            else:
                say(str(said["over"]))
                return
        raise HostFailed(
            f"the launcher could not be reached for {AWAY_S:g} s; check that the cluster is up"
        )

    def leave(self) -> None:
        """Ask the launcher to go on without this host; `run` returns once it does."""
        self.leaving = True
        loop.soon(self._ask_to_leave)

    # --- in the loop --------------------------------------------------------------------------

    def _ask_to_leave(self) -> None:
        if self._control is not None:
            self._control.write(message(leave=True))

    async def _connect(self, key: asyncssh.SSHKey) -> asyncssh.SSHServerConnection:
        """A connection on which a key of this host is proven. Raises Refused, HostFailed."""
        place = self._token.address, self._token.port
        try:
            plain = await asyncio.to_thread(socket.create_connection, place, CONNECT_TIMEOUT)
        except OSError as error:
            raise HostFailed(
                f"{self._where} cannot be reached ({reason_of(error)}); check that the cluster is "
                "up and that no firewall stops the port"
            ) from error
        self._said["address"] = self._said["address"] or plain.getsockname()[0]
        launcher = _Launcher(self._token.fingerprint)
        try:
            return await asyncssh.connect_reverse(
                sock=plain,
                server_factory=lambda: launcher,
                server_host_keys=[key],
                process_factory=self._serve,
                encoding=None,
                config=[],
                connect_timeout=PROVING_S,
                keepalive_count_max=SILENCE_S - 1,
                allow_pty=False,
                **QUIET,
            )
        except asyncssh.HostKeyNotVerifiable:
            raise Refused("this invitation or this host is not one of this cluster") from None
        except (OSError, asyncssh.Error) as error:
            if launcher.is_another:
                raise HostFailed(
                    f"{self._where} has another key than the cluster that made this token; ask for "
                    "a new token"
                ) from error
            raise HostFailed(
                f"{self._where} is no launcher of pipespec ({reason_of(error)})"
            ) from error

    async def _stay(self) -> None:
        while True:
            await self._connection.wait_closed()
            self._control, lost_at = None, time.monotonic()
            while not self._over:
                try:
                    self._connection = await self._connect(self._key)
                    break
                except Refused:
                    self._over = True
                    why = "this host has left, or was never let in"
                    self._events.put({"over": why, "failed": True})
                except HostFailed:
                    if time.monotonic() - lost_at > AWAY_S:
                        self._events.put(None)
                        return
                    await asyncio.sleep(RETRY_S)
            if self._over:
                return

    async def _end(self) -> None:
        self._over = True
        self._connection.close()
        if self._running:
            await asyncio.wait(self._running)  # each of which ends a program that hangs

    async def _serve(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        if process.command == CONTROL:
            await self._obey(process)
            return
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            await _run(process, shlex.split(process.command or "nothing"))
        finally:
            self._running.discard(task)

    async def _obey(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        launcher = json.loads(await process.stdin.readline())["version"]
        if launcher != (own := own_version()):
            self._admitted.set_exception(
                Refused(
                    f"pipespec here is {own}, but that of the cluster is {launcher}; install the "
                    "same on all hosts"
                )
            )
            process.exit(1)
            return
        key = self._key.export_public_key().decode()
        self._control = process.stdout
        self._control.write(message(host=self._said, key=key, leave=self.leaving))
        async for line in process.stdin:
            said = json.loads(line)
            if "name" in said:
                if not self._admitted.done():
                    self._admitted.set_result(said["name"])
            elif "refused" in said:
                self._admitted.set_exception(Refused(said["refused"]))
            else:
                self._over = self._over or "over" in said
                self._events.put(said)


class _Launcher(asyncssh.SSHServer):
    """This end of a connection to the launcher, whose key the token names."""

    def __init__(self, fingerprint: bytes) -> None:
        self._fingerprint, self.is_another = fingerprint, False

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        self.is_another = not hmac.compare_digest(fingerprint_of(key), self._fingerprint)
        return not self.is_another


async def _run(process: asyncssh.SSHServerProcess[bytes], words: Sequence[str]) -> None:
    if words[0] not in PROGRAMS:
        process.stderr.write(f"No module named {words[0]} for hosts that join".encode())
        process.exit(1)
        return
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *words),
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        # Ctrl-C is for this process, which has the launcher go on without the host first.
        start_new_session=True,
    )
    assert program.stdin and program.stdout and program.stderr
    stdin = program.stdin
    feeding = asyncio.create_task(pump(process.stdin, stdin))
    feeding.add_done_callback(lambda _: stdin.close())
    ended = asyncio.gather(
        program.wait(),
        pump(program.stdout, process.stdout),
        pump(program.stderr, process.stderr),
    )
    hung_up = asyncio.create_task(process.wait_closed())
    either: set[asyncio.Future[Any]] = {ended, hung_up}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if not ended.done():  # its standard input has ended
        await asyncio.wait({ended}, timeout=PATIENCE_S + LONGER_S)
        if not ended.done():
            # Its output is held by a process of the group, so that its number is no other's.
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
        await ended
        return
    hung_up.cancel()
    code = ended.result()[0]
    if code < 0:
        process.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))
    else:
        process.exit(code)
