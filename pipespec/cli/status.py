"""`pipespec status`: how the clusters that `pipespec up` started are doing."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from pipespec.cli.arguments import finish, overrides
from pipespec.cli.terminal import live, on_terminal, show, write
from pipespec.client.registry import Damaged, Entry, entries, entry
from pipespec.errors import ConfigError, Unreachable

if TYPE_CHECKING:
    from rich.table import Table

    from pipespec.cli.arguments import Commands

LOADING, READY, RECOVERING = "loading", "ready", "recovering"
SILENT, DAMAGED, AWAY = "no answer", "unreadable", "away"
COLUMNS = ("state", "host", "ranks", "epoch", "faults", "open", "queued", "finished")
USUAL = "sdpa"  # how a CPU attends
MINUTE, HOUR, DAY = 60, 3600, 86400
NOBODY = "No cluster is up."
RENEWED_S = 1.0  # how often --watch looks


def add(commands: Commands) -> None:
    """Describe the command."""
    command = commands.add_parser(
        "status",
        help="how the clusters that `pipespec up` started are doing",
        description="Say of every cluster, or of one, how many ranks take part, which epoch it "
        "is, how many faults it has survived, and how many requests are open, queued and finished.",
    )
    command.add_argument("name", nargs="?", metavar="NAME", help="which (all)")
    command.add_argument(
        "--watch", action="store_true", help="look again every second, until Ctrl-C"
    )
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Say how clusters are doing; 0 if all of them answer."""
    if overrides(rest, arguments.known_options):
        raise ConfigError(f"`pipespec status` takes one name and no settings, but got {rest[0]!r}.")
    if arguments.watch and arguments.json:
        raise ConfigError("--watch renews a table and --json prints one object; leave one out.")
    if arguments.watch and not on_terminal():
        raise ConfigError("--watch needs a terminal to renew its table on; leave it out.")
    clusters = reports(arguments.name)
    if arguments.watch:
        watch(arguments.name)
    if arguments.json:
        write(json.dumps({"clusters": clusters}) + "\n")
    else:
        print_table(clusters)
    return 1 if any(cluster["state"] in (SILENT, DAMAGED) for cluster in clusters) else 0


def reports(name: str | None) -> list[dict[str, Any]]:
    """What is known of the cluster of that name, or of all. Raises ConfigError."""
    found = entries() if name is None else [entry(name)]
    return [report(each, time.time()) for each in found]


def watch(name: str | None) -> NoReturn:
    """Show how clusters are doing until somebody ends it.

    A cluster that is up no more is waited for.
    """
    with live() as renew:
        while True:
            try:
                clusters = reports(name)
            except ConfigError as error:
                clusters = [{"name": name, "state": AWAY, "problem": str(error)}]
            renew(*parts(clusters))
            time.sleep(RENEWED_S)


def report(found: Entry | Damaged, now: float) -> dict[str, Any]:
    """What is known of one cluster at a time, in seconds since 1970; None is unknown."""
    if isinstance(found, Damaged):
        return {"name": found.name, "state": DAMAGED, "problem": found.problem}
    cluster = found.cluster
    told: dict[str, Any] = {"name": found.name, "pid": found.owner.pid, "state": LOADING}
    if cluster is None:
        return told
    told |= {
        "state": SILENT,
        "host": cluster.host,
        "num_ranks": cluster.num_ranks,
        "context": cluster.served.context,
        "target": cluster.served.target,
        "settings": list(cluster.overrides),
        "up_s": now - cluster.started,
    }

    from pipespec.controller.overview import look

    try:
        seen = look(cluster.url, cluster.namespace)
    except Unreachable as error:
        return told | {"problem": str(error)}
    if seen is None:
        return told | {"problem": "Its Redis knows nothing of it any more."}
    return told | {
        "state": READY if seen.joined >= cluster.num_ranks else RECOVERING,
        "ranks": seen.joined,
        "epoch": seen.epoch,
        "faults": seen.epoch - cluster.epoch,
        "last_fault": seen.last_fault,
        "faults_by_kind": seen.faults,
        "open": seen.open,
        "queued": seen.queued,
        "finished": seen.finished,
        "statistics": seen.statistics,
        "stage_busy": seen.busy,
        "computing": seen.computing,
    }


def print_table(clusters: Sequence[dict[str, Any]]) -> None:
    """One row per cluster, and what went wrong below."""
    show(*parts(clusters))


def parts(clusters: Sequence[dict[str, Any]]) -> list[str | Table]:
    """One row per cluster, and what went wrong below; or that there is none."""
    if not clusters:
        return [NOBODY]

    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=0)
    table.add_column("cluster")
    for column in (*COLUMNS, "up"):
        table.add_column(column, justify="left" if column in ("state", "host") else "right")
    notes = []
    for cluster in clusters:
        known = {name: str(cluster.get(name, "-")) for name in COLUMNS}
        if "ranks" in cluster:
            known["ranks"] = f"{cluster['ranks']}/{cluster['num_ranks']}"
        since = duration(cluster["up_s"]) if "up_s" in cluster else "-"
        table.add_row(cluster["name"], *known.values(), since)
        problem, fault = cluster.get("problem"), cluster.get("last_fault")
        kinds = faults(cluster.get("faults_by_kind", {}))
        done = work(cluster.get("statistics", {}), cluster.get("stage_busy", {}))
        told = (problem, fault, kinds, done, computing(cluster.get("computing", {})))
        notes += [f"{cluster['name']}: {note}" for note in told if note is not None]
    return [table, *notes]


def faults(kinds: Mapping[str, int]) -> str | None:
    """What has ended epochs since the log of a cluster began, in one line; None: nothing has."""
    told = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in kinds.items())
    return f"faults: {told}." if told else None


def work(statistics: Mapping[str, int], busy: Mapping[str, float]) -> str | None:
    """What a cluster has done since its epoch began, in one line; None: nothing yet. `busy` are
    shares of the time with a request, by stage."""
    if not statistics.get("steps"):
        return None

    def per_step(name: str) -> str:
        return f"{statistics[name] / statistics['steps']:.2f}"

    scored = ""
    if statistics.get("mid_passes"):
        scored = f"{per_step('scored')} nodes scored by the mid-size model per step; "
    shares = ", ".join(f"{share:.0%}" for share in busy.values())
    return (
        f"{per_step('tokens')} tokens per step; rows per step: {per_step('root_rows')} roots, "
        f"{per_step('prompt_rows')} of prompts, {per_step('guess_rows')} guesses, of "
        f"which {per_step('guess_hits')} came true ({per_step('guess_hits_expected')} expected); "
        f"{per_step('rounds')} draft rounds per step; {scored}stages busy {shares or '-'}; "
        f"KV {statistics['kv_slots_held']} of {statistics['kv_slots']} slots, "
        f"{statistics['kv_slots_retained']} more with text to share; "
        f"{statistics['cache_hits']} of {statistics['cache_queries']} tokens found in KV; "
        f"{statistics['preemptions']} preemptions."
    )


def computing(ranks: Mapping[int, Mapping[str, Any]]) -> str | None:
    """How ranks compute, in one line, those that do alike together; None: all as usual."""
    alike: dict[str, list[int]] = {}
    for rank, how in ranks.items():
        sizes = " and ".join(map(str, how["graph_rows"]))
        graphs = f", graphs of {sizes} rows" if sizes else ""
        together = f", {how['devices']} devices together" if how["devices"] > 1 else ""
        words = f"{how['attention']}{graphs}{', compiled' * how['compiled']}{together}"
        alike.setdefault(words, []).append(rank)
    told = "; ".join(f"{words} ({_ranks(those)})" for words, those in alike.items())
    refused = [f"rank {rank}: {why}" for rank, how in ranks.items() for why in how["refused"]]
    usual = set(alike) <= {USUAL} and not refused
    return None if usual else " ".join([f"attention: {told}.", *refused])


def _ranks(numbers: Sequence[int]) -> str:
    """As in "ranks 0, 3"."""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def duration(seconds: float) -> str:
    """The two largest units of a time that are not zero in front, as in 2 h 5 min."""
    whole = int(max(seconds, 0))
    if whole < MINUTE:
        return f"{whole} s"
    if whole < HOUR:
        return f"{whole // MINUTE} min {whole % MINUTE} s"
    if whole < DAY:
        return f"{whole // HOUR} h {whole % HOUR // MINUTE} min"
    return f"{whole // DAY} d {whole % DAY // HOUR} h"
