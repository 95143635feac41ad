"""`pipespec cache`: what the parts cache of this host holds, and removing it."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from pipespec.console.arguments import finish
from pipespec.console.terminal import show, write
from pipespec.errors import ConfigError
from pipespec.system.sizes import size_text

if TYPE_CHECKING:
    from pipespec.console.arguments import Commands
    from pipespec.engine.checkpoint.parts.folder import CacheEntry

ACTIONS = ("list", "prune")


def add(commands: Commands) -> None:
    """Describe the command."""
    command = commands.add_parser(
        "cache",
        help="list or remove the weights that were fetched to this host",
        usage="pipespec cache list [--json] | pipespec cache prune [--all] [--json] [MODEL ...]",
        description="`list` shows the models of which this host has fetched parts, with their "
        "sizes. `prune` removes commits that a newer one has replaced, and what was not finished; "
        "with names of models all of these, and with --all everything. Clusters that run go on.",
    )
    command.add_argument("action", choices=ACTIONS, help="list or prune")
    command.add_argument("models", nargs="*", metavar="MODEL", help="hub ids or names, of prune")
    command.add_argument("--all", action="store_true", help="with prune: remove everything")
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """List or remove."""
    from pipespec.engine.checkpoint.parts.folder import entries, remove

    if rest:
        raise ConfigError(f"`pipespec cache` takes no settings, but got {rest[0]!r}.")
    found = list(entries())
    if arguments.action == "list":
        if arguments.models or arguments.all:
            raise ConfigError("`pipespec cache list` takes no models; did you mean prune?")
        return _show(found, as_json=arguments.json)
    unknown = [name for name in arguments.models if name not in {each.model for each in found}]
    if unknown:
        raise ConfigError(f"The cache holds no model {unknown[0]!r}; see `pipespec cache list`.")
    gone = [each for each in found if _goes(each, arguments.models, everything=arguments.all)]
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


def _goes(entry: CacheEntry, models: list[str], *, everything: bool) -> bool:
    if models or everything:
        return everything or entry.model in models
    return entry.whole_bytes == 0 or not entry.current


def _show(found: list[CacheEntry], *, as_json: bool) -> int:
    from rich.table import Table

    if as_json:
        rows = [
            {
                "model": each.model,
                "commit": each.commit,
                "disk_bytes": each.disk_bytes,
                "whole_bytes": each.whole_bytes,
                "current": each.current,
                "folder": str(each.folder),
            }
            for each in found
        ]
        write(json.dumps(rows) + "\n")
        return 0
    table = Table("model", "commit", "here", "of", "current")
    for each in found:
        sizes = map(size_text, (each.disk_bytes, each.whole_bytes))
        table.add_row(each.model, each.commit[:8], *sizes, "yes" if each.current else "no")
    total = sum(each.disk_bytes for each in found)
    show(*([table] if found else []), f"{size_text(total)} in all.")
    return 0
