"""`pipespec fetch`: give every host the weights that it computes, before a cluster is started."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from pipespec.console.arguments import finish, overrides
from pipespec.console.terminal import named_progress, write
from pipespec.errors import print_error
from pipespec.system.sizes import size_text

if TYPE_CHECKING:
    from pipespec.cluster.deployment import Deployment
    from pipespec.console.arguments import Commands


def add(commands: Commands) -> None:
    """Describe the command."""
    command = commands.add_parser(
        "fetch",
        show_settings=True,
        help="fetch the weights that each host computes",
        usage="pipespec fetch [--json] [SETTING=VALUE ...]",
        description="Fetch to every host the weights that its ranks compute, from the hub, from "
        "this host or from another one that has them. `generate`, `up` and `serve` do so too; this "
        "command does it beforehand, as in `pipespec fetch cluster=hosts.yaml model.target=MODEL`. "
        "What is there already is not fetched again.",
    )
    finish(command, run, starts=True)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Fetch, and print what each host has."""
    settings = overrides(rest, arguments.known_options)

    from pipespec.cluster.deployment import decide
    from pipespec.cluster.host_weights import require_weights
    from pipespec.config.compose import compose

    moved: dict[str, tuple[int, int, int]] = {}
    deployment = with_weights(decide(compose(settings)), moved)
    require_weights(deployment)
    if arguments.json:
        fields = ("fetched_bytes", "bytes")
        hosts = {
            name: dict(zip(fields, (done - first, total), strict=True))
            for name, (first, done, total) in moved.items()
        }
        write(json.dumps({"hosts": hosts}) + "\n")
        return 0
    for name, (first, done, total) in moved.items():
        write(f"{name}: fetched {size_text(done - first)}, to have {size_text(total)} in all.\n")
    write("All hosts have the weights that they compute.\n")
    return 0


def with_weights(
    deployment: Deployment, moved: dict[str, tuple[int, int, int]] | None = None
) -> Deployment:
    """The deployment once its hosts have their weights, with a progress bar per host.

    `moved` gets, by host, how many bytes were there at first, are there now, and are needed.
    """
    from pipespec.cluster.weight_distribution import distribute_weights

    found = {} if moved is None else moved
    with named_progress() as show:

        def on_progress(host: str, done: int, total: int) -> None:
            if total:
                first = found.get(host, (done, 0, 0))[0]
                found[host] = first, max(done, found.get(host, (0, 0, 0))[1]), total
                show(f"{host}: weights", done, total)

        return distribute_weights(deployment, on_progress, print_error)
