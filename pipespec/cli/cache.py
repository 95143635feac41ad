"""`pipespec cache`: fetch the weights that hosts compute, and list or remove what this host keeps
of them."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.table import Table

from pipespec.cluster.decide import check_deployment, decide
from pipespec.cluster.deployment.checks import chosen, require_fit, summary
from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.weights.distribution import distribute_weights
from pipespec.cluster.weights.plan import require_weights
from pipespec.config.compose import compose
from pipespec.console.arguments import AddParser, finish, overrides, words
from pipespec.console.terminal import named_progress, show, write
from pipespec.engine.checkpoint.parts.folder import CacheEntry, entries, remove
from pipespec.errors import ConfigError
from pipespec.system.sizes import size_text


def add(add_parser: AddParser) -> None:
    command = add_parser(
        show_settings=True,
        usage="pipespec cache list | pipespec cache prune [--all] [MODEL ...] | "
        "pipespec cache fetch [MODEL] [SETTING=VALUE ...], each with [--json]",
        description="`fetch` gets to every host the weights that its ranks compute, from the hub, "
        "from this host or from another one that has them, as `generate`, `up` and `serve` do. "
        "`list` shows the models of which this host has fetched parts. `prune` removes commits "
        "that a newer one has replaced, and what was not finished; with names of models all of "
        "these, and with --all everything. Clusters that run go on.",
    )
    actions = {"list": show_entries, "prune": prune, "fetch": fetch}
    command.add_argument("action", choices=actions, help="list, prune or fetch")
    command.add_argument("--all", action="store_true", help="with prune: remove everything")
    finish(command, lambda arguments, rest: actions[arguments.action](arguments, rest))


def fetch(arguments: argparse.Namespace, rest: list[str]) -> int:
    settings = overrides(rest, arguments.known_options)
    if arguments.all:
        raise ConfigError("`pipespec cache fetch` takes no --all; it fetches what is computed.")

    moved: dict[str, tuple[int, int]] = {}
    deployment = decide(compose(settings))
    require_fit(deployment)
    deployment = with_weights(deployment, moved)
    require_weights(deployment)
    if arguments.json:
        hosts = {name: {"fetched_bytes": of[0], "bytes": of[1]} for name, of in moved.items()}
        write(json.dumps({"hosts": hosts}) + "\n")
        return 0
    for name, (done, total) in moved.items():
        write(f"{name}: fetched {size_text(done)}, to have {size_text(total)} in all.\n")
    write("All hosts have the weights that they compute.\n")
    return 0


def checked(deployment: Deployment, *, stays: bool) -> Deployment:
    """A deployment that can start, of which users are told. Raises ConfigError, ModelError."""
    check_deployment(deployment, stays=stays)
    for line in filter(None, (chosen(deployment), summary(deployment))):
        show(line, stderr=True)
    return deployment


def with_weights(
    deployment: Deployment, moved: dict[str, tuple[int, int]] | None = None
) -> Deployment:
    """The deployment once its hosts have their weights, with a progress bar per host. `moved` gets,
    by host, how many of the bytes that it lacked have come, and how many it lacked."""
    found = {} if moved is None else moved
    with named_progress() as show_bytes:

        def on_progress(host: str, done: int, total: int) -> None:
            found[host] = done, total
            show_bytes(f"{host}: weights", done, total)

        return distribute_weights(deployment, on_progress)


def prune(arguments: argparse.Namespace, rest: list[str]) -> int:
    names = words(rest, arguments.known_options)
    found = list(entries())
    unknown = [name for name in names if name not in {each.model for each in found}]
    if unknown:
        raise ConfigError(f"The cache holds no model {unknown[0]!r}; see `pipespec cache list`.")

    def goes(entry: CacheEntry) -> bool:
        return entry.model in names if names else entry.whole_bytes == 0 or not entry.current

    gone = [each for each in found if arguments.all or goes(each)]
    for each in gone:
        remove(each)
    freed = sum(each.disk_bytes for each in gone)
    if arguments.json:
        removed = [str(each.folder) for each in gone]
        write(json.dumps({"removed": removed, "freed_bytes": freed}) + "\n")
    else:
        folders = "1 folder" if len(gone) == 1 else f"{len(gone)} folders"
        write(f"Removed {folders}, {size_text(freed)}.\n")
    return 0


def show_entries(arguments: argparse.Namespace, rest: list[str]) -> int:
    if rest or arguments.all:
        raise ConfigError("`pipespec cache list` takes no models; did you mean prune?")
    found = list(entries())
    if arguments.json:
        rows = [asdict(each) | {"folder": str(each.folder)} for each in found]
        write(json.dumps(rows) + "\n")
        return 0
    table = Table("model", "commit", "here", "of", "current")
    for each in found:
        sizes = map(size_text, (each.disk_bytes, each.whole_bytes))
        table.add_row(each.model, each.commit[:8], *sizes, "yes" if each.current else "no")
    total = sum(each.disk_bytes for each in found)
    show(*([table] if found else []), f"{size_text(total)} in all.")
    return 0
