"""`pipespec serve`: the interface of OpenAI to a cluster, over HTTP."""

from __future__ import annotations

import argparse
import json
import os
import socket
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pipespec.cli.arguments import finish, overrides
from pipespec.cli.terminal import write
from pipespec.errors import ConfigError
from pipespec.system.reading import Unreadable, parse_json, read_text

if TYPE_CHECKING:
    from pipespec.cli.arguments import Commands
    from pipespec.client.registry import RunningCluster
    from pipespec.server.options import ServerOptions

NEEDS = ("fastapi", "prometheus_client", "uvicorn")
KEY_VARIABLE = "PIPESPEC_API_KEY"


def add(commands: Commands) -> None:
    """Describe the command."""
    command = commands.add_parser(
        "serve",
        help="answer HTTP requests as OpenAI does",
        usage="pipespec serve --on NAME [--host HOST] [--port PORT] [--api-key KEY ...] [...]",
        description="Serve a cluster that `pipespec up` started, from this host or another, to "
        "whatever speaks to OpenAI: /v1/chat/completions, /v1/completions, /v1/models, /metrics "
        "and others (docs/serving.md). Several servers may serve one cluster.",
    )
    command.add_argument("--on", metavar="NAME", required=True, help="the cluster to serve")
    command.add_argument("--host", default="127.0.0.1", help="address to listen at (127.0.0.1)")
    command.add_argument("--port", type=int, default=8000, help="port; 0 is a free one (8000)")
    command.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"refuse whoever does not show it; may be given several times ({KEY_VARIABLE}; "
        "without any, everybody may ask)",
    )
    command.add_argument("--api-key-file", metavar="FILE", help="a file of keys, one per line")
    command.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="what to call the model; may be given several times (as its folder)",
    )
    command.add_argument(
        "--max-queued-requests",
        type=int,
        default=1024,
        metavar="N",
        help="answers that may wait here for their first token; more is refused (1024)",
    )
    command.add_argument(
        "--max-queued-tokens",
        type=int,
        default=1_000_000,
        metavar="N",
        help="tokens of the prompts of what waits (1000000)",
    )
    command.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="S",
        help="how long requests wait for a cluster that is away (60)",
    )
    command.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="in which answers may finish at the end; 0: none (30)",
    )
    command.add_argument(
        "--allowed-origins",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web pages that may ask (CORS), such as http://localhost:3000 or *; may be given "
        "several times, or as a JSON list (none)",
    )
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    if overrides(rest, arguments.known_options):
        raise ConfigError(
            f"`pipespec serve --on` takes no settings, but got {rest[0]!r}: they were settled by "
            "`pipespec up`."
        )
    check_installed()

    from pipespec.client import registry
    from pipespec.server.run import bound, run

    running = registry.find(arguments.on)
    options = read_options(arguments, running)
    with bound(options.host, options.port) as listener:

        def announce() -> None:
            write(announcement(listener, options, running, as_json=arguments.json))

        run(running, options, listener, announce)
    return 0


def check_installed() -> None:
    """Raise ConfigError unless the packages of a server are there."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"`pipespec serve` needs {', '.join(missing)}, which is not installed; run "
            "pip install 'pipespec[serve]'."
        )


def read_options(arguments: argparse.Namespace, running: RunningCluster) -> ServerOptions:
    """How the server is to be run. Raises ConfigError."""
    from pipespec.server.options import ServerOptions
    from pipespec.server.service import model_name

    return ServerOptions(
        names=tuple(arguments.served_model_name) or (model_name(running.served.target),),
        host=arguments.host,
        port=arguments.port,
        api_keys=tuple(read_keys(arguments.api_key, arguments.api_key_file)),
        max_queued_requests=arguments.max_queued_requests,
        max_queued_tokens=arguments.max_queued_tokens,
        patience=arguments.patience,
        shutdown_timeout=arguments.shutdown_timeout,
        allowed_origins=tuple(read_origins(arguments.allowed_origins)),
    )


def read_keys(given: list[str], file: str | None) -> list[str]:
    """Keys of the command line, a file and the environment. Raises ConfigError."""
    keys = list(given)
    if file is not None:
        try:
            found = [line.strip() for line in read_text(file).splitlines() if line.strip()]
        except Unreadable as error:
            raise ConfigError(f"The file of keys {file!r} cannot be read: {error}.") from None
        if not found:
            raise ConfigError(f"The file of keys {file!r} holds none; write one per line.")
        keys += found
    if variable := os.environ.get(KEY_VARIABLE):
        keys.append(variable)
    return keys


def read_origins(given: list[str]) -> list[str]:
    """Origins, each an argument or one of a JSON list. Raises ConfigError."""
    origins: list[str] = []
    for text in given:
        if not text.startswith("["):
            origins.append(text)
            continue
        try:
            listed = parse_json(text)
        except Unreadable as error:
            raise ConfigError(f"--allowed-origins cannot be read: {error}.") from None
        if not all(isinstance(origin, str) for origin in listed):
            raise ConfigError("--allowed-origins must be texts, as in '[\"*\"]'.")
        origins += listed
    return origins


def announcement(
    listener: socket.socket, options: ServerOptions, running: RunningCluster, *, as_json: bool
) -> str:
    """What is printed once requests are answered."""
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    if as_json:
        told = {
            "url": url,
            "models": options.names,
            "name": running.name,
            "context": running.served.context,
        }
        return json.dumps(told) + "\n"
    return (
        f"The model {options.names[0]!r} of the cluster {running.name!r} is served at {url}; end "
        "it with Ctrl-C.\n"
    )
