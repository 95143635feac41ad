"""Faults in mid-answer, over and over: is every answer still the undisturbed one, token by token?

    python -m benchmarks.chaos --faults 60 --json benchmarks/results/chaos.json \\
        --plot benchmarks/results/chaos
    python -m benchmarks.chaos --hosts 3 --faults 30 \\
        --json benchmarks/results/chaos_boxes.json --plot benchmarks/results/chaos_boxes

A cluster is asked one prompt after another, greedy and sampled in turn. At a token that the seed
draws it is struck: a rank is killed (SIGKILL) or hangs (SIGSTOP), or Redis is killed. With
`--hosts` the ranks run on hosts of the tests' bed (network namespaces, a real sshd in each), and
there a link between two hosts is also cut for a while, and a whole host's agent killed.

Recovery is timed from the fault to the first token that comes in a later epoch; for a cut, whose
length is drawn, from the mend to the next token. Ends with exit code 1 if a token of any answer is
another, is lost or comes twice, if the cluster does not come back, or if anything is left behind.
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

from benchmarks import emulated, experiment, plot
from benchmarks.faults import (
    HOST_KINDS,
    KINDS,
    LOCAL_KINDS,
    Fault,
    Question,
    Struck,
    compare,
    line,
    questions,
    recovery_s,
    schedule,
    short,
    table,
)
from benchmarks.victim import Broken, Victim, agent_of, hosts_file, signalled
from pipespec.client.dataset import load
from tools.rig import testbed
from tools.rig.testbed import Testbed

CONTEXT = 512
# Of a link between two hosts.
DELAY_MS, GBIT = 0.1, 10.0
# Names that are stored of what is left behind.
SHOWN = 20
NOTE = (
    "From the fault to the first token of a later epoch; for a cut, from its mend to the next "
    "token. All ranks share the machine's {cores} cores."
)


class Chaos:
    """Strikes a cluster while it answers."""

    def __init__(self, victim: Victim, bed: Testbed | None, asked: Sequence[Question]):
        self._victim, self._bed, self._asked = victim, bed, asked
        self._epoch = victim.settle(0)
        self._expected = [self._answer(question)["tokens"] for question in asked]

    def _answer(self, question: Question) -> dict[str, Any]:
        self._victim.send({"prompt": question.prompt, "settings": question.settings})
        return self._victim.expect("tokens")

    def strike(self, fault: Fault) -> Struck:
        """Ask, strike, and hear the answer out. Raises Broken."""
        question, victim = self._asked[fault.question], self._victim
        victim.send({"prompt": question.prompt, "settings": question.settings, "at": fault.at})
        seen = victim.expect("at")
        since_s = time.monotonic()
        hit = self._hit(fault, seen)
        victim.send({})
        if fault.kind == "cut":
            time.sleep(fault.cut_s)
            self._link(fault, mend=True)
            since_s = time.monotonic()
        answer = victim.expect("tokens")
        took_s = recovery_s(fault, answer, since_s, seen["epoch"]) if hit else None
        before = self._epoch
        # A fault that the answer did not notice ends the epoch all the same; a cut may not.
        self._epoch = victim.settle(seen["epoch"] + (hit and fault.kind != "cut"))
        differ, lost, doubled = compare(answer, self._expected[fault.question])
        return Struck(
            outcome="missed" if not hit else "ended_first" if took_s is None else "recovered",
            recovery_s=took_s,
            epochs=self._epoch - before,
            reason=short(answer["faults"][-1]) if answer["events"][-1][3] > before else "",
            mismatches=differ,
            lost=lost,
            doubled=doubled,
        )

    def _hit(self, fault: Fault, seen: dict[str, Any]) -> bool:
        """Do it; whether what was to be hit was there."""
        if fault.kind == "cut":
            self._link(fault, mend=False)
            return True
        if fault.kind == "redis":
            return signalled(seen["redis"], signal.SIGKILL)
        if fault.kind == "agent":
            assert self._bed is not None
            return signalled(agent_of(self._bed, fault.target), signal.SIGKILL)
        rank = int(fault.target)
        # There are fewer ranks once a worker has stayed away.
        pid = seen["pids"].get(seen["ranks"][rank]) if rank < len(seen["ranks"]) else None
        return signalled(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    def _link(self, fault: Fault, *, mend: bool) -> None:
        assert self._bed is not None
        (self._bed.mend if mend else self._bed.cut)(*fault.target.split("-"))


@dataclass
class Ran:
    """A run, as far as it came.

    Attributes:
        broken: why it ended early; empty: it did not.
        before, after: what the running cluster held before the first and after the last fault.
        left: what was there after its end.
        rtt_ms: the bare round trip between two hosts; None: there is one machine.
    """

    faults: list[Fault]
    asked: list[Question]
    struck: list[Struck] = field(default_factory=list)
    broken: str = ""
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    left: dict[str, list[str]] = field(default_factory=dict)
    took_s: float = 0.0
    rtt_ms: float | None = None

    @property
    def wrong(self) -> str:
        """What must not be, in one sentence; empty: nothing."""
        said = [self.broken] if self.broken else []
        counts = {
            "other than undisturbed": sum(result.mismatches for result in self.struck),
            "lost": sum(result.lost for result in self.struck),
            "doubled": sum(result.doubled for result in self.struck),
        }
        said += [f"Tokens {what}: {count}." for what, count in counts.items() if count]
        for kind, found in self.left.items():
            if found:
                said.append(f"Left behind: {len(found)} {kind}, such as {found[0]!r}.")
        return " ".join(said)


def run(options: argparse.Namespace, folder: Path) -> Ran:
    """Start a cluster whose temporary files lie in `folder`, and strike it."""
    with ExitStack() as stack:
        bed = None
        if options.hosts:
            bed = stack.enter_context(Testbed(options.hosts, delay_ms=DELAY_MS, gbit=GBIT))
        asked = questions(load(emulated.DATA, options.num_prompts), options.tokens)
        faults = schedule(
            options.seed,
            options.faults,
            kinds=options.kinds,
            ranks=options.stages + 1,
            hosts=bed.hosts if bed else (),
            tokens=options.tokens,
            num_questions=len(asked),
        )
        ran = Ran(faults, asked)
        where = [f"cluster.stages={options.stages}", "cluster.devices=[cpu]"]
        if bed:
            ran.rtt_ms = bed.measured_rtt_ms(bed.hosts[0], bed.hosts[1])
            where = [f"cluster={hosts_file(bed, options.stages, folder)}"]
        settings = [*where, f"cluster.sync={options.sync}", f"model.context={CONTEXT}"]
        began = time.monotonic()
        victim = Victim(settings, folder, bed, options.patience)
        try:
            with victim:
                strike_all(victim, bed, ran)
        except Broken as error:
            ran.broken = str(error)
            print(*victim.log, sep="\n", file=sys.stderr)
        ran.took_s = time.monotonic() - began
        ran.left = victim.left_behind()
        return ran


def strike_all(victim: Victim, bed: Testbed | None, ran: Ran) -> None:
    chaos = Chaos(victim, bed, ran.asked)
    ran.before = victim.census()
    for number, fault in enumerate(ran.faults, 1):
        result = chaos.strike(fault)
        ran.struck.append(result)
        told = line(number, len(ran.faults), fault, ran.asked[fault.question], result)
        print(told, file=sys.stderr, flush=True)
    ran.after = victim.census()


def publish(options: argparse.Namespace, ran: Ran) -> None:
    """The table, and what is stored and drawn."""
    rows = table(ran.faults, ran.struck)
    place = "one machine"
    if ran.rtt_ms is not None:
        place = f"{options.hosts} hosts, {GBIT:g} Gbit/s, bare round trip {ran.rtt_ms:.2f} ms"
    note = NOTE.format(cores=os.cpu_count())
    title = (
        f"{len(ran.struck)} faults: {options.stages} stages, {options.sync}, {place}, "
        f"{options.tokens} tokens, seed {options.seed}"
    )
    counts = {
        "requests_finished": len(ran.asked) + len(ran.struck),
        "mismatches": sum(result.mismatches for result in ran.struck),
        "lost_tokens": sum(result.lost for result in ran.struck),
        "doubled_tokens": sum(result.doubled for result in ran.struck),
        "epochs_begun": sum(result.epochs for result in ran.struck),
        "processes_left": len(ran.left["processes"]),
        "sockets_left": len(ran.left["sockets"]),
        "files_left": len(ran.left["files"]),
    }
    experiment.publish(
        options,
        title,
        rows,
        draw=partial(draw, title, note, ran, rows),
        note=note,
        **counts,
        broken=ran.broken,
        seconds=ran.took_s,
        bare_rtt_ms=ran.rtt_ms,
        held_before=ran.before,
        held_after=ran.after,
        left_behind={kind: found[:SHOWN] for kind, found in ran.left.items()},
        faults=[asdict(f) | asdict(s) for f, s in zip(ran.faults, ran.struck, strict=False)],
        questions=[asdict(question) for question in ran.asked],
    )
    print("  ".join(f"{name.replace('_', ' ')}: {count}" for name, count in counts.items()))
    print(f"Held by the cluster before and after: {ran.before}, {ran.after}.")


def draw(title: str, note: str, ran: Ran, rows: list[dict[str, Any]], path: Path) -> None:
    points: dict[str, list[tuple[float, float]]] = {}
    for number, (fault, result) in enumerate(zip(ran.faults, ran.struck, strict=False), 1):
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
    parser.add_argument("--seed", type=int, default=1, help="of all that is drawn (1)")
    parser.add_argument("--stages", type=int, default=4, help="(4)")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer (96)")
    parser.add_argument("--num-prompts", type=int, default=6, help="(6)")
    parser.add_argument("--sync", choices=("lockstep", "free"), default="lockstep")
    parser.add_argument("--hosts", type=int, default=0, help="of a test bed; needs root (none)")
    parser.add_argument("--kinds", type=experiment.names, help=f"of {','.join(KINDS)} (all)")
    parser.add_argument("--patience", type=float, default=180.0, help="s for an answer (180)")
    options = experiment.parse(parser, faults=4, num_prompts=2, tokens=48)
    options.kinds = options.kinds or (KINDS if options.hosts else LOCAL_KINDS)
    for kind in options.kinds:
        if kind not in KINDS:
            parser.error(f"--kinds names {kind!r}, which is none of {', '.join(KINDS)}.")
        if kind in HOST_KINDS and not options.hosts:
            parser.error(f"--kinds names {kind!r}, which needs several hosts; add --hosts 3.")
    if min(options.faults, options.num_prompts, options.stages) < 1 or options.tokens < 4:
        parser.error("--faults, --num-prompts and --stages must be 1 or more, --tokens 4 or more.")
    if options.hosts:
        if not 2 <= options.hosts <= options.stages + 1:
            parser.error(
                f"--hosts is {options.hosts}, but must be from 2 to {options.stages + 1}, the "
                "number of ranks."
            )
        if (reason := testbed.missing()) is not None:
            parser.error(f"--hosts {options.hosts} cannot be had here: {reason}.")
    return options


def main() -> None:
    options = parse()
    # Short, for the names of sockets.
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
    try:
        ran = run(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    publish(options, ran)
    if ran.wrong:
        sys.exit(ran.wrong)
    print("Every answer is the undisturbed one, token for token.")


if __name__ == "__main__":
    main()
