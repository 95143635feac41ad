"""The launcher's side of hosts that join: lets them in, and runs programs on them.

    AgentHandle, WeightPeer, ... ── join_relay ── JoinServer ══ TLS ══ joined_host ── program

A host that has joined holds one connection to the launcher, its *control* connection. For each
program that the launcher is to run there, it makes another one. `pipespec.cluster.ssh` starts such
a program through a `join_relay`, as it starts one on any other host through `ssh`, so all that
starts, watches and ends processes of hosts is the same for both.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from pipespec.cluster import join_link
from pipespec.cluster.host_session import HostSession
from pipespec.cluster.join_link import JOIN, PROGRAM, RETURN, JoinLink
from pipespec.cluster.join_token import Invitations, Refused, Token, fingerprint_of
from pipespec.config.entries import Wrong, devices, host_name
from pipespec.config.hosts import JOINED, LOCAL, Host
from pipespec.controller.certificate import Certificate
from pipespec.errors import ConfigError
from pipespec.system.network_interfaces import resolve
from pipespec.system.temporary_folder import private_folder
from pipespec.system.validation import shown

SOCKET = "programs"
# Connections at once that have proven nothing yet; others are closed.
MOST_UNPROVEN = 64
MOST_DEVICES = 64
SIGN_OF_LIFE_S = 1.0  # seconds between two signs of life
CHUNK_BYTES = 2**16
ENDED = "the cluster has ended"


def ask_for_invitation(path: str, seconds: float) -> str:
    """The token of an invitation of the launcher with that socket, made by another process of this
    user; see `JoinServer.invite`. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        server.sendall(json.dumps({"invite": seconds}).encode() + b"\n")
        with server.makefile("rb") as lines:
            found: str | None = json.loads(lines.readline() or b"null")
    if found is None:
        raise ConnectionError("it has closed the connection")
    return found


class JoinServer:
    """Lets hosts in at one address of this machine, within the block.

    Args:
        look_after: called in a thread of its own with each host that was let in; the host has left
            when it returns.
        taken: names that no new host gets.
        clock: see `Invitations`.

    Raises ConfigError if it cannot listen there.
    """

    def __init__(
        self,
        address: str,
        port: int,
        look_after: Callable[[HostSession], None],
        taken: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._invitations, self._look_after = Invitations(clock), look_after
        certificate = Certificate.make()
        self._context = join_link.server_context(certificate)
        self._fingerprint = fingerprint_of(certificate.der)
        self._taken = {LOCAL, *taken}  # that is what this machine is called without a hosts file
        self._sessions: dict[str, HostSession] = {}  # by id
        self._lock = threading.Lock()
        self._unproven = threading.BoundedSemaphore(MOST_UNPROVEN)
        self._closed = threading.Event()
        try:
            ip = resolve(address)
            family = socket.AF_INET6 if ":" in ip else socket.AF_INET
            self._listener = socket.create_server((ip, port), family=family, backlog=MOST_UNPROVEN)
        except OSError as error:
            raise ConfigError(
                f"Hosts cannot join at {address}:{port} ({_reason(error)}); name an address of "
                "this machine, and a free port, with --at ADDRESS:PORT."
            ) from error
        self.address, self.port = ip, int(self._listener.getsockname()[1])
        self._folder = private_folder(SOCKET)
        self._programs = socket.socket(socket.AF_UNIX)
        self._programs.bind(str(self._folder / SOCKET))
        self._programs.listen(MOST_UNPROVEN)

    def __enter__(self) -> Self:
        for run in (self._accept_hosts, self._accept_relays, self._show_life):
            threading.Thread(target=run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        for listener in (self._listener, self._programs):
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # which ends `accept`
            listener.close()
        for session in self._all():
            session.dismiss(ENDED, failed=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def path(self) -> str:
        """The socket of this machine at which programs of hosts, and invitations, are asked for."""
        return str(self._folder / SOCKET)

    def invite(self, seconds: float) -> str:
        """The token of a new invitation for one host."""
        secret = self._invitations.make(seconds)
        return Token(self.address, self.port, self._fingerprint, secret).encode()

    # --- hosts --------------------------------------------------------------------------------

    def _accept_hosts(self) -> None:
        while (plain := self._next(self._listener)) is not None:
            if not self._unproven.acquire(blocking=False):
                plain.close()
                continue
            threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        """One connection, of a host or of a stranger."""
        try:
            try:
                link = join_link.accept(plain, self._context)
            except (OSError, ssl.SSLError):
                plain.close()
                return
            try:
                purpose, name, said = join_link.admit(link, self._fingerprint, self._secret_of)
                session = self._let_in(link, purpose, name, said)
            except (OSError, Refused):
                link.close()
                return
        finally:
            self._unproven.release()
        if session is None:  # of a program, which closes it
            return
        session.listen(link)
        link.close()

    def _secret_of(self, purpose: str, name: str) -> bytes:
        """Raises Refused."""
        if purpose == JOIN:
            return self._invitations.secret(name)
        if purpose not in (RETURN, PROGRAM):
            raise Refused("the purpose of this connection is not known")
        return self._session(name).key

    def _session(self, name: str) -> HostSession:
        """Raises Refused."""
        session = self._sessions.get(name)
        if session is None:
            raise Refused("this host has left, or was never let in")
        return session

    def _let_in(
        self, link: JoinLink, purpose: str, name: str, said: Mapping[str, Any]
    ) -> HostSession | None:
        """The session of a control connection; None: the connection is a program's. Raises
        Refused, OSError."""
        if purpose == JOIN:
            return self._let_host_in(link, name, said)
        session = self._session(name)
        if purpose == PROGRAM:
            number = said.get("number")
            if not isinstance(number, int) or not session.bring(number, link):
                raise Refused("no such program is waited for")
            return None
        session.use(link)
        return session

    def _let_host_in(self, link: JoinLink, name: str, said: Mapping[str, Any]) -> HostSession:
        try:
            host = _host_of(said.get("host"))
            self._invitations.use(name)
        except (Wrong, Refused) as error:
            link.send({"refused": str(error).rstrip(".")})
            raise Refused(str(error)) from error
        key, known_as = secrets.token_bytes(32), secrets.token_hex(16)
        with self._lock:
            own = self._free_name(host.name)
            self._taken.add(own)
            placed = Host(own, host.address, f"{JOINED}{self.path}", devices=host.devices)
            session = HostSession(placed, key)
            self._sessions[known_as] = session
        try:
            link.send({"name": own, "id": known_as, "key": key.hex()})
        except OSError:
            self._forget(known_as)
            raise
        session.use(link)
        threading.Thread(target=self._attend, args=(known_as, session), daemon=True).start()
        return session

    def _attend(self, known_as: str, session: HostSession) -> None:
        failed = True
        try:
            self._look_after(session)
            failed = False
        finally:
            ending = "the launcher looks after this host no more" if failed else ENDED
            session.dismiss(ending, failed=failed)
            self._forget(known_as)

    def _forget(self, known_as: str) -> None:
        with self._lock:
            session = self._sessions.pop(known_as)
            self._taken.discard(session.host.name)

    def _free_name(self, wanted: str) -> str:
        names = (wanted if number == 1 else f"{wanted}-{number}" for number in itertools.count(1))
        return next(name for name in names if name not in self._taken)

    def _all(self) -> list[HostSession]:
        with self._lock:
            return list(self._sessions.values())

    def _show_life(self) -> None:
        while not self._closed.wait(SIGN_OF_LIFE_S):
            for session in self._all():
                session.sign_of_life()

    def _next(self, listener: socket.socket) -> socket.socket | None:
        while not self._closed.is_set():
            try:
                return listener.accept()[0]
            except OSError:
                # Too many open files, or a client that was gone already.
                self._closed.wait(SIGN_OF_LIFE_S / 10)
        return None

    # --- programs -----------------------------------------------------------------------------

    def _accept_relays(self) -> None:
        while (relay := self._next(self._programs)) is not None:
            threading.Thread(target=self._relay, args=(relay,), daemon=True).start()

    def _relay(self, relay: socket.socket) -> None:
        """Connect a relay of this machine with its program on a host, or make an invitation."""
        with relay:
            with relay.makefile("rb") as lines:
                asked = json.loads(lines.readline() or b"{}")
            if "invite" in asked:
                with suppress(OSError):
                    relay.sendall(json.dumps(self.invite(float(asked["invite"]))).encode() + b"\n")
                return
            session = next((s for s in self._all() if s.host.name == asked.get("host")), None)
            try:
                if session is None:
                    raise Refused("it has left")
                link = session.start(asked["module"], asked["args"])
            except Refused as refused:
                with suppress(OSError):
                    relay.sendall(json.dumps({"refused": str(refused)}).encode() + b"\n")
                return
            back = threading.Thread(target=_copy_back, args=(link, relay), daemon=True)
            with suppress(OSError):
                relay.sendall(b"{}\n")
                back.start()
                while chunk := relay.recv(CHUNK_BYTES):
                    link.write(chunk)
            link.end()
            if back.is_alive():
                back.join()
            link.close()


def _copy_back(link: JoinLink, relay: socket.socket) -> None:
    with suppress(OSError):
        while chunk := link.read(CHUNK_BYTES):
            relay.sendall(chunk)
    with suppress(OSError):
        relay.shutdown(socket.SHUT_RDWR)


def _reason(error: OSError) -> str:
    if error.errno is None or isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno)  # `create_server` adds the address to its text


def _host_of(said: Any) -> Host:
    """What a host says of itself. Raises Wrong."""
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
    return Host(host_name("name", said["name"]), ip, devices=tuple(found))
