"""The waits that a step needs, each with its reason."""

from __future__ import annotations

from collections.abc import Iterable

from tests.helpers.pretended_gpu.findings import Finding, Kind

# By function of pipespec.
ALLOWED = {
    "pipespec/engine/attention/device_plan.py:DevicePlan.fill": (
        "the copy of the last plan still reads the staging buffer; it is done unless the host is a "
        "whole batch ahead"
    ),
    "pipespec/engine/recurrence/fixed_plan.py:FixedPlan._pad": "the same, of layers with states",
    "pipespec/head/proposers/draft_model.py:DraftModelProposer._by_probability": (
        "the head puts what the draft proposes into the tree, once in a round"
    ),
    "pipespec/head/proposers/draft_model.py:DraftModelProposer._by_foresight": (
        "the same, for sequences that are sampled"
    ),
    "pipespec/sampling/verifier.py:_finite": "the verdict, once in a step",
    "pipespec/sampling/draw.py:draw": (
        "the verdict of sequences that are sampled, once for each token of the longest accepted "
        "path: what is drawn decides which row is next"
    ),
    "pipespec/sampling/distribution.py:logprobs": (
        "log-probabilities go to the client, where a request wants them"
    ),
    "pipespec/sampling/lossy_acceptance.py:_values": (
        "the host compares draft tokens, for lossy acceptance only"
    ),
    "pipespec/sampling/verifier.py:_choose": ("a lossy rule checks that the logits are finite"),
    "pipespec/transport/wire.py:Wire.pack": (
        "the host sends the hidden states to the next stage; within a host NCCL does"
    ),
    "pipespec/engine/expert_loop.py:loop_over_experts": (
        "experts in few bits are computed one after the other, each for the rows that chose it"
    ),
    "pipespec/engine/expert_counts.py:ExpertCounts.points": (
        "counts of experts are read once in a thousand batches"
    ),
}
# By function of Transformers, within `ModelSlice.compute`; there are no graphs then.
COMPUTE = "pipespec/engine/model_slice.py:ModelSlice.compute"
LIBRARIES = {
    "transformers/integrations/moe.py:_grouped_mm": (
        "torch multiplies groups of rows without a wait only in bfloat16, and from Hopper on"
    ),
    "transformers/models/jetmoe/modeling_jetmoe.py:JetMoeTopKGating.forward": (
        "it splits the rows by expert on the host"
    ),
    "transformers/models/longcat_flash/modeling_longcat_flash.py:LongcatFlashExperts.forward": (
        "it computes the experts that rows chose in a loop on the host"
    ),
    "transformers/models/phimoe/modeling_phimoe.py:PhimoeRotaryEmbedding.forward": (
        "it makes the frequencies in every batch"
    ),
}
_WAITS = (Kind.READ, Kind.WAIT)


def is_allowed(found: Finding) -> bool:
    """Whether a step needs it."""
    if found.captured or found.kind is Kind.MIXED:
        return False
    if found.place == COMPUTE:
        return found.library in LIBRARIES
    return found.place in ALLOWED and found.kind in _WAITS


def refused(findings: Iterable[Finding]) -> list[str]:
    """What a step does beyond the list, each once."""
    return sorted({str(each) for each in findings if not is_allowed(each)})
