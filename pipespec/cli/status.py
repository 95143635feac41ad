"""`pipespec status`: the state of the clusters that `pipespec up` started."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from rich.table import Table

from pipespec.client.registry import Entry, JoinedCluster, entries, entry, joined, log_of
from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.console.arguments import AddParser, add_name, finish, refuse_settings
from pipespec.console.terminal import show, table_of, write
from pipespec.controller.cluster_status import ClusterStatus, labelled, read_status
from pipespec.controller.membership import Membership
from pipespec.errors import Unreachable
from pipespec.transport.transport_settings import AUTO

LOADING, WAITING, READY, RECOVERING = "loading", "waiting", "ready", "recovering"
SILENT = "no answer"
COLUMNS = ("state", "host", "ranks", "epoch", "faults", "open", "queued", "finished")
SEAL = "transport.seal="
WATCH_S = 1.0


def add(add_parser: AddParser) -> None:
    command = add_parser(
        description="Show for every cluster, or for one, its ranks, its epoch, the faults "
        "that it has survived, and its open, queued and finished requests; of one cluster, also "
        "what each process of each host does.",
    )
    add_name(command, "which (all)")
    command.add_argument("--watch", action="store_true", help="show it every second, until Ctrl-C")
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Print the state of clusters; returns 0 if all of them answer."""
    refuse_settings(arguments, rest)
    while True:
        found = entries() if arguments.name is None else [entry(arguments.name)]
        clusters = [report(each, time.time()) for each in found]
        elsewhere = joined() if arguments.name is None else []
        if arguments.json:
            others = [asdict(each) for each in elsewhere]
            write(json.dumps({"clusters": clusters, "joined": others}) + "\n")
        else:
            if arguments.watch and sys.stdout.isatty():
                write("\x1b[H\x1b[2J")  # clear the terminal
            print_table(clusters, elsewhere)
        if not arguments.watch:
            break
        time.sleep(WATCH_S)
    return 1 if any(cluster["state"] == SILENT for cluster in clusters) else 0


def report(found: Entry, now: float) -> dict[str, Any]:
    """The state of one cluster at a time, in seconds since 1970; None: unknown."""
    cluster = found.cluster
    state: dict[str, Any] = {"name": found.name, "pid": found.owner.pid, "state": LOADING}
    if (log := log_of(found.name)) is not None:
        state["log"] = str(log)
    if cluster is None:
        waits_for = found.owner.waits_for
        return state | ({"state": WAITING, "waits_for": waits_for} if waits_for else {})
    state |= {
        "state": SILENT,
        "host": cluster.host,
        "num_ranks": cluster.num_ranks,
        "context": cluster.served.context,
        "target": cluster.served.target,
        "settings": list(cluster.overrides),
        "up_s": now - cluster.started,
    }

    assigned, alive = None, {}
    try:
        status = read_status(cluster.url, cluster.namespace)
        if status is not None and status.assignment:
            assigned = RankAssignment.decode(status.assignment)
            with Membership(cluster.url, cluster.namespace) as shared:
                alive = shared.alive((*assigned.everyone, *assigned.others))
    except Unreachable as error:
        return state | {"problem": str(error)}
    if status is None:
        return state | {"problem": "Its Redis no longer has its data."}
    # Hosts may have joined or left since the entry was written, or been lost.
    num_ranks = cluster.num_ranks if assigned is None else len(assigned.workers)
    seals = [text.partition("=")[2] for text in cluster.overrides if text.startswith(SEAL)]
    return state | {
        "state": READY if status.joined >= num_ranks else RECOVERING,
        "num_ranks": num_ranks,
        "ranks": status.joined,
        "processes": []
        if assigned is None
        else processes(status, assigned, alive, [AUTO, *seals][-1]),
        "epoch": status.epoch,
        "faults": sum(status.faults.values()),
        "last_fault": status.last_fault,
        "faults_by_kind": status.faults,
        "open": status.open,
        "queued": status.queued,
        "finished": status.finished,
        "statistics": status.statistics,
        "stage_busy": status.busy,
        "computing": status.computing,
    }


def processes(
    status: ClusterStatus,
    assigned: RankAssignment,
    alive: Collection[str],
    seal: str,
) -> list[dict[str, Any]]:
    """Every worker, its rank if it has one, and what it does; of several that compute a rank
    together, the one that leads comes first. `alive` have a lease, `seal` is `transport.seal`."""
    kinds = assigned.links(seal)
    links = [None, *("local" if k.local else "sealed" if k.sealed else "plain" for k in kinds)]
    active, busy, receive = (
        labelled(status.counts, f"{name}_ns") for name in ("active", "busy", "receive")
    )

    def process(worker: str, rank: int | None, pid: int | None, state: str) -> dict[str, Any]:
        host = worker.rpartition("/")[0]
        return {"worker": worker, "host": host, "rank": rank, "pid": pid, "state": state}

    found = []
    for rank, leader in enumerate(assigned.workers):
        time_ns, stage = active.get(str(rank)), assigned.layers[rank - 1] if rank else None
        of_rank = {
            "layers": stage and [stage.start, stage.stop - 1],
            "link": links[rank],
            "busy": time_ns and busy.get(str(rank), 0) / time_ns,
            "waits": time_ns and receive.get(str(rank), 0) / time_ns,
            "attention": status.computing.get(rank, {}).get("attention"),
            "version": status.computing.get(rank, {}).get("version"),
        }
        for worker in assigned.members(rank):
            pid = status.pids.get(rank) if worker == leader else status.followers.get(worker)
            if pid is None:
                state = "starts" if worker in alive else "lost"
            else:
                works = "computes" if status.open else "idle"
                state = works if worker in alive else "silent"
            found.append(process(worker, rank, pid, state) | of_rank)
    others = ((each, "spare" if each in alive else "gone") for each in assigned.others)
    return found + [process(worker, None, None, state) for worker, state in others]


def print_table(clusters: Sequence[dict[str, Any]], elsewhere: Sequence[JoinedCluster]) -> None:
    if not clusters:
        show(*(map(str, elsewhere) if elsewhere else ["No cluster is up."]))
        return
    table = table_of("", "cluster", *COLUMNS, "up", left=3)
    notes = list(map(str, elsewhere))
    for cluster in clusters:
        known = {name: str(cluster.get(name, "-")) for name in COLUMNS}
        if "ranks" in cluster:
            known["ranks"] = f"{cluster['ranks']}/{cluster['num_ranks']}"
        since = str(timedelta(seconds=int(cluster["up_s"]))) if "up_s" in cluster else "-"
        table.add_row(cluster["name"], *known.values(), since)
        problem, waits_for = cluster.get("problem"), cluster.get("waits_for")
        waiting = waits_for and f"waiting for {waits_for}"
        fault = (fault := cluster.get("last_fault")) and f"last fault {fault}"
        kinds = faults(cluster.get("faults_by_kind", {}))
        done = work(cluster.get("statistics", {}), cluster.get("stage_busy", {}))
        log = f"log: {cluster['log']}" if "log" in cluster else None
        found = (problem, waiting, fault, kinds, done, versions(cluster.get("processes", ())), log)
        notes += [f"{cluster['name']}: {note}" for note in found if note is not None]
    of_one = clusters[0].get("processes") if len(clusters) == 1 else None
    show(table, *([process_table(of_one)] if of_one else []), *notes)


def process_table(processes: Sequence[Mapping[str, Any]]) -> Table:
    names = ("host", "rank", "state", "layers", "attention", "link", "busy", "waits", "pid")
    table = table_of("", *(f"{name} " for name in names), left=6)
    for each in processes:
        table.add_row(*(f"{_cell(each.get(name))} " for name in names))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(dict.fromkeys(map(str, value)))  # of one layer its number alone
    return "-" if value is None else f"{value:.0%}" if isinstance(value, float) else str(value)


def versions(processes: Sequence[Mapping[str, Any]]) -> str | None:
    """The versions of pipespec on the hosts in one line; None: not known."""
    found = {(each["version"], each["host"]): None for each in processes if each.get("version")}
    hosts = {one: [host for version, host in found if version == one] for one, _ in found}
    listed = "; ".join(f"{version} on {', '.join(names)}" for version, names in hosts.items())
    return f"version: {listed}" if listed else None


def faults(kinds: Mapping[str, int]) -> str | None:
    """The faults since the log of a cluster began, in one line; None: there were none."""
    counts = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in kinds.items())
    return f"faults: {counts}." if counts else None


def work(statistics: Mapping[str, int], busy: Mapping[str, float]) -> str | None:
    """The statistics of an epoch in one line; None: no step yet. `busy` has, by stage, the share of
    the time with a request in which it computed."""
    if not statistics.get("steps"):
        return None

    def per_step(name: str) -> str:
        return f"{statistics[name] / statistics['steps']:.2f}"

    shares = ", ".join(f"{share:.0%}" for share in busy.values())
    return (
        f"{per_step('tokens')} tokens per step; rows per step: {per_step('root_rows')} decided, "
        f"{per_step('prompt_rows')} of prompts, {per_step('draft_rows')} draft tokens "
        f"({per_step('draft_hits')} accepted, {per_step('draft_hits_expected')} expected); "
        f"{per_step('rounds')} draft rounds per step; stages busy {shares or '-'}; "
        f"KV {statistics['kv_slots_held']} of {statistics['kv_slots']} slots, "
        f"{statistics['kv_slots_retained']} more with text to share; "
        f"{statistics['cache_hits']} of {statistics['cache_queries']} tokens found in KV; "
        f"{statistics['preemptions']} preemptions."
    )
