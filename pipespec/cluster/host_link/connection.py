"""What connections to hosts have in common, and those to the hosts of a hosts file.

A host of a hosts file is reached as OpenSSH's client reaches it: `~/.ssh/config` and the system's
file say how, with their aliases, users, ports, keys and jump hosts; keys come from there, from the
agent or from the usual files; and the host's own key must be in a `known_hosts` file. Nothing is
ever asked, and neither agent nor ports are forwarded.
"""

from __future__ import annotations

import asyncio
import getpass
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncssh
from asyncssh.config import SSHClientConfig

from pipespec.config.hosts import Host

# Names a file to be used in place of `~/.ssh/config` and the system's.
CONFIG_VARIABLE = "PIPESPEC_SSH_CONFIG"
CONFIGS = ("~/.ssh/config", "/etc/ssh/ssh_config")
USER_KNOWN_HOSTS = ["~/.ssh/known_hosts", "~/.ssh/known_hosts2"]
SYSTEM_KNOWN_HOSTS = ["/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2"]
CONNECT_TIMEOUT = 5  # seconds until a host that does not answer counts as unreachable
CHUNK_BYTES = 2**16
LOGIN_TIMEOUT = 20  # seconds in which one that answers must let us in
ALIVE_INTERVAL = 1  # seconds between questions over a silent connection
# Without ways to authenticate, or to be let in, that nothing here uses.
QUIET: dict[str, Any] = {
    "gss_kex": False,
    "gss_auth": False,
    "host_based_auth": False,
    "kbdint_auth": False,
    "password_auth": False,
    "agent_forwarding": False,
    "keepalive_interval": ALIVE_INTERVAL,
}
# The ciphers that take half the time of asyncssh's first choice, before its others.
CIPHERS = "^aes128-gcm@openssh.com,aes256-gcm@openssh.com"
# Parts of messages, and the remedies.
REMEDIES = (
    ("permission denied", "let this user's key in with `ssh-copy-id {to}`, or set `identity`"),
    ("too many authentication failures", "set `identity` of the host"),
    ("host key is not trusted", "connect once by hand with `ssh {to}` to accept its key"),
    ("name or service not known", "correct `address` or `ssh` of the host"),
    ("name resolution", "correct `address` or `ssh` of the host"),
    ("connection refused", "start sshd there, or set `port` of the host"),
    ("no route to host", "check `address` and that the host is on this network"),
    ("network is unreachable", "check `address` and that the host is on this network"),
    ("timed out", "check that the host is up and that no firewall stops the port"),
    ("not responding", "check the host and the link to it"),
)
logging.getLogger("asyncssh").setLevel(logging.ERROR)


class LinkFailed(Exception):
    """A host cannot be reached, or the connection to it broke; the message is a clause."""


class HostClient(asyncssh.SSHClient):
    """This end of a connection. `host`: the host of a hosts file that it leads to. `lost`: why it
    has ended, if not by our wish. `limit`: how long the way to the host, and then its greeting and
    our proof, may take."""

    host: Host | None = None
    lost: Exception | None = None
    limit: asyncio.Timeout | None = None

    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        if self.limit is not None and self.limit.when() is not None:
            self.limit.reschedule(asyncio.get_running_loop().time() + LOGIN_TIMEOUT)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = exc

    def require(self, code: int | None) -> int:
        """The exit code of a program. Raises LinkFailed if there is none, as the link broke."""
        if code is None:
            why = reason_of(self.lost) if self.host is None else reason(self.host, self.lost)
            raise LinkFailed(why)
        return code


Connection = tuple[asyncssh.SSHClientConnection, HostClient]
# What a connection, and the way to one, raises.
FAILURES = (LinkFailed, OSError, asyncssh.Error)


async def run_command(
    connection: asyncssh.SSHClientConnection, command: str
) -> asyncssh.SSHClientProcess[bytes]:
    """A session that runs a command, without a terminal."""
    process: asyncssh.SSHClientProcess[bytes] = await connection.create_process(
        command, encoding=None, request_pty=False
    )
    return process


def destination(host: Host) -> str:
    """What SSH connects to: the `ssh` entry of the host, or else its address."""
    return host.ssh or host.address


@asynccontextmanager
async def connected(host: Host, alive_count: int) -> AsyncIterator[Connection]:
    """A connection to a host of a hosts file, of which so many questions in a row may go
    unanswered. Raises LinkFailed."""
    name, user, port = _parts(destination(host), with_port=False)
    to = name, host.user or user, host.port if host.port != 22 else port
    own: dict[str, Any] = {"keepalive_count_max": alive_count}
    if host.identity is not None:
        own["client_keys"] = own["agent_identities"] = [os.path.expanduser(host.identity)]
    try:
        connection, peer = await _connect(to, **own)
    except (OSError, ValueError, asyncssh.Error) as error:
        raise LinkFailed(reason(host, error)) from error
    peer.host = host
    try:
        yield connection, peer
    finally:
        connection.close()


async def _connect(
    to: tuple[str, Any, Any], passed: tuple[str, ...] = (), **options: Any
) -> Connection:
    """A connection to a name, with the user and port that override those of the configuration, and
    through its jump hosts. Raises OSError, ValueError, asyncssh.Error."""
    name, user, port = to
    named = os.environ.get(CONFIG_VARIABLE)
    paths = [named] if named else _readable(CONFIGS)
    config: Any = SSHClientConfig.load(
        None, paths, False, False, False, getpass.getuser(), user, name, port
    )
    if (keys := config.get("IdentityFile")) and "client_keys" not in options:
        options["client_keys"] = _readable(keys)
    known_hosts = config.get("UserKnownHostsFile", USER_KNOWN_HOSTS)
    known_hosts = [*known_hosts, *config.get("GlobalKnownHostsFile", SYSTEM_KNOWN_HOSTS)]
    hops = [hop for hop in (config.get("ProxyJump") or "").split(",") if hop]
    if "tunnel" not in options:
        options["tunnel"] = None
        for hop in hops if not set(hops) & set(passed) else ():
            through = {"tunnel": options["tunnel"]} if options["tunnel"] else {}
            through["keepalive_count_max"] = options["keepalive_count_max"]
            options["tunnel"], _ = await _connect(_parts(hop), (*passed, *hops), **through)
    peer = HostClient()
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT) as peer.limit:
            connection: asyncssh.SSHClientConnection = await asyncssh.connect(
                name,
                port,
                username=user,
                config=paths,
                client_factory=lambda: peer,
                # None would mean that every key is accepted.
                known_hosts=_readable(known_hosts) or b"",
                ignore_encrypted=True,
                x11_forwarding=False,
                encryption_algs=() if config.get("Ciphers") else CIPHERS,
                connect_timeout=None,
                **QUIET,
                **options,
            )
    except BaseException:
        if options["tunnel"] is not None:
            options["tunnel"].close()
        raise
    connection.set_tunnel(options["tunnel"])
    return connection, peer


def _parts(place: str, *, with_port: bool = True) -> tuple[str, Any, Any]:
    """Name, user and port of `user@name:port`; a name may be an IPv6 address, so that only a jump
    host and a URL have a port."""
    with_port = with_port or place.startswith("ssh://")
    user, _, name = place.removeprefix("ssh://").rpartition("@")
    found = re.fullmatch(r"(\[.+\]|[^:]+):(\d+)", name) if with_port else None
    return (found[1] if found else name).strip("[]"), user or (), int(found[2]) if found else ()


def _readable(paths: Iterable[str]) -> list[str]:
    return [each for each in map(os.path.expanduser, paths) if os.access(each, os.R_OK)]


def reason(host: Host, error: Exception | None) -> str:
    """Why a host cannot be reached, with the remedy."""
    to = destination(host) if host.user is None else f"{host.user}@{destination(host)}"
    said = reason_of(error)
    for sign, remedy in REMEDIES:
        if sign in said.lower():
            return f"{said}; {remedy.format(to=to)}"
    return f"{said}; try `ssh {to}` by hand"


def reason_of(error: Exception | None) -> str:
    """An error of a connection as a clause."""
    if error is None:
        return "the connection was lost"
    if isinstance(error, LinkFailed):
        return str(error)
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, OSError):
        if error.filename is not None or isinstance(error, socket.gaierror):
            return f"{error.filename or ''} {error.strerror}".strip()
        # Of several addresses, asyncio names all errors in its text.
        numbers = re.findall(r"\[Errno (\d+)\]", str(error))
        return os.strerror(int(numbers[-1])) if numbers else str(error)
    said = error.reason if isinstance(error, asyncssh.Error) else str(error)
    return " ".join(said.split()).rstrip(".")


async def pump(
    source: asyncio.StreamReader | asyncssh.SSHReader[bytes],
    target: asyncio.StreamWriter | asyncssh.SSHWriter[bytes],
) -> None:
    """Copy a stream to its end. What comes once `target` is gone is dropped, so that a program
    which still writes does not wait."""
    gone = False
    with suppress(OSError, asyncssh.Error):
        while chunk := await source.read(CHUNK_BYTES):
            try:
                if not gone:
                    target.write(chunk)
                    await target.drain()
            except (OSError, asyncssh.Error):
                gone = True
