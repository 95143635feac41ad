"""Faults while requests are decoded: is every answer still the undisturbed one, token for token?

    python -m benchmarks.faults.chaos --in-flight 16 --hosts 2 --stages 3 --tokens 32 \\
        --faults 300 --json benchmarks/results/chaos_delayed.json
    python -m benchmarks.faults.chaos --in-flight 1 --kinds kill,redis --faults 200

A server and its cluster decode so many requests at once, half of which are streams over HTTP. Of
each kind of fault equally many happen, at random moments. With `--hosts` the ranks run on hosts of
a test bed (network namespaces, an SSH server in each); there a link between two hosts is also cut
for a while, and all that runs on a host is killed.

Recovery is timed from the fault, for a cut link from its repair, until all ranks are there and
every request has made progress. The exit code is 1 if a text differs, a request or token is lost or
comes twice, the cluster does not recover, or any process, socket or file is left after its end.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.common import experiment
from benchmarks.common.experiment import ROOT
from benchmarks.faults.checked_load import (
    SHOWN,
    CheckedLoad,
    RecoveryResult,
    RequestCounts,
    inject_all,
)
from benchmarks.faults.fault_injector import BETWEEN_HOSTS, KINDS, Fault, FaultInjector, schedule
from benchmarks.faults.leftovers import (
    leftovers,
    namespaces,
    resource_counts,
    unused_shared_memory,
)
from pipespec.errors import PipespecError
from tools.rig import clock, testbed
from tools.rig.clock import SteppedClock
from tools.rig.http_server import HttpServer, ServerFailed
from tools.rig.relay import inside
from tools.rig.testbed import Testbed

CONTEXT = 256
CLOCK = "clock"


@dataclass
class ChaosRun:
    """A run, which may have ended early.

    Attributes:
        broken: why it ended early; empty: it did not.
        skipped: kinds of faults that cannot be caused here, with the reason.
        before, after: the cluster's resources before the first and after the last fault.
        leftovers: what existed after its end.
        rtt_ms: the bare round trip between two hosts; None: there is one machine.
    """

    faults: list[Fault]
    results: list[RecoveryResult] = field(default_factory=list)
    counts: RequestCounts = field(default_factory=RequestCounts)
    broken: str = ""
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


def hosts_file(bed: Testbed, stages: int, folder: Path, environment: Mapping[str, str]) -> Path:
    """A hosts file that spreads a head and `stages` stages evenly over the bed's hosts, whose
    processes have the variables of `environment` too."""
    each, more = divmod(stages + 1, len(bed.hosts))
    path = bed.hosts_file({host: each + (i < more) for i, host in enumerate(bed.hosts)})
    listed = yaml.safe_load(path.read_text())
    own = {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    listed["defaults"]["env"] |= {**own, **environment}
    path.write_text(yaml.safe_dump(listed, sort_keys=False))
    return path


def run(options: argparse.Namespace, folder: Path) -> ChaosRun:
    """Start a server and its cluster, whose temporary files are in `folder`, and cause faults."""
    kinds, skipped = kinds_here(options)
    began = time.monotonic()
    began_s = time.time()
    with ExitStack() as stack:
        bed = (
            stack.enter_context(Testbed(options.hosts, options.delay_ms)) if options.hosts else None
        )
        hosts = bed.hosts if bed else ()
        faults = schedule(
            options.seed, options.faults, kinds=kinds, num_ranks=options.stages + 1, hosts=hosts
        )
        outcome = ChaosRun(faults, skipped=skipped)
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
            f"scheduler.max_num_seqs={options.in_flight}",
        ]
        try:
            # One thread prepares requests, so that resources can be compared.
            flags = ("--limit", "preparation_threads=1")
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
    outcome: ChaosRun,
    options: argparse.Namespace,
    folder: Path,
    bed: Testbed | None,
) -> None:
    def on_start(load: CheckedLoad) -> None:
        outcome.counts = load.counts
        outcome.before = resource_counts(folder, bed)

    def on_result(fault: Fault, result: RecoveryResult) -> None:
        outcome.results.append(result)
        number = f"{len(outcome.results):4}/{len(outcome.faults)}"
        print(f"{number}  {describe(fault, result)}", file=sys.stderr, flush=True)

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


def describe(fault: Fault, result: RecoveryResult) -> str:
    """A line of the log about one fault and its result."""
    what = " ".join(filter(None, (fault.kind, fault.target)))
    if fault.cut_s:
        what += f" for {fault.cut_s:g} s"
    when = f"after {fault.at} events" if fault.at else "idle"
    came = f"recovered after {result.recovery_s:.2f} s" if result.hit else "there was no target"
    reason = f" ({result.reason})" if result.reason else ""
    return f"{what}, {when}: {came}; epochs begun: {result.epochs}{reason}"


def table(outcome: ChaosRun) -> list[dict[str, Any]]:
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


def publish(options: argparse.Namespace, outcome: ChaosRun) -> None:
    """Print and store the table."""
    where = f"{options.hosts} hosts" if options.hosts else "one machine"
    title = (
        f"{len(outcome.results)} faults with {options.in_flight} requests in flight: "
        f"{options.stages} stages, {where}, "
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
        skipped=outcome.skipped,
        bare_rtt_ms=outcome.rtt_ms,
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


def parse() -> argparse.Namespace:
    parser = experiment.parser(__doc__)
    parser.add_argument("--faults", type=int, default=40, help="(40)")
    parser.add_argument("--seed", type=int, default=1, help="of all random choices (1)")
    parser.add_argument("--stages", type=int, default=3, help="(3)")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer (32)")
    parser.add_argument("--hosts", type=int, default=0, help="of a test bed; needs root (none)")
    parser.add_argument(
        "--delay-ms", type=float, default=0.1, help="of a link between two hosts, one way (.1)"
    )
    parser.add_argument("--kinds", type=experiment.names, help=f"of {','.join(KINDS)} (all)")
    parser.add_argument("--patience", type=float, default=180.0, help="s for an answer (180)")
    parser.add_argument("--in-flight", type=int, default=16, help="requests at once (16)")
    parser.add_argument("--minutes", type=float, default=60.0, help="no fault begins later (60)")
    quick_kinds = ["kill", "redis", "client_kill", "script_flush"]
    options = experiment.parse(
        parser, faults=4, stages=1, tokens=16, in_flight=4, kinds=quick_kinds
    )
    for kind in options.kinds or ():
        if kind not in KINDS:
            parser.error(f"--kinds names {kind!r}, which is none of {', '.join(KINDS)}.")
        if kind in BETWEEN_HOSTS and not options.hosts:
            parser.error(f"--kinds names {kind!r}, which needs several hosts; add --hosts 3.")
    if min(options.faults, options.in_flight, options.stages) < 1 or options.tokens < 4:
        parser.error("--faults, --in-flight and --stages must be 1 or more, --tokens 4 or more.")
    if options.hosts:
        if not 2 <= options.hosts <= options.stages + 1:
            parser.error(
                f"--hosts is {options.hosts}, but must be from 2 to {options.stages + 1}, the "
                "number of ranks."
            )
        if (reason := testbed.missing()) is not None:
            parser.error(f"--hosts {options.hosts} is not possible here: {reason}.")
    return options


def main() -> None:
    options = parse()
    # A fault, which `nohup` would have all processes ignore.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Short, for the names of sockets.
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
    try:
        outcome = run(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    publish(options, outcome)
    if outcome.wrong:
        sys.exit(outcome.wrong)
    print("Every answer is the undisturbed one, token for token.")


if __name__ == "__main__":
    main()
