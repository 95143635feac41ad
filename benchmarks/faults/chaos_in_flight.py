"""`benchmarks.faults.chaos --in-flight N`: start a cluster, cause faults, store the counts."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import experiment
from benchmarks.faults.checked_load import (
    SHOWN,
    CheckedLoad,
    RecoveryResult,
    RequestCounts,
    inject_all,
)
from benchmarks.faults.cluster_process import hosts_file, leftovers, resource_counts
from benchmarks.faults.fault_injector import (
    BETWEEN_HOSTS,
    KINDS,
    FaultInjector,
    namespaces,
    schedule,
)
from benchmarks.faults.single_faults import Fault
from pipespec.config.compose import compose
from pipespec.errors import PipespecError
from tools.rig import clock
from tools.rig.clock import SteppedClock
from tools.rig.http_server import HttpServer, ServerFailed
from tools.rig.relay import inside
from tools.rig.testbed import Testbed

CONTEXT = 256
SHARED_MEMORY = Path("/dev/shm")
CLOCK = "clock"


@dataclass
class InFlightRun:
    """A run, which may have ended early.

    Attributes:
        broken: why it ended early; empty: it did not.
        seal: the setting `transport.seal`; None: this version has no such setting.
        skipped: kinds of faults that cannot be caused here, with the reason.
        before, after: the cluster's resources before the first and after the last fault.
        leftovers: what existed after its end.
    """

    faults: list[Fault]
    results: list[RecoveryResult] = field(default_factory=list)
    counts: RequestCounts = field(default_factory=RequestCounts)
    broken: str = ""
    seal: str | None = None
    skipped: dict[str, str] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    leftovers: dict[str, list[str]] = field(default_factory=dict)
    took_s: float = 0.0
    rtt_ms: float | None = None

    @property
    def wrong(self) -> str:
        """The errors, in sentences; empty: there are none."""
        found = [self.broken] if self.broken else []
        counts = self.counts
        totals = {
            "Texts that differ": counts.differ,
            "Requests lost": len(counts.failures),
            "Tokens lost": counts.lost_tokens,
            "Tokens received twice": counts.doubled_tokens,
        }
        found += [f"{what}: {count}." for what, count in totals.items() if count]
        if counts.failures:
            found.append(f"The first lost request: {counts.failures[0]}.")
        for kind, names in self.leftovers.items():
            if names:
                found.append(f"Left behind: {len(names)} {kind}, such as {names[0]!r}.")
        return " ".join(found)


def kinds_here(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The kinds of faults of a run, and those that cannot be caused here, with the reason."""
    skipped: dict[str, str] = {}
    if (lacking := clock.missing()) is not None:
        skipped[CLOCK] = lacking
    if not options.hosts:
        skipped |= dict.fromkeys(BETWEEN_HOSTS, "it needs several hosts (--hosts 2)")
    wanted = options.kinds or KINDS
    return [kind for kind in wanted if kind not in skipped], {
        kind: why for kind, why in skipped.items() if kind in wanted
    }


def run(options: argparse.Namespace, folder: Path) -> InFlightRun:
    """Start a server and its cluster, whose temporary files are in `folder`, and cause faults."""
    kinds, skipped = kinds_here(options)
    began = time.monotonic()
    began_s = time.time()
    with ExitStack() as stack:
        bed = None
        if options.hosts:
            bed = stack.enter_context(Testbed(options.hosts))
        hosts = bed.hosts if bed else ()
        faults = schedule(
            options.seed, options.faults, kinds=kinds, num_ranks=options.stages + 1, hosts=hosts
        )
        outcome = InFlightRun(faults, skipped=skipped)
        stepped = SteppedClock(folder) if CLOCK in kinds else None
        environment = stepped.environment if stepped else {}
        where = [f"cluster.stages={options.stages}", "cluster.devices=[cpu]"]
        if bed:
            outcome.rtt_ms = bed.measured_rtt_ms(bed.hosts[0], bed.hosts[1])
            where = [f"cluster={hosts_file(bed, options.stages, folder, environment)}"]
        settings = [
            *where,
            "model.dtype=float32",
            f"model.context={CONTEXT}",
            f"cluster.sync={options.sync}",
            f"scheduler.max_num_seqs={options.in_flight}",
        ]
        outcome.seal = compose(settings).transport.seal
        try:
            # One thread prepares requests, so that resources can be compared.
            flags = ("--preparation-threads", "1")
            with HttpServer(folder, *flags, *settings, bed=bed, environment=environment) as server:
                injector = FaultInjector(bed, stepped, options.patience)
                work = partial(
                    asyncio.run, inject_faults(server, injector, outcome, options, folder, bed)
                )
                # Redis is reached at an address of the first host.
                inside(bed.namespaces[hosts[0]], work) if bed else work()
        except (ServerFailed, PipespecError, OSError) as error:
            outcome.broken = str(error)
        if stepped:
            stepped.remove()
        outcome.leftovers = leftovers(folder, bed)
    # Those of this run alone: other programs may have some of their own.
    made = {*bed.namespaces.values()} if bed else set()
    outcome.leftovers["network namespaces"] = sorted(made & namespaces())
    outcome.leftovers["shared memory"] = unused_shared_memory(began_s)
    outcome.took_s = time.monotonic() - began
    return outcome


async def inject_faults(
    server: HttpServer,
    injector: FaultInjector,
    outcome: InFlightRun,
    options: argparse.Namespace,
    folder: Path,
    bed: Testbed | None,
) -> None:
    def on_start(load: CheckedLoad) -> None:
        outcome.counts = load.counts
        outcome.before = resource_counts(folder, bed)

    def on_result(fault: Fault, result: RecoveryResult) -> None:
        outcome.results.append(result)
        print(
            describe(len(outcome.results), len(outcome.faults), fault, result),
            file=sys.stderr,
            flush=True,
        )

    await inject_all(
        server.address,
        injector,
        outcome.faults,
        on_start,
        in_flight=options.in_flight,
        tokens=options.tokens,
        patience_s=options.patience,
        deadline=time.monotonic() + options.minutes * 60,
        on_result=on_result,
    )
    outcome.after = resource_counts(folder, bed)


def unused_shared_memory(since_s: float) -> list[str]:
    """Segments created since `since_s` (seconds since 1970) that no process has mapped."""
    made = []
    for path in SHARED_MEMORY.glob("*"):
        with suppress(FileNotFoundError):
            made += [path] if path.stat().st_mtime >= since_s else []
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps") if made else ():
        with suppress(OSError):  # it ended
            mapped += maps.read_text()
    return sorted(path.name for path in made if path.exists() and str(path) not in mapped)


def describe(number: int, of: int, fault: Fault, result: RecoveryResult) -> str:
    """A line of the log about one fault and its result."""
    what = " ".join(filter(None, (fault.kind, fault.target)))
    if fault.cut_s:
        what += f" for {fault.cut_s:g} s"
    when = f"after {fault.at} events" if fault.at else "idle"
    came = f"recovered after {result.recovery_s:.2f} s" if result.hit else "there was no target"
    reason = f" ({result.reason})" if result.reason else ""
    return f"{number:4}/{of}  {what}, {when}: {came}; epochs begun: {result.epochs}{reason}"


def table(outcome: InFlightRun) -> list[dict[str, Any]]:
    """A row for each kind, and one for all."""
    done = list(zip(outcome.faults, outcome.results, strict=False))
    rows = []
    for kind in [*(kind for kind in KINDS if any(f.kind == kind for f, _ in done)), "all"]:
        mine = [(f, s) for f, s in done if kind in (f.kind, "all")]
        times = [result.recovery_s for _, result in mine if result.hit]
        row: dict[str, Any] = {"fault": kind, "times": len(mine)}
        row |= {"idle": sum(not fault.at for fault, _ in mine)}
        row |= {"no_target": sum(not result.hit for _, result in mine)}
        row |= {"epochs_begun": sum(result.epochs for _, result in mine)}
        for name, percent in (("median_s", 50), ("p90_s", 90), ("worst_s", 100)):
            row[name] = float(np.percentile(times, percent)) if times else None
        rows.append(row)
    return rows


def publish(options: argparse.Namespace, outcome: InFlightRun) -> None:
    """Print and store the table."""
    where = f"{options.hosts} hosts" if options.hosts else "one machine"
    title = (
        f"{len(outcome.results)} faults with {options.in_flight} requests in flight: "
        f"{options.stages} stages, {options.sync}, {where}, "
        f"{options.tokens} tokens, seed {options.seed}"
    )
    counts = outcome.counts
    totals = {
        "requests_finished": sum(counts.finished.values()),
        "texts_differ": counts.differ,
        "requests_lost": len(counts.failures),
        "tokens_lost": counts.lost_tokens,
        "tokens_doubled": counts.doubled_tokens,
        "refused_and_repeated": counts.refused,
        **{
            f"{kind.replace(' ', '_')}_left": len(names)
            for kind, names in outcome.leftovers.items()
        },
    }
    experiment.publish(
        options,
        title,
        table(outcome),
        **totals,
        finished_by_kind=counts.finished,
        failures=counts.failures[:SHOWN],
        left_behind={kind: names[:SHOWN] for kind, names in outcome.leftovers.items()},
        broken=outcome.broken,
        seconds=outcome.took_s,
        seal=outcome.seal,
        skipped=outcome.skipped,
        bare_rtt_ms=outcome.rtt_ms,
        cores=os.cpu_count(),
        held_before=outcome.before,
        held_after=outcome.after,
        faults=[
            asdict(fault) | asdict(result)
            for fault, result in zip(outcome.faults, outcome.results, strict=False)
        ],
    )
    for kind, why in outcome.skipped.items():
        print(f"Skipped: {kind}, as {why}.")
    print("  ".join(f"{name.replace('_', ' ')}: {count}" for name, count in totals.items()))
    print(f"Resources of the cluster before and after: {outcome.before}, {outcome.after}.")
