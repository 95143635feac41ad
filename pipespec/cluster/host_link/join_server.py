"""The launcher's side of hosts that join: it lets them in, and commands over their connections.

The host connects, and SSH runs in reverse over that connection (`asyncssh.listen_reverse`): the
host is SSH's server, whose key proves the token, or later that it is the same host; the launcher is
SSH's client, whose key the token names. Sessions over the connection are the programs that the
launcher runs there (`programs`), and one named CONTROL, whose lines of JSON are

    launcher   {"version": ...}
    host       {"host": ..., "key": the key of its later connections, "leave": whether it leaves}
    launcher   {"name": ...} or {"refused": clause}

and from then on {"say": sentence} or {"over": sentence}, and from the host {"leave": true}.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

import asyncssh

from pipespec.cluster.host_link import loop
from pipespec.cluster.host_link.connection import CIPHERS, QUIET, HostClient, reason_of, run_command
from pipespec.cluster.host_link.host_session import HostSession, message
from pipespec.cluster.host_link.token import Invitations, Refused, Token, fingerprint_of
from pipespec.config.entries import Wrong, devices, host_name
from pipespec.errors import ConfigError
from pipespec.system.files import TemporaryFolder
from pipespec.system.network_interfaces import resolve
from pipespec.system.validation import shown
from pipespec.system.versions import own_version

SOCKET = "invitations"
CONTROL = "control"
KEY = "ssh-ed25519"
# Connections at once that were not let in yet; others are closed.
MOST_UNPROVEN = 64
MOST_DEVICES = 64
# Seconds in which both sides must prove their keys; without a sign of life after which a connection
# counts as lost.
PROVING_S, SILENCE_S = 10.0, 15
# Seconds within which the socket is removed.
REMOVING_S = 1.0
ENDED = "the cluster has ended"


class JoinServer:
    """Lets hosts in at one address of this machine, until the block ends. At the socket `path`
    invitations are asked for. `look_after`: called in a thread of its own with each host that was
    let in; the host has left when it returns. `taken`: names that no new host gets. `clock`: see
    `Invitations`. Raises ConfigError if it cannot listen there."""

    def __init__(
        self,
        address: str,
        port: int,
        look_after: Callable[[HostSession], None],
        taken: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._invitations, self._look_after = Invitations(clock), look_after
        self._key = asyncssh.generate_private_key(KEY)
        self._taken = set(taken)
        self._sessions: dict[bytes, HostSession] = {}  # by the fingerprints of their keys
        self._lock = threading.Lock()
        self.unproven: set[HostClient] = set()
        self._scratch = TemporaryFolder(SOCKET)
        self.path = str(self._scratch.folder / SOCKET)
        try:
            self.address = resolve(address)
            self._listener, self._asking = loop.call(self._listen(port))
        except OSError as error:
            self._scratch.close(REMOVING_S)
            raise ConfigError(
                f"Hosts cannot join at {address}:{port} ({reason_of(error)}); name an address of "
                "this machine, and a free port, with --at ADDRESS:PORT."
            ) from error
        self.port = self._listener.get_port()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        loop.soon(self._listener.close)
        loop.soon(self._asking.close)
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            session.dismiss(ENDED, failed=False)
        self._scratch.close(REMOVING_S)

    def invite(self, seconds: float) -> str:
        secret = self._invitations.make(seconds)
        return Token(self.address, self.port, fingerprint_of(self._key), secret).encode()

    def knows(self, fingerprint: bytes) -> bool:
        """Whether a key is that of an invitation, which may be over, or of a host."""
        return fingerprint in self._invitations or fingerprint in self._sessions

    async def _listen(self, port: int) -> tuple[asyncssh.SSHAcceptor, asyncio.Server]:
        listener = await asyncssh.listen_reverse(
            self.address,
            port,
            acceptor=self._meet,
            client_factory=lambda: _Caller(self),
            client_keys=[self._key],
            server_host_key_algs=[KEY],
            known_hosts=b"",  # `_Caller` knows them
            username="pipespec",
            agent_path=None,
            config=[],
            keepalive_count_max=SILENCE_S - 1,
            login_timeout=PROVING_S,
            x509_trusted_certs=None,
            encryption_algs=CIPHERS,
            **QUIET,
        )
        return listener, await asyncio.start_unix_server(self._make_invitation, self.path)

    async def _make_invitation(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError, ValueError):
            writer.write(f"{self.invite(float(await reader.readline()))}\n".encode())
        writer.close()

    # --- hosts --------------------------------------------------------------------------------

    async def _meet(self, connection: asyncssh.SSHClientConnection) -> None:
        """A host, which has proven a key that is known, and to which ours was proven."""
        peer, key = connection.get_owner(), connection.get_server_host_key()
        assert isinstance(peer, HostClient) and key is not None
        try:
            async with asyncio.timeout(PROVING_S):
                control = await run_command(connection, CONTROL)
                control.stdin.write(message(version=own_version()))
                said = json.loads(await control.stdout.readline() or "null")
                try:
                    session = self._sessions.get(fingerprint_of(key))
                    if session is None:
                        session = await self._let_in(fingerprint_of(key), said)
                except (Wrong, Refused) as error:
                    control.stdin.write(message(refused=str(error).rstrip(".")))
                    return
            self.unproven.discard(peer)
            control.stdin.write(message(name=session.host.name))
            if said["leave"]:
                session.ask_to_leave()
            await session.attend((connection, peer), control)
        except (OSError, ValueError, TypeError, KeyError, asyncssh.Error):
            return  # it ended, or says something else than messages
        finally:
            connection.close()

    async def _let_in(self, fingerprint: bytes, said: Any) -> HostSession:
        """Raises Wrong, Refused, and KeyError, TypeError or ValueError for what is no message."""
        name, address, found = await asyncio.to_thread(_described, said["host"])
        later = fingerprint_of(asyncssh.import_public_key(said["key"]))
        self._invitations.use(fingerprint)
        with self._lock:
            names = (name if n == 1 else f"{name}-{n}" for n in itertools.count(1))
            own = next(each for each in names if each not in self._taken)
            self._taken.add(own)
            session = self._sessions[later] = HostSession(own, address, found)
        threading.Thread(target=self._attend, args=(later, session), daemon=True).start()
        return session

    def _attend(self, fingerprint: bytes, session: HostSession) -> None:
        failed = True
        try:
            self._look_after(session)
            failed = False
        finally:
            ending = "the launcher looks after this host no more" if failed else ENDED
            session.dismiss(ending, failed=failed)
            with self._lock:
                del self._sessions[fingerprint]
                self._taken.discard(session.host.name)


class _Caller(HostClient):
    """The launcher's end of a connection that some host, or a stranger, has made."""

    def __init__(self, server: JoinServer) -> None:
        self._server = server

    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        if len(self._server.unproven) < MOST_UNPROVEN:
            self._server.unproven.add(self)
        else:
            conn.abort()

    def validate_host_public_key(
        self, host: str, addr: str, port: int, key: asyncssh.SSHKey
    ) -> bool:
        return self._server.knows(fingerprint_of(key))

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.unproven.discard(self)
        super().connection_lost(exc)


def _described(said: Any) -> tuple[str, str, tuple[str, ...]]:
    """Name, address and devices of what a host says of itself. Raises Wrong."""
    if not isinstance(said, dict) or set(said) != {"name", "address", "devices"}:
        raise Wrong("it must state a name, an address and devices.")
    found = [each for group in devices("devices", said["devices"]) for each in group]
    if not 0 < len(found) <= MOST_DEVICES:
        raise Wrong(f"devices must be 1 to {MOST_DEVICES}.")
    address = said["address"]
    try:
        ip = resolve(str(address))
    except OSError:
        raise Wrong(
            f"its address is {shown(address)}, which the launcher cannot resolve; name another one "
            "with --address."
        ) from None
    return host_name("name", said["name"]), ip, tuple(found)
