"""`pipespec serve`: OpenAI's HTTP interface to a cluster."""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import re
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from typing import Any

from pipespec.cli.cache import checked
from pipespec.cli.detach import Launcher, LauncherEnded, cluster_of
from pipespec.client.model_info import full_name
from pipespec.client.registry import (
    RunningCluster,
    asked_to_end,
    clear,
    find,
    left,
    log_of,
    serving,
)
from pipespec.cluster.decide import decide, require_room
from pipespec.config.compose import compose
from pipespec.console.arguments import AddParser, finish, overrides
from pipespec.console.terminal import write
from pipespec.engine.model_settings import model_name
from pipespec.errors import ConfigError, print_error
from pipespec.limits import suggest
from pipespec.server.answer_record import AnswerRecord
from pipespec.server.listener import bind_listener, connection_capacity
from pipespec.server.options import ServerOptions
from pipespec.settings import about
from pipespec.system.exit_codes import SIGNALLED
from pipespec.system.validation import read_text, readable

NEEDS = ("fastapi", "h11", "prometheus_client", "uvicorn", "uvloop")
KEY_VARIABLE = "PIPESPEC_API_KEY"
# The folder of a record of answers (`AnswerRecord`).
ANSWERS_VARIABLE = "PIPESPEC_ANSWERS"
# A line of a file of keys that names the key, as the access log does.
NAMED_KEY = re.compile(r"([\w.@-]+): +(.*)", re.ASCII)
# What --limit sets of `ServerOptions`.
LIMITS = [entry.name for entry in fields(ServerOptions) if about(entry).limits]


def add(add_parser: AddParser) -> None:
    command = add_parser(
        show_settings=True,
        usage="pipespec serve [--on NAME] [--host HOST] [--port PORT] [--api-key KEY ...] [...] "
        "[-] [MODEL] [SETTING=VALUE ...]",
        description="Start a cluster as `pipespec up` does and serve it to clients of "
        "OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models, /metrics and others "
        "(docs/serving.md). With --on, serve a cluster that is up, from this host or another; "
        "several servers may serve one. With - more settings are read from standard input.",
    )
    command.add_argument("--on", metavar="NAME", help="serve the cluster of this name")
    command.add_argument("--name", help="the name of the cluster that is started (default)")
    usual = ServerOptions
    command.add_argument("--host", default=usual.host, help=f"address to listen at ({usual.host})")
    command.add_argument(
        "--port", type=int, default=usual.port, help=f"port; 0 is a free one ({usual.port})"
    )
    repeated = partial(command.add_argument, action="append", default=[])
    repeated(
        "--api-key",
        metavar="KEY",
        help="refuse requests without it; @FILE: a file of keys, one per line, as KEY or, for the "
        f"access log, NAME: KEY; may be given several times ({KEY_VARIABLE}; without any, all "
        "requests are accepted)",
    )
    command.add_argument(
        "--access-log",
        action="store_true",
        help="print a line for each request to standard error: id, name of its key, tokens, end",
    )
    repeated(
        "--served-model-name",
        metavar="NAME",
        help="a name of the model; may be given several times (the name of its folder)",
    )
    repeated(
        "--limit",
        metavar="NAME=VALUE",
        help=f"may be given several times: {', '.join(LIMITS)} (docs/serving.md)",
    )
    repeated(
        "--allowed-origins",
        metavar="ORIGIN",
        help="web pages that may send requests (CORS), such as http://localhost:3000 or *; "
        "may be given several times (none)",
    )
    repeated(
        "--allowed-hosts",
        metavar="HOST",
        help="names by which clients may reach the server, such as lab.example, *.example or *; "
        "may be given several times (without an API key: localhost, --host and addresses; with "
        "one: any)",
    )
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    check_installed()
    if arguments.on is not None:
        settings = overrides(rest, arguments.known_options)
        if settings or arguments.name:
            given = settings[0] if settings else "--name"
            raise ConfigError(
                f"`pipespec serve --on` starts no cluster and takes no settings, but got "
                f"{given!r}; give it to `pipespec up`."
            )
        with listening(arguments) as listener:
            running = find(arguments.on)

            def watch() -> RunningCluster:
                if asked_to_end(running):
                    raise LauncherEnded(running.name)
                return running

            return answer_requests(arguments, listener, running.served.target, watch)
    name, settings = cluster_of(arguments, rest, "serve")
    config = compose(settings)
    with serving(name), ExitStack() as stack:
        listener = stack.enter_context(listening(arguments))
        if config.cluster.hosts is None:  # else hosts would be asked twice
            require_room(config)
            checked(decide(config), stays=True)
        launcher = Launcher(name, settings, ours=True)
        try:
            print_error(
                f"{name}: the cluster loads; until it is ready {url_of(listener)} answers 503"
            )
            code = answer_requests(
                arguments, listener, full_name(config.model.target), launcher.watch
            )
        finally:
            launcher.end()
        # If it has just died, no client waits for its unfinished requests.
        if left(name):
            clear(name)
    return code


def listening(arguments: argparse.Namespace) -> socket.socket:
    """The socket for requests, bound before anything is started. Raises ConfigError."""
    options = read_options(arguments, "model")  # errors before all else
    connection_capacity(options.max_connections)
    if options.answers:
        folder = AnswerRecord(options.answers).folder
        print_error(f"The token ids of prompts and answers are kept in {folder}.")
    return bind_listener(arguments.host, arguments.port)


def answer_requests(
    arguments: argparse.Namespace,
    listener: socket.socket,
    target: str,
    watch: Callable[[], RunningCluster | None],
) -> int:
    """Answer requests to a cluster until a signal asks for the end; the exit code."""
    import uvloop

    from pipespec.server.api_server import run_api_server

    options = read_options(arguments, target)
    address = ipaddress.ip_address(listener.getsockname()[0].partition("%")[0])
    if not options.api_keys and not address.is_loopback:
        print_error(
            f"{url_of(listener)} may be reached from other machines and asks for no API key; pass "
            "--api-key, or listen at 127.0.0.1."
        )

    def announce(running: RunningCluster) -> None:
        write(announcement(listener, options, running, as_json=arguments.json))

    try:
        early = uvloop.run(run_api_server(watch, options, listener, announce))
    except LauncherEnded as ended:
        print_error(f"{ended} The server ends with it.")
        return 0
    return 0 if early is None else SIGNALLED + early


def check_installed() -> None:
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"`pipespec serve` needs {', '.join(missing)}, which is not installed; run "
            "pip install 'pipespec[serve]'."
        )


def read_options(arguments: argparse.Namespace, target: str) -> ServerOptions:
    """How the server is to be run, whose model is `target`. Raises ConfigError."""
    named = read_keys(arguments.api_key)
    keys = tuple(key for _, key in named)
    return ServerOptions(
        names=tuple(arguments.served_model_name) or (model_name(target),),
        host=arguments.host,
        port=arguments.port,
        api_keys=keys,
        key_names=tuple(name or f"key-{place}" for place, (name, _) in enumerate(named, 1)),
        access_log=arguments.access_log,
        allowed_origins=tuple(arguments.allowed_origins),
        allowed_hosts=tuple(arguments.allowed_hosts),
        answers=os.environ.get(ANSWERS_VARIABLE, ""),
        private_prefixes=bool(keys),
        **read_limits(arguments.limit),
    )


def read_limits(given: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in LIMITS:
            raise ConfigError(f"--limit {text} is not known; {suggest(name, LIMITS)}.")
        try:
            whole = not isinstance(getattr(ServerOptions, name), float)
            found[name] = int(value) if whole else float(value)
        except ValueError:
            raise ConfigError(f"--limit {text} is no number; write {name}=NUMBER.") from None
    return found


def read_keys(given: list[str]) -> list[tuple[str, str]]:
    """Names, "" if there is none, and keys: of the command line, the files that it names, and the
    environment. Raises ConfigError."""
    keys = [("", key) for key in given if not key.startswith("@")]
    for file in (key[1:] for key in given if key.startswith("@")):
        with readable(f"The file of keys {file!r} cannot be read"):
            found = [line.strip() for line in read_text(file).splitlines() if line.strip()]
        if not found:
            raise ConfigError(f"The file of keys {file!r} holds none; write one per line.")
        keys += [(named[1], named[2]) if (named := NAMED_KEY.match(k)) else ("", k) for k in found]
    variable = os.environ.get(KEY_VARIABLE)
    if variable is not None:
        if not variable.strip():
            raise ConfigError(
                f"The variable {KEY_VARIABLE} is empty; set it to a key, or unset it to serve "
                "without one."
            )
        keys.append(("", variable))
    return keys


def announcement(
    listener: socket.socket, options: ServerOptions, running: RunningCluster, *, as_json: bool
) -> str:
    url, log = f"{url_of(listener)}/v1", log_of(running.name)
    if as_json:
        fields = {
            "url": url,
            "models": options.names,
            "name": running.name,
            "context": running.served.context,
            **({} if log is None else {"log": str(log)}),
        }
        return json.dumps(fields) + "\n"
    from pipespec.server.dialect import public_routes

    page = f", a chat page at {url_of(listener)}/chat" if public_routes() else ""
    return (
        f"The model {options.names[0]!r} of the cluster {running.name!r} is served at {url}{page}; "
        f"end it with Ctrl-C.{'' if log is None else f' The log of the cluster is {log}.'}\n"
    )


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
