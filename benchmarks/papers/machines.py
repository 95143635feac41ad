"""The machines of the papers, with the times that they print and what is assumed of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from pipespec.config.compose import compose
from pipespec.extras.emulation.link import EmulatedLink
from pipespec.extras.emulation.machine import EmulatedMachine, TimeCurve
from pipespec.extras.plan.pipeline_times import Machine

# SpecPipe: a token of its draft, a 1B on an L40; and what a 1B takes in CUDA graphs (assumed).
PUBLISHED_DRAFT_MS, FAST_DRAFT_MS = 17.0, 4.0
STAGES = 8
# SpecPipe, Fig. 11, HumanEval-X: a token of its own plain pipeline, and of vLLM's on the same GPUs.
PP_MS, VLLM_MS = 302.39, 181.41
# Assumed: 64 rows take so long on a stage of vLLM's, as `1:22.7 64:24.0`.
VLLM_STAGE = TimeCurve(((1, 22.7), (64, 24.0)))
# GB/s of memory: a stage on an RTX 4090 is assumed to take this share of its time on a 3090.
RTX_4090 = 936 / 1008
ROWS = (1, 64)


@cache
def emulated(name: str, stages: int) -> Machine:
    """A machine of conf/emulate/, whose file says where its times are from."""
    quiet = ("model=demo", "proposer=suffix", "cluster.devices=[cpu]")
    machine = compose([*quiet, f"emulate={name}", f"cluster.stages={stages}"]).emulate
    assert isinstance(machine, EmulatedMachine)
    curves = machine.curves * stages if len(machine.curves) == 1 else machine.curves
    return Machine(curves, draft_ms=machine.draft)


def drafting(machine: Machine, draft_ms: float) -> Machine:
    """The same machine with another time of a draft round."""
    return replace(machine, draft_ms=draft_ms)


def papers_pipeline() -> Machine:
    """SpecPipe's own plain pipeline, 302.4 ms a token: eight stages of 37.8 ms (`rtx3090_8`)."""
    return emulated("rtx3090_8", STAGES)


def vllm_pipeline() -> Machine:
    """vLLM's pipeline on the same GPUs: eight stages of 22.7 ms."""
    return Machine((VLLM_STAGE,) * STAGES, draft_ms=PUBLISHED_DRAFT_MS)


def two_servers(machine: Machine) -> Machine:
    """SpecPipe's two-server set-up: half of the stages on RTX 4090, behind 10-Gigabit Ethernet.

    Every hop is taken to be one between servers, although seven of eight are within one."""
    half = machine.num_stages // 2
    link = EmulatedLink(latency_ms=0.05, gbit_per_s=10.0)
    fast = tuple(scaled(curve, RTX_4090) for curve in machine.stages[half:])
    hop = TimeCurve(tuple((rows, link.ms(rows)) for rows in ROWS))
    return replace(machine, stages=(*machine.stages[:half], *fast), hop=hop)


def in_pairs(machine: Machine) -> Machine:
    """The same devices as groups of two, one after the other in a step, as PipeDec's 7 stages."""
    pairs = zip(machine.stages[::2], machine.stages[1::2], strict=True)
    return replace(machine, stages=tuple(scaled(mean(pair), 2) for pair in pairs))


def one_stage(target_ms: float, draft_ms: float) -> Machine:
    """A group of devices for the target that takes as long for any rows, and one for the draft."""
    return Machine((TimeCurve(((1, target_ms),)),), draft_ms=draft_ms)


def scaled(curve: TimeCurve, factor: float) -> TimeCurve:
    """All times of a curve multiplied."""
    return TimeCurve(tuple((rows, factor * ms) for rows, ms in curve.points))


def mean(curves: Sequence[TimeCurve]) -> TimeCurve:
    rows = sorted({count for curve in curves for count, _ in curve.points})
    if any(len(curve.points) > 1 for curve in curves):
        rows.append(rows[-1] + 1)  # beyond their ends they may go on otherwise
    return TimeCurve(tuple((n, sum(curve.ms(n) for curve in curves) / len(curves)) for n in rows))
