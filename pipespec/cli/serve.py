"""`pipespec serve`: the interface of OpenAI to a cluster, over HTTP."""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pipespec.cli.arguments import STDIN, finish, overrides
from pipespec.cli.detach import Launcher
from pipespec.cli.terminal import write
from pipespec.cli.up import default_name, read_settings
from pipespec.client.registry import check_name, clear, left
from pipespec.client.served import full_name
from pipespec.errors import ConfigError, tell
from pipespec.server.options import ServerOptions, model_name
from pipespec.server.tools.families import FAMILIES
from pipespec.system.outcome import SIGNALLED
from pipespec.system.reading import Unreadable, parse_json, read_text

if TYPE_CHECKING:
    from pipespec.cli.arguments import Commands
    from pipespec.client.registry import RunningCluster

NEEDS = ("fastapi", "httptools", "prometheus_client", "uvicorn", "uvloop")
KEY_VARIABLE = "PIPESPEC_API_KEY"
# Options that are numbers, as `ServerOptions` has them.
LIMITS = (
    (
        "max_queued_requests",
        "N",
        "answers that may wait here for their first token; more is refused",
    ),
    ("max_queued_tokens", "N", "tokens of the prompts of what waits"),
    ("patience", "S", "how long requests wait for a cluster that is away"),
    ("shutdown_timeout", "S", "in which answers may finish at the end; 0: none"),
)


def add(commands: Commands) -> None:
    """Describe the command."""
    command = commands.add_parser(
        "serve",
        show_settings=True,
        help="answer HTTP requests as OpenAI does",
        usage="pipespec serve [--on NAME] [--host HOST] [--port PORT] [--api-key KEY ...] [...] "
        "[-] [SETTING=VALUE ...]",
        description="Start a cluster as `pipespec up` does and serve it to whatever speaks to "
        "OpenAI: /v1/chat/completions, /v1/completions, /v1/models, /metrics and others "
        "(docs/serving.md). With --on, serve a cluster that is up, from this host or another; "
        "several servers may serve one. With - more settings are read from standard input.",
    )
    command.add_argument("--on", metavar="NAME", help="serve the cluster of this name")
    command.add_argument("--name", help="what to call the cluster that is started (default)")
    command.add_argument(
        "--measure",
        action="store_true",
        help="with a hosts file: measure its hosts first, and place layers and draft accordingly",
    )
    usual = ServerOptions
    command.add_argument("--host", default=usual.host, help=f"address to listen at ({usual.host})")
    command.add_argument(
        "--port", type=int, default=usual.port, help=f"port; 0 is a free one ({usual.port})"
    )
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
    for name, unit, told in LIMITS:
        value = getattr(usual, name)
        command.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(value),
            default=value,
            metavar=unit,
            help=f"{told} ({value:.15g})",
        )
    command.add_argument(
        "--allowed-origins",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web pages that may ask (CORS), such as http://localhost:3000 or *; may be given "
        "several times, or as a JSON list (none)",
    )
    command.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help=f"how the model writes calls of tools: {', '.join(FAMILIES)} (as its chat template "
        "tells)",
    )
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    settings = overrides(rest, arguments.known_options, stdin_allowed=arguments.on is None)
    check_installed()
    if arguments.on is not None:
        if settings or arguments.name or arguments.measure:
            given = settings[0] if settings else "--name" if arguments.name else "--measure"
            raise ConfigError(
                f"`pipespec serve --on` starts no cluster and takes no settings, but got "
                f"{given!r}; give it to `pipespec up`."
            )
        return serve_one(arguments)
    if STDIN in rest:
        settings += read_settings()
    return serve_own(arguments, settings)


def serve_one(arguments: argparse.Namespace) -> int:
    """Serve a cluster that is up."""
    from pipespec.client import registry

    with listening(arguments) as listener:
        running = registry.find(arguments.on)
        return answer(arguments, listener, running.served.target, lambda: running)


def serve_own(arguments: argparse.Namespace, settings: list[str]) -> int:
    """Start a cluster and serve it; both end together."""
    name = default_name(settings) if arguments.name is None else arguments.name
    check_name(name)
    read_options(arguments, name)  # what is wrong is told before anything starts
    with listening(arguments) as listener:
        launcher = Launcher(name, settings, measure=arguments.measure, ours=True)
        try:
            tell(f"{name}: the cluster loads; until it is ready {url_of(listener)} answers 503")
            code = answer(arguments, listener, target_of(settings), launcher.watch)
        finally:
            launcher.end()
        # Should it just have died, nobody waits for what it left.
        if left(name):
            clear(name)
    return code


def target_of(settings: list[str]) -> str:
    """The model of a cluster that is made by settings. Raises ConfigError."""
    from pipespec.config.compose import compose_sections

    (model,) = compose_sections(["model"], settings)
    return full_name(model.target)


@contextmanager
def listening(arguments: argparse.Namespace) -> Iterator[socket.socket]:
    """The socket on which requests come, taken before anything is started. Raises ConfigError."""
    from pipespec.server.run import bound

    with bound(arguments.host, arguments.port) as listener:
        yield listener


def answer(
    arguments: argparse.Namespace,
    listener: socket.socket,
    target: str,
    find: Callable[[], RunningCluster | None],
) -> int:
    """Answer requests to a cluster until a signal asks for the end; the exit code."""
    import uvloop

    from pipespec.server.run import serve

    options = read_options(arguments, target)

    def announce(running: RunningCluster) -> None:
        write(announcement(listener, options, running, as_json=arguments.json))

    early = uvloop.run(serve(find, options, listener, announce))
    return 0 if early is None else SIGNALLED + early


def check_installed() -> None:
    """Raise ConfigError unless the packages of a server are there."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"`pipespec serve` needs {', '.join(missing)}, which is not installed; run "
            "pip install 'pipespec[serve]'."
        )


def read_options(arguments: argparse.Namespace, target: str) -> ServerOptions:
    """How the server is to be run, whose model is `target`. Raises ConfigError."""
    return ServerOptions(
        names=tuple(arguments.served_model_name) or (model_name(target),),
        host=arguments.host,
        port=arguments.port,
        api_keys=tuple(read_keys(arguments.api_key, arguments.api_key_file)),
        max_queued_requests=arguments.max_queued_requests,
        max_queued_tokens=arguments.max_queued_tokens,
        patience=arguments.patience,
        shutdown_timeout=arguments.shutdown_timeout,
        allowed_origins=tuple(read_origins(arguments.allowed_origins)),
        tool_call_parser=arguments.tool_call_parser,
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
    url = f"{url_of(listener)}/v1"
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


def url_of(listener: socket.socket) -> str:
    """Where a server is reached from this machine."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
