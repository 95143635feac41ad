"""What a tree of draft tokens costs in layers that keep a running state, at published sizes.

    python -m benchmarks.budgets.running_states --json benchmarks/results/running_states.json

MEASURED on this machine's CPU with random numbers in float32; medians. `step_ms` is the recurrence
of a tree of 64 nodes in one layer, `chunk_ms` that of 64 consecutive tokens by the model's own
kernel for prompts, `one_by_one_ms` by its kernel for single tokens. `node_bytes` is what a layer
keeps for a node, `state_bytes` what it keeps for a sequence, which is what a snapshot for each node
would take; both with the inputs of the convolution.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from benchmarks.common import experiment
from pipespec.engine.attention.attention_plan import AttentionPlan, causal_plan
from pipespec.engine.recurrence.recurrent_layers import RecurrentLayers
from pipespec.engine.recurrence.state_sizes import recurrent_sizes

NODES = 64
PROMPT = 100
CPU = torch.device("cpu")
ITEM = 2  # bytes of an input of a convolution, in bfloat16


@dataclass(frozen=True)
class Rule:
    """A kind of layer: its module, and the functions of its file that compute the recurrence."""

    model_type: str
    module: type[nn.Module]
    chunk: str
    single: str

    def inputs(self, config: Any, rows: int) -> tuple[list[Tensor], dict[str, Any]]:
        """Random arguments of those functions for so many rows."""
        if self.chunk == "mamba2_chunk_scan":
            heads, size = config.mamba_num_heads, config.mamba_head_dim
            groups, key = config.n_groups, config.ssm_state_size
            decays = -torch.rand(heads)
            shapes = ((rows, heads, size), (rows, heads), (rows, groups, key), (rows, groups, key))
            x, dt, b, c = (torch.rand(1, *shape) for shape in shapes)
            return [x, dt, decays, b, c], {"chunk_size": config.chunk_size}
        if self.model_type == "kimi_linear":
            heads = key_heads = config.linear_num_heads
            key = value = config.linear_head_dim
            decay_shape: tuple[int, ...] = (rows, heads, key)
        else:
            heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
            key, value = config.linear_key_head_dim, config.linear_value_head_dim
            decay_shape = (rows, heads)
        shapes = ((rows, key_heads, key), (rows, key_heads, key), (rows, heads, value))
        given = [torch.randn(1, *shape) for shape in shapes]
        more = {"g": -torch.rand(1, *decay_shape), "beta": torch.rand(1, rows, heads)}
        return given, {**more, "use_qk_l2norm_in_kernel": True, "initial_state": None}


RULES = (
    Rule(
        "qwen3_next",
        Qwen3NextGatedDeltaNet,
        "torch_chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule",
    ),
    Rule(
        "kimi_linear",
        KimiLinearDeltaAttention,
        "chunk_kimi_delta_attention",
        "recurrent_kimi_delta_attention",
    ),
    Rule("nemotron_h", NemotronHMamba2Mixer, "mamba2_chunk_scan", "mamba2_selective_state_update"),
)


def random_tree(seed: int) -> AttentionPlan:
    """NODES nodes below a prompt, each below an earlier one or the prompt."""
    rng = np.random.default_rng(seed)
    mask = np.eye(NODES, dtype=bool)
    for node in range(1, NODES):
        parent = int(rng.integers(-1, node))
        if parent >= 0:
            mask[node] |= mask[parent]
    slots = np.arange(PROMPT + NODES)
    positions = PROMPT + mask.sum(1) - 1
    return AttentionPlan(
        write=slots[PROMPT:],
        positions=positions,
        row_start=np.array([0, NODES]),
        pages=slots[None, :PROMPT],
        page_row=np.array([0]),
        prefix_length=np.array([PROMPT]),
        tree=slots[PROMPT:],
        tree_positions=positions,
        tree_start=np.array([0, NODES]),
        mask=mask.ravel(),
        num_committed=np.array([0]),
        keeps_state=np.array([0]),
        state_number=np.array([0]),
    )


def median_ms(function: Callable[[], object], repeats: int) -> float:
    took = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        function()
        took.append(time.perf_counter() - start)
    return 1e3 * median(took[2:])


def measure(rule: Rule, repeats: int) -> dict[str, Any]:
    config = AutoConfig.for_model(rule.model_type)
    module = rule.module(config, 0).eval()  # type: ignore[call-arg]
    layers = RecurrentLayers([module], PROMPT + NODES)
    ours = module.forward.__func__.__globals__[rule.chunk]  # type: ignore[attr-defined]
    own = sys.modules[rule.module.__module__]
    slots = np.arange(PROMPT)
    layers.prepare(causal_plan(slots[:0], slots), CPU)
    given, named = rule.inputs(config, PROMPT)
    ours(*given, **named)
    given, named = rule.inputs(config, NODES)
    took = []
    for seed in range(repeats + 2):
        layers.prepare(random_tree(seed), CPU)
        start = time.perf_counter()
        ours(*given, **named)
        took.append(time.perf_counter() - start)
    step_ms = 1e3 * median(took[2:])
    chunk_ms = median_ms(lambda: getattr(own, rule.chunk)(*given, **named), repeats)
    single = getattr(own, rule.single)
    if rule.chunk == "mamba2_chunk_scan":
        x, dt, decays, b, c = given
        state = torch.zeros(1, *x.shape[2:], b.shape[-1])
        wide = decays[:, None, None].expand(-1, *state.shape[2:])

        def one_by_one() -> None:
            for row in range(NODES):
                step = dt[:, row, :, None].expand(-1, -1, x.shape[-1])
                single(state, x[:, row], step, wide, b[:, row], c[:, row])
    else:

        def one_by_one() -> None:
            single(*given, output_final_state=True, **named)

    one_ms = median_ms(one_by_one, max(3, repeats // 5))
    sizes = recurrent_sizes(config)
    assert sizes is not None
    node, state_bytes = sizes.node_bytes(ITEM), sizes.state_bytes(ITEM)
    return {
        "model_type": rule.model_type,
        "node_bytes": node,
        "state_bytes": state_bytes,
        "node_of_state": node / state_bytes,
        "step_ms": step_ms,
        "chunk_ms": chunk_ms,
        "one_by_one_ms": one_ms,
        "of_chunk": step_ms / chunk_ms,
        "of_one_by_one": step_ms / one_ms,
    }


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="steps of each kind (15)")
    options = experiment.parse(parser, repeats=3)
    torch.manual_seed(0)
    with torch.inference_mode():
        rows = [measure(rule, options.repeats) for rule in RULES]
    threads = torch.get_num_threads()
    title = f"MEASURED: ms of a tree of {NODES} nodes in one layer's recurrence, {threads} threads"
    experiment.publish(options, title, rows)


if __name__ == "__main__":
    main()
