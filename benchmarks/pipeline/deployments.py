"""What one could run on a cluster, simulated: pipelines by each method, and one group of all GPUs.

    python -m benchmarks.pipeline.deployments --json benchmarks/results/deployments.json

A 70B in bfloat16 on eight GPUs of 24 GB and a mixture of 671B in 4 bits on twelve of 48 GB, their
draft on one more, over each kind of link, with one request and with many. Times of stages are
those that vLLM's pipeline takes on these GPUs (SpecPipe, Fig. 11), or of `conf/emulate/`; the draft
is as accurate as one that was recorded. What a group takes is computed: its share of a pass, and
the all-reduces of its layers, each of which is assumed to take two messages over the slowest link.
The fixed methods have the sizes that are best there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.common import experiment
from benchmarks.papers.machines import emulated, vllm_pipeline
from pipespec.config.compose import compose_sections
from pipespec.extras.emulation.link import EmulatedLink
from pipespec.extras.emulation.machine import TimeCurve
from pipespec.extras.emulation.synthetic_proposer import USUAL
from pipespec.extras.plan.advice import DecodingMethod, predict
from pipespec.extras.plan.pipeline_times import Machine
from pipespec.extras.plan.simulation import simulate
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.level import Level
from pipespec.head.policies.policy import AUTO, SpeculationPolicy
from pipespec.head.policies.root import Root
from pipespec.head.policies.static_tree import StaticTree

ROWS = (1, 2, 4, 8, 16, 32, 64)
MAX_ROWS = ROWS[-1]  # of a batch of all requests
REQUESTS = (8, 64)
# Assumed of GPUs of one box, over PCI Express.
PCIE = EmulatedLink(latency_ms=0.05, gbit_per_s=100.0)
FAR = (20.0, 40.0)  # milliseconds one way, over the internet
ALL_REDUCES, MESSAGES = 2, 2  # of a layer, and of an all-reduce
# Candidates for the best fixed method.
LEVELS = [Level(MAX_ROWS // levels, 16, levels=levels) for levels in (1, 2, 4)]
LEVELS += [Level(16, 16), Level(4, 16)]
SHAPES = ([1, 1, 3, 1, 1, 1, 1, 1], [2, 2, 2, 1, 1, 1], [1] * 4, [1] * 8, [2, 2, 1, 1, 1, 1])
TREES = [StaticTree(shape) for shape in SHAPES]


@dataclass(frozen=True)
class Deployment:
    """Devices and the links between them, for one model. `layers`: of it, of `row_bytes` each."""

    name: str
    machine: Machine
    link: EmulatedLink
    layers: int

    @property
    def pipeline(self) -> Machine:
        hop = TimeCurve(tuple((rows, self.link.ms(rows)) for rows in (1, MAX_ROWS)))
        return replace(self.machine, hop=hop)

    @property
    def group(self) -> Machine:
        """The devices as one stage."""
        stages, all_reduces = self.machine.stages, ALL_REDUCES * MESSAGES * self.layers
        times = (
            (n, sum(each.ms(n) for each in stages) / len(stages) + all_reduces * self.link.ms(n))
            for n in ROWS
        )
        return replace(self.machine, stages=(TimeCurve(tuple(times)),))


def deployments() -> Iterator[Deployment]:
    links = {"in one box": PCIE}
    for name, words in (("10gbe", "over 10 Gbit/s"), ("1gbe", "over 1 Gbit/s")):
        (links[words],) = compose_sections(["emulate_link"], [f"emulate_link={name}"])
    for ms in FAR:
        links[f"over {ms:g} ms"] = EmulatedLink(latency_ms=ms, gbit_per_s=1.0)
    for words, link in links.items():
        yield Deployment(f"70B, 8 × 24 GB {words}", vllm_pipeline(), link, 80)
    mixture = emulated("deepseek_v3_12", 12)
    for words in ("in one box", "over 10 Gbit/s"):
        link = replace(links[words], row_bytes=2 * 7168)
        yield Deployment(f"DeepSeek V3, 12 × 48 GB {words}", mixture, link, 61)


def methods(where: Deployment) -> Iterator[tuple[str, Machine, list[SpeculationPolicy]]]:
    """What is compared, with the policies of which the best counts."""
    yield "pipeline", where.pipeline, [Root()]
    yield "pipeline, static tree", where.pipeline, [*TREES]
    yield "pipeline, levels", where.pipeline, [*LEVELS]
    yield "pipeline, best_first", where.pipeline, [BestFirst()]
    yield "one group", where.group, [Root()]
    yield "one group, static tree", where.group, [*TREES]
    yield "one group, best_first", where.group, [BestFirst()]


def rows(options: Any) -> Iterator[dict[str, Any]]:
    for where in deployments():
        for name, machine, policies in methods(where):
            found = [
                predict(DecodingMethod("", policy, AUTO), machine, USUAL, num_tokens=options.tokens)
                for policy in policies
            ]
            best = min(found, key=lambda each: each.tbt_ms)
            policy = policies[found.index(best)]
            yield described(where, name, policy, 1, tbt_ms=best.tbt_ms, in_flight=best.in_flight)
            if where.link is not PCIE and not where.link.latency_ms < 1:
                continue
            for requests in REQUESTS:
                run = partial(simulate, rounds=AUTO, num_tokens=options.tokens * 4)
                crowd = run(policy, machine, USUAL, num_requests=requests, max_rows=MAX_ROWS)
                yield described(where, name, policy, requests, tbt_ms=requests * crowd.tbt_ms)


def described(
    where: Deployment, name: str, policy: SpeculationPolicy, requests: int, **figures: float
) -> Mapping[str, Any]:
    per_s = 1000 * requests / figures["tbt_ms"]
    more = {"method": name, "policy": repr(policy), "requests": requests, "tokens_per_s": per_s}
    return {"deployment": where.name, **more, **figures}


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=600, help="of a simulation (600)")
    options = experiment.parse(parser, tokens=200)
    title = "simulated: milliseconds between tokens by deployment and method"
    experiment.publish(options, title, [*rows(options)])


if __name__ == "__main__":
    main()
