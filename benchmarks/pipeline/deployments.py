"""What one could run on a cluster, simulated: pipelines by each method, and one group of all GPUs.

    python -m benchmarks.pipeline.deployments --only 70B --json benchmarks/results/deployments.json
    python -m benchmarks.pipeline.deployments --only V3 --json benchmarks/results/mixture.json

A 70B in bfloat16 on eight GPUs of 24 GB and a mixture of 671B in 4 bits on twelve of 48 GB, their
draft on one more, with one request and with many, the 70B over each kind of link. Times of stages
are those that vLLM's pipeline takes on these GPUs (SpecPipe, Fig. 11), or of `conf/emulate/`; the
draft is as accurate as one that was recorded, and with one request also as a 1B is assumed to be.
What a group takes is computed: its share of a pass, and the all-reduces of its layers, each of
which is assumed to take two messages over the slowest link; GPUs that do not divide the heads form
none.

Of the fixed methods, and of those of a group, all candidates are looked at briefly for each number
of requests, and the two that are fastest then are simulated as long as the others. Intervals are of
95 %, by batch means.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import experiment
from benchmarks.papers.cells import MAX_ROWS, Cell, Run, Runs, code_version
from benchmarks.papers.machines import emulated, vllm_pipeline
from pipespec.config.compose import compose_sections
from pipespec.extras.emulation.link import EmulatedLink
from pipespec.extras.emulation.machine import TimeCurve
from pipespec.extras.emulation.synthetic_proposer import USUAL, Accuracy
from pipespec.extras.plan.pipeline_times import Machine
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.level import Level
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.head.policies.root import Root
from pipespec.head.policies.static_tree import StaticTree

ROWS = (1, 2, 4, 8, 16, 32, 64)
REQUESTS = (1, 8, 64)
# Assumed of GPUs of one box, over PCI Express.
PCIE = EmulatedLink(latency_ms=0.05, gbit_per_s=100.0)
FAR = (20.0, 40.0)  # milliseconds one way, over the internet
ALL_REDUCES, MESSAGES = 2, 2  # of a layer, and of an all-reduce
RECORDED, ASSUMED = "recorded", "a 1B's, assumed"
# The 1B's is that of docs/drafts.md: top-32 of SpecPipe, Fig. 7; top-1 and spread assumed.
DRAFTS = {RECORDED: USUAL, ASSUMED: Accuracy({1: 0.74, 32: 0.99}, 0.8)}
# Candidates for the best fixed method.
LEVELS = [Level(MAX_ROWS // levels, 16, levels=levels) for levels in (1, 2, 4)]
LEVELS += [Level(16, 16), Level(4, 16)]
SHAPES = [[1] * 2, [1] * 4, [1] * 8]
SHAPES += [[1, 1, 3, 1, 1, 1, 1, 1], [2, 2, 2, 1, 1, 1], [2, 2, 1, 1, 1, 1]]
TREES = [StaticTree(shape) for shape in SHAPES]
# The share of its tokens by which a candidate is chosen, and how many are.
LOOK, CHOSEN = 0.2, 2
# Tokens of many requests beside those of one.
MANY = 2


@dataclass(frozen=True)
class Deployment:
    """Devices and the links between them, for one model. `layers`: of it, of `row_bytes` each;
    `heads`: of its attention."""

    name: str
    machine: Machine
    link: EmulatedLink
    layers: int
    heads: int

    @property
    def pipeline(self) -> Machine:
        hop = TimeCurve(tuple((rows, self.link.ms(rows)) for rows in (1, MAX_ROWS)))
        return replace(self.machine, hop=hop)

    @property
    def group(self) -> Machine | None:
        """The devices as one stage; None: they do not divide the heads."""
        stages, all_reduces = self.machine.stages, ALL_REDUCES * MESSAGES * self.layers
        if self.heads % len(stages):
            return None
        times = (
            (n, sum(each.ms(n) for each in stages) / len(stages) + all_reduces * self.link.ms(n))
            for n in ROWS
        )
        return replace(self.machine, stages=(TimeCurve(tuple(times)),))

    @property
    def requests(self) -> Sequence[int]:
        return REQUESTS if self.link.latency_ms < 1 else REQUESTS[:1]

    @property
    def drafts(self) -> Sequence[str]:
        """Those that are simulated: none as accurate as a 1B before a 70B is known of a mixture."""
        return (RECORDED, ASSUMED) if "70B" in self.name else (RECORDED,)


def deployments() -> Iterator[Deployment]:
    links = {"in one box": PCIE}
    for name, words in (("10gbe", "over 10 Gbit/s"), ("1gbe", "over 1 Gbit/s")):
        (links[words],) = compose_sections(["emulate_link"], [f"emulate_link={name}"])
    for ms in FAR:
        links[f"over {ms:g} ms one way, 1 Gbit/s"] = EmulatedLink(latency_ms=ms, gbit_per_s=1.0)
    for words, link in links.items():
        yield Deployment(f"70B, 8 × 24 GB {words}", vllm_pipeline(), link, 80, 64)
    mixture = emulated("deepseek_v3_12", 12)
    pcie = replace(PCIE, row_bytes=2 * 7168)
    yield Deployment("DeepSeek V3, 12 × 48 GB in one box", mixture, pcie, 61, 128)


def methods(
    where: Deployment, requests: int
) -> Iterator[tuple[str, Machine, Sequence[SpeculationPolicy]]]:
    """What is compared, with the policies of which the best counts."""
    shared = [replace(each, shared=True) for each in LEVELS] if requests > 1 else []
    yield "pipeline", where.pipeline, [Root()]
    yield "pipeline, fixed", where.pipeline, [*TREES, *LEVELS, *shared]
    yield "pipeline, best_first", where.pipeline, [BestFirst()]
    if where.group is not None:
        yield "one group", where.group, [Root()]
        yield "one group, with draft", where.group, [*TREES, BestFirst()]


def in_flight(policy: SpeculationPolicy, machine: Machine, requests: int) -> Sequence[int]:
    """Numbers of batches on their way that are tried. A policy that delays no batch for a draft
    round has as many as it can; many requests fill as many as there are stages."""
    windows = machine.windows()
    if requests > 1:
        return (0,)
    return windows if policy.refills else windows[-1:]


def best(cells: Sequence[Cell], looks: Runs, runs: Runs) -> tuple[Cell, Run]:
    """The fastest of some candidates."""
    if len(cells) > CHOSEN:
        for _ in looks.simulate(cells, jobs=1):
            pass
        cells = sorted(cells, key=lambda cell: looks[cell].tbt.value)[:CHOSEN]
    for _ in runs.simulate(cells, jobs=1):
        pass
    return min(((cell, runs[cell]) for cell in cells), key=lambda found: found[1].tbt.value)


def rows(tokens: int, only: str, resume: Path | None) -> Iterator[dict[str, Any]]:
    looks, runs = (Runs(share, resume, code_version()) for share in (LOOK, 1.0))
    for where in (each for each in deployments() if only in each.name):
        for requests in where.requests:
            for draft in where.drafts if requests == 1 else (RECORDED,):
                for name, machine, policies in methods(where, requests):
                    if draft == ASSUMED and isinstance(policies[0], Root):
                        continue  # it has no draft
                    count = tokens if requests == 1 else MANY * tokens
                    cells = [
                        Cell(policy, machine, DRAFTS[draft], "auto", count, requests, each)
                        for policy in policies
                        for each in in_flight(policy, machine, requests)
                    ]
                    cell, run = best(cells, looks, runs)
                    yield {"deployment": where.name, "draft": draft, **described(name, cell, run)}


def described(method: str, cell: Cell, run: Run) -> Mapping[str, Any]:
    return {
        "method": method,
        "policy": repr(cell.policy),
        "requests": cell.requests,
        "in_flight": cell.in_flight or cell.machine.num_stages,
        "tokens_per_s": run.tokens_per_second.value,
        "tbt_ms": asdict(run.tbt),
    }


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=3000, help="of a simulation (3000)")
    parser.add_argument("--only", default="", help="deployments whose names have this (all)")
    parser.add_argument("--resume", type=Path, help="file that keeps what is known of cells")
    options = experiment.parse(parser, tokens=200)
    title = "simulated: milliseconds between tokens by deployment and method"
    experiment.publish(options, title, [*rows(options.tokens, options.only, options.resume)])


if __name__ == "__main__":
    main()
