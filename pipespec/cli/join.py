"""`pipespec join`: have this host compute a part of a cluster that runs elsewhere."""

from __future__ import annotations

import argparse
import json

from pipespec.client.registry import noting_joined
from pipespec.cluster.host_link.joined_host import JoinedHost
from pipespec.cluster.host_link.token import Token
from pipespec.config.entries import devices as checked
from pipespec.config.entries import host_name
from pipespec.config.hosts import own_name
from pipespec.console.arguments import STDIN, AddParser, finish, list_of, words
from pipespec.console.terminal import standard_input, write
from pipespec.errors import ConfigError
from pipespec.system.devices import num_cuda, require_device
from pipespec.system.end_signals import say_ending
from pipespec.system.validation import readable


def add(add_parser: AddParser) -> None:
    command = add_parser(
        usage="pipespec join TOKEN [--devices DEVICE,...] [--name NAME] [--address ADDRESS]",
        description="Join the cluster that made TOKEN (`pipespec up --invite`, `pipespec invite`): "
        "this host is measured, gets the weights of its layers, and computes them until Ctrl-C. "
        "The other hosts then take its layers over, and it ends; a second Ctrl-C ends it at once. "
        "With - the token is read from standard input, so that it shows in no list of processes.",
    )
    command.add_argument("token", metavar="TOKEN", help="what `pipespec invite` printed")
    command.add_argument(
        "--devices",
        type=list_of(str),
        metavar="DEVICE,...",
        help="what computes here, one stage for each, as in cuda:0,cuda:1 (all CUDA devices, or "
        "the CPU)",
    )
    command.add_argument("--name", help="the name of this host in the cluster (its host name)")
    command.add_argument(
        "--address", help="where the other hosts reach this one (as this one reaches the cluster)"
    )
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    if found := words(rest, arguments.known_options, stdin_allowed=True):
        raise ConfigError(
            f"`pipespec join` takes one token and no settings, but got {found[0]!r}; the settings "
            "are those of the cluster."
        )
    given = arguments.token
    if given == STDIN:
        with readable("The token cannot be read from standard input"):
            given = standard_input()
    devices = devices_of(arguments.devices)

    name = own_name() if arguments.name is None else str(host_name("--name", arguments.name))

    token = Token.decode(given)
    host = JoinedHost(token, name, devices, arguments.address)

    with host, noting_joined(f"{token.address}:{token.port}", host.name) as note:

        def say(sentence: str) -> None:
            note(sentence.rstrip("."))
            if not arguments.json:
                write(f"{sentence[:1].upper()}{sentence[1:].rstrip('.')}.\n")

        if arguments.json:
            write(json.dumps({"name": host.name, "devices": devices}) + "\n")
        else:
            write(f"This host has joined as {host.name!r}. Ctrl-C leaves the cluster.\n")
        while True:
            try:
                host.run(say)
                return 0
            except KeyboardInterrupt:
                if host.leaving:
                    raise
                say_ending("leaving; Ctrl-C again ends this host at once, as a fault would")
                host.leave()


def devices_of(named: list[str] | None) -> list[str]:
    if named is None:
        return [f"cuda:{number}" for number in range(num_cuda())] or ["cpu"]
    found = [device for group in checked("--devices", named) for device in group]
    for device in found:
        if device in ("auto", "cuda"):
            raise ConfigError(f"--devices holds {device!r}; name each device, as in cuda:0,cuda:1.")
        require_device(device, "--devices holds")
    return found
