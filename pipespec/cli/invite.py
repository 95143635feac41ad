"""`pipespec invite`, and `pipespec up --invite`: let hosts join a cluster that runs."""

from __future__ import annotations

import argparse
import json
import socket
from dataclasses import dataclass

from pipespec.client.registry import RunningCluster, find
from pipespec.console.arguments import AddParser, add_name, finish, refuse_settings
from pipespec.console.terminal import write
from pipespec.errors import ConfigError

MINUTES, MOST_MINUTES = 60.0, 7 * 24 * 60.0
MOST_HOSTS = 64


@dataclass(frozen=True)
class JoinOptions:
    """Where hosts join: the address of this machine, None: that of the default route, and the port,
    0: a free one. `silent`: whether no invitation is printed, as another process does it. `hosts`:
    the cluster begins once so many, this machine included, are there."""

    address: str | None = None
    port: int = 0
    silent: bool = False
    hosts: int = 1

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> JoinOptions | None:
        """What the options of `up` say; None: no host may join. Raises ConfigError."""
        if not arguments.invite:
            if arguments.at is not None or arguments.hosts is not None:
                raise ConfigError("--at and --hosts are for hosts that join; add --invite.")
            return None
        address, port = parse_place(arguments.at) if arguments.at else (None, 0)
        hosts = 1 if arguments.hosts is None else arguments.hosts
        if not 1 <= hosts <= MOST_HOSTS:
            raise ConfigError(f"--hosts is {hosts}, but must be 1 to {MOST_HOSTS}.")
        if hosts > 1 and arguments.detach:
            raise ConfigError(
                "--hosts prints the commands for other hosts before the cluster is ready, so leave "
                "--detach out."
            )
        return cls(address, port, arguments.no_token, hosts)

    @property
    def flags(self) -> list[str]:
        """The same options for a process whose output goes to a log, where no token belongs."""
        where = self.address or ""
        at = [] if self.address is None else ["--at", f"[{where}]:{self.port}"]
        return ["--invite", "--no-token", *at]


def add_join_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--invite",
        action="store_true",
        help="measure this machine, and print a command with which another host joins the cluster",
    )
    command.add_argument(
        "--at",
        metavar="ADDRESS[:PORT]",
        help="with --invite: where other hosts reach this one (the address of the default route, "
        "a free port)",
    )
    command.add_argument(
        "--hosts",
        type=int,
        metavar="N",
        help="with --invite: begin once N hosts, this one included, are there, for a model that "
        "this one cannot hold alone (1)",
    )
    command.add_argument("--no-token", action="store_true", help=argparse.SUPPRESS)


def parse_place(text: str) -> tuple[str, int]:
    """An address and a port, which is 0 if there is none. Raises ConfigError."""
    address, port = text, "0"
    if text.startswith("["):
        address, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or "0"
    elif text.count(":") == 1:
        address, _, port = text.partition(":")
    if not address or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"--at is {text!r}, but must be an address of this machine, as in 10.0.0.1 or "
            "10.0.0.1:4000."
        )
    return address, int(port)


def add(add_parser: AddParser) -> None:
    command = add_parser(
        description="Print a command for another host, which then joins the cluster that "
        "`pipespec up --invite` started. It holds a secret that lets in one host, once, for a "
        "limited time.",
    )
    add_name(command)
    command.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"how long it is valid ({MINUTES:g})"
    )
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    refuse_settings(arguments, rest)
    if not 0 < arguments.minutes <= MOST_MINUTES:
        raise ConfigError(
            f"--minutes is {arguments.minutes:g}, but must be above 0 and at most {MOST_MINUTES:g}."
        )
    running = find(arguments.name)
    invitation = invitation_to(running, arguments.minutes)
    write(json.dumps(invitation) + "\n" if arguments.json else sentences(invitation))
    return 0


def invitation_to(running: RunningCluster, minutes: float = MINUTES) -> dict[str, str | float]:
    """A new invitation to a cluster of this machine, as `described`. Raises ConfigError."""
    if running.joins_through is None:
        raise ConfigError(
            f"No host can join the cluster {running.name!r}; start it with `pipespec up --invite`."
        )
    try:
        token = ask_for_invitation(running.joins_through, minutes * 60)
    except OSError as error:
        raise ConfigError(
            f"The cluster {running.name!r} makes no invitation here ({error.strerror or error}); "
            f"run `pipespec invite` on {running.host}."
        ) from error
    return described(token, minutes)


def ask_for_invitation(path: str, seconds: float) -> str:
    """A token from the launcher with that socket, a process of this user. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        server.sendall(f"{seconds}\n".encode())
        with server.makefile() as lines:
            found = lines.readline().strip()
    if not found:
        raise ConnectionError("it has closed the connection")
    return found


def described(token: str, minutes: float) -> dict[str, str | float]:
    return {"command": f"pipespec join {token}", "token": token, "minutes": minutes}


def sentences(invitation: dict[str, str | float]) -> str:
    return (
        f"To let one more host join within {invitation['minutes']:g} minutes, run this there:\n"
        f"  {invitation['command']}\n"
    )
