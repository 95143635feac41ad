"""Faults during answers: is every answer still the undisturbed one, token for token?

    python -m benchmarks.faults.chaos --faults 60 --json benchmarks/results/chaos.json \\
        --plot benchmarks/results/chaos
    python -m benchmarks.faults.chaos --hosts 3 --faults 30 \\
        --json benchmarks/results/chaos_boxes.json --plot benchmarks/results/chaos_boxes
    python -m benchmarks.faults.chaos --in-flight 16 --hosts 2 --stages 3 --tokens 32 \\
        --faults 300 --json benchmarks/results/chaos_in_flight.json

A cluster decodes one prompt after another, greedy and sampled in turn. At a random token a fault
happens: a rank is killed (SIGKILL) or hangs (SIGSTOP), or Redis is killed. With `--hosts` the ranks
run on hosts of a test bed (network namespaces, a real sshd in each); there a link between two hosts
is also cut for a while, and a whole host's agent is killed.

Recovery is timed from the fault to the first token of a later epoch; for a cut link from its repair
to the next token. The exit code is 1 if a token of any answer differs, is lost or comes twice, if
the cluster does not recover, or if any process, socket or file is left after its end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import experiment, plot, run_options
from benchmarks.faults import chaos_in_flight, fault_injector
from benchmarks.faults.cluster_process import (
    ClusterFailed,
    ClusterProcess,
    agent_pid,
    hosts_file,
    send_signal,
)
from benchmarks.faults.single_faults import (
    HOST_KINDS,
    KINDS,
    LOCAL_KINDS,
    Fault,
    FaultResult,
    PromptCase,
    compare,
    describe,
    prompt_cases,
    recovery_s,
    schedule,
    short,
    table,
)
from pipespec.instruments.bench.dataset import load
from tools.rig import testbed
from tools.rig.testbed import Testbed

CONTEXT = 512
# Of a link between two hosts.
DELAY_MS, GBIT = 0.1, 10.0
# So many names of leftovers are stored.
SHOWN = 20
NOTE = (
    "From the fault to the first token of a later epoch; for a cut, from its repair to the next "
    "token. All ranks share the machine's {cores} cores."
)


class FaultRun:
    """Causes faults in a cluster while it answers."""

    def __init__(self, cluster: ClusterProcess, bed: Testbed | None, cases: Sequence[PromptCase]):
        self._cluster, self._bed, self._cases = cluster, bed, cases
        self._epoch = cluster.settle(0)
        self._expected = [self._answer(question)["tokens"] for question in cases]

    def _answer(self, question: PromptCase) -> dict[str, Any]:
        self._cluster.send({"prompt": question.prompt, "settings": question.settings})
        return self._cluster.expect("tokens")

    def inject(self, fault: Fault) -> FaultResult:
        """Decode a prompt, cause the fault, and read the answer to its end.

        Raises ClusterFailed.
        """
        question, cluster = self._cases[fault.question], self._cluster
        cluster.send({"prompt": question.prompt, "settings": question.settings, "at": fault.at})
        state = cluster.expect("at")
        since_s = time.monotonic()
        hit = self._cause(fault, state)
        cluster.send({})
        if fault.kind == "cut":
            time.sleep(fault.cut_s)
            self._link(fault, mend=True)
            since_s = time.monotonic()
        answer = cluster.expect("tokens")
        took_s = recovery_s(fault, answer, since_s, state["epoch"]) if hit else None
        before = self._epoch
        # A fault that did not delay the answer ends the epoch too; a cut link may not.
        self._epoch = cluster.settle(state["epoch"] + (hit and fault.kind != "cut"))
        differ, lost, doubled = compare(answer, self._expected[fault.question])
        return FaultResult(
            outcome="missed" if not hit else "ended_first" if took_s is None else "recovered",
            recovery_s=took_s,
            epochs=self._epoch - before,
            reason=short(answer["faults"][-1]) if answer["events"][-1][3] > before else "",
            mismatches=differ,
            lost=lost,
            doubled=doubled,
        )

    def _cause(self, fault: Fault, state: dict[str, Any]) -> bool:
        """Cause the fault; False if its target does not exist."""
        if fault.kind == "cut":
            self._link(fault, mend=False)
            return True
        if fault.kind == "redis":
            return send_signal(state["redis"], signal.SIGKILL)
        if fault.kind == "agent":
            assert self._bed is not None
            return send_signal(agent_pid(self._bed, fault.target), signal.SIGKILL)
        rank = int(fault.target)
        # There are fewer ranks once a worker is lost for good.
        pid = state["pids"].get(state["ranks"][rank]) if rank < len(state["ranks"]) else None
        return send_signal(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    def _link(self, fault: Fault, *, mend: bool) -> None:
        assert self._bed is not None
        (self._bed.mend if mend else self._bed.cut)(*fault.target.split("-"))


@dataclass
class ChaosRun:
    """A run, which may have ended early.

    Attributes:
        broken: why it ended early; empty: it did not.
        before, after: the cluster's resources before the first and after the last fault.
        leftovers: what existed after its end.
        rtt_ms: the bare round trip between two hosts; None: there is one machine.
    """

    faults: list[Fault]
    cases: list[PromptCase]
    results: list[FaultResult] = field(default_factory=list)
    broken: str = ""
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    leftovers: dict[str, list[str]] = field(default_factory=dict)
    took_s: float = 0.0
    rtt_ms: float | None = None

    @property
    def wrong(self) -> str:
        """The errors, in sentences; empty: there are none."""
        found = [self.broken] if self.broken else []
        counts = {
            "that differ": sum(result.mismatches for result in self.results),
            "lost": sum(result.lost for result in self.results),
            "doubled": sum(result.doubled for result in self.results),
        }
        found += [f"Tokens {what}: {count}." for what, count in counts.items() if count]
        for kind, names in self.leftovers.items():
            if names:
                found.append(f"Left behind: {len(names)} {kind}, such as {names[0]!r}.")
        return " ".join(found)


def run(options: argparse.Namespace, folder: Path) -> ChaosRun:
    """Start a cluster whose temporary files are in `folder`, and cause faults."""
    with ExitStack() as stack:
        bed = None
        if options.hosts:
            bed = stack.enter_context(Testbed(options.hosts, delay_ms=DELAY_MS, gbit=GBIT))
        cases = prompt_cases(load(run_options.DATA, options.num_prompts), options.tokens)
        faults = schedule(
            options.seed,
            options.faults,
            kinds=options.kinds,
            ranks=options.stages + 1,
            hosts=bed.hosts if bed else (),
            tokens=options.tokens,
            num_cases=len(cases),
        )
        outcome = ChaosRun(faults, cases)
        where = [f"cluster.stages={options.stages}", "cluster.devices=[cpu]"]
        if bed:
            outcome.rtt_ms = bed.measured_rtt_ms(bed.hosts[0], bed.hosts[1])
            where = [f"cluster={hosts_file(bed, options.stages, folder)}"]
        settings = [*where, f"cluster.sync={options.sync}", f"model.context={CONTEXT}"]
        began = time.monotonic()
        cluster = ClusterProcess(settings, folder, bed, options.patience)
        try:
            with cluster:
                inject_all(cluster, bed, outcome)
        except ClusterFailed as error:
            outcome.broken = str(error)
            print(*cluster.log, sep="\n", file=sys.stderr)
        outcome.took_s = time.monotonic() - began
        outcome.leftovers = cluster.leftovers()
        return outcome


def inject_all(cluster: ClusterProcess, bed: Testbed | None, outcome: ChaosRun) -> None:
    fault_run = FaultRun(cluster, bed, outcome.cases)
    outcome.before = cluster.resource_counts()
    for number, fault in enumerate(outcome.faults, 1):
        result = fault_run.inject(fault)
        outcome.results.append(result)
        text = describe(number, len(outcome.faults), fault, outcome.cases[fault.question], result)
        print(text, file=sys.stderr, flush=True)
    outcome.after = cluster.resource_counts()


def publish(options: argparse.Namespace, outcome: ChaosRun) -> None:
    """Print, store and draw the table."""
    rows = table(outcome.faults, outcome.results)
    place = "one machine"
    if outcome.rtt_ms is not None:
        place = f"{options.hosts} hosts, {GBIT:g} Gbit/s, bare round trip {outcome.rtt_ms:.2f} ms"
    note = NOTE.format(cores=os.cpu_count())
    title = (
        f"{len(outcome.results)} faults: {options.stages} stages, {options.sync}, {place}, "
        f"{options.tokens} tokens, seed {options.seed}"
    )
    counts = {
        "requests_finished": len(outcome.cases) + len(outcome.results),
        "mismatches": sum(result.mismatches for result in outcome.results),
        "lost_tokens": sum(result.lost for result in outcome.results),
        "doubled_tokens": sum(result.doubled for result in outcome.results),
        "epochs_begun": sum(result.epochs for result in outcome.results),
        "processes_left": len(outcome.leftovers["processes"]),
        "sockets_left": len(outcome.leftovers["sockets"]),
        "files_left": len(outcome.leftovers["files"]),
    }
    experiment.publish(
        options,
        title,
        rows,
        draw=partial(draw, title, note, outcome, rows),
        note=note,
        **counts,
        broken=outcome.broken,
        seconds=outcome.took_s,
        bare_rtt_ms=outcome.rtt_ms,
        held_before=outcome.before,
        held_after=outcome.after,
        left_behind={kind: names[:SHOWN] for kind, names in outcome.leftovers.items()},
        faults=[
            asdict(fault) | asdict(result)
            for fault, result in zip(outcome.faults, outcome.results, strict=False)
        ],
        questions=[asdict(question) for question in outcome.cases],
    )
    print("  ".join(f"{name.replace('_', ' ')}: {count}" for name, count in counts.items()))
    print(f"Resources of the cluster before and after: {outcome.before}, {outcome.after}.")


def draw(title: str, note: str, outcome: ChaosRun, rows: list[dict[str, Any]], path: Path) -> None:
    points: dict[str, list[tuple[float, float]]] = {}
    for number, (fault, result) in enumerate(zip(outcome.faults, outcome.results, strict=False), 1):
        if result.recovery_s is not None:
            points.setdefault(fault.kind, []).append((number, result.recovery_s))
    if not points:
        return
    kinds = [kind for kind in KINDS if kind in points]
    colours = dict(zip(KINDS, plot.COLOURS, strict=False))
    with plot.figure(path, title, columns=2, size=(8.4, 3.6), note=note) as (left, right):
        plot.dots(
            left,
            {kind: points[kind] for kind in kinds},
            xlabel="fault",
            ylabel="recovery, s",
            colours=colours,
        )
        of = {row["fault"]: row for row in rows}
        greys = {"median": plot.INK, "p90": plot.NEUTRAL, "p99": plot.FAINT}
        series = {name: [of[kind][f"{name}_s"] for kind in kinds] for name in greys}
        plot.bars(right, kinds, series, ylabel="recovery, s", colours=greys)


def parse() -> argparse.Namespace:
    parser = experiment.parser(__doc__, plot=True)
    parser.add_argument("--faults", type=int, default=40, help="(40)")
    parser.add_argument("--seed", type=int, default=1, help="of all random choices (1)")
    parser.add_argument("--stages", type=int, default=4, help="(4)")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer (96)")
    parser.add_argument("--num-prompts", type=int, default=6, help="(6)")
    parser.add_argument("--sync", choices=("lockstep", "free"), default="lockstep")
    parser.add_argument("--hosts", type=int, default=0, help="of a test bed; needs root (none)")
    parser.add_argument("--kinds", type=experiment.names, help=f"of {','.join(KINDS)} (all)")
    parser.add_argument("--patience", type=float, default=180.0, help="s for an answer (180)")
    parser.add_argument("--in-flight", type=int, default=1, help="requests at once (1)")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="with --in-flight, no fault begins later (60)"
    )
    options = experiment.parse(parser, faults=4, num_prompts=2, tokens=48)
    many = options.in_flight > 1
    known: tuple[str, ...] = KINDS
    between: tuple[str, ...] = HOST_KINDS
    if many:
        known, between = fault_injector.KINDS, fault_injector.BETWEEN_HOSTS
    elif not options.kinds:
        options.kinds = KINDS if options.hosts else LOCAL_KINDS
    for kind in options.kinds or ():
        if kind not in known:
            parser.error(f"--kinds names {kind!r}, which is none of {', '.join(known)}.")
        if kind in between and not options.hosts:
            parser.error(f"--kinds names {kind!r}, which needs several hosts; add --hosts 3.")
    if options.in_flight < 1:
        parser.error(f"--in-flight is {options.in_flight}, but must be 1 or more.")
    if many and options.plot:
        parser.error("--plot draws a run with one request at a time; leave --in-flight out.")
    if min(options.faults, options.num_prompts, options.stages) < 1 or options.tokens < 4:
        parser.error("--faults, --num-prompts and --stages must be 1 or more, --tokens 4 or more.")
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
    # Short, for the names of sockets.
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
    in_flight = options.in_flight > 1
    try:
        outcome = chaos_in_flight.run(options, folder) if in_flight else run(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if isinstance(outcome, ChaosRun):
        publish(options, outcome)
    else:
        chaos_in_flight.publish(options, outcome)
    if outcome.wrong:
        sys.exit(outcome.wrong)
    print("Every answer is the undisturbed one, token for token.")


if __name__ == "__main__":
    main()
