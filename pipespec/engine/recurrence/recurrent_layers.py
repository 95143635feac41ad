"""Makes the layers of a Transformers model that keep a running state compute batches of tree rows.

Their modules call functions of their own Python module by name: one for the short convolution, one
for the recurrence over a prompt. `attach` gives a module a copy of its `forward` in which those
names are ours; everything else stays the model's. No cache is passed, so the module always takes
its path for prompts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from pipespec.engine.attention.attention_plan import AttentionPlan
from pipespec.engine.recurrence.batch_planning import plan_batch
from pipespec.engine.recurrence.recurrent_book import RecurrentBook
from pipespec.engine.recurrence.recurrent_plan import FixedPlan, RecurrentPlan
from pipespec.engine.recurrence.recurrent_state import RecurrentState, on_device
from pipespec.engine.recurrence.state_sizes import fixed_entries

# The functions of Transformers' modeling files that are replaced.
CONVOLUTION = "causal_conv1d_fn"
DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
SCAN = "mamba2_chunk_scan"


class RecurrentLayers:
    """The layers of a slice that keep a state, with the book and the plan that they share."""

    def __init__(self, layers: Sequence[nn.Module], num_slots: int):
        self._now: RecurrentPlan[torch.Tensor] | None = None
        self.states = [
            state
            for layer in layers
            for module in layer.modules()
            if (state := attach(module, self._current)) is not None
        ]
        lengths = {state.history for state in self.states}
        assert len(lengths) < 2, "the convolutions of a model are of one length"
        self._book = RecurrentBook(num_slots, max(lengths, default=0))
        self._padding: tuple[int, int] | None = None  # there is none until a plan is of fixed size

    def _current(self) -> RecurrentPlan[torch.Tensor]:
        assert self._now is not None, "a forward pass has no plan"
        return self._now

    def __bool__(self) -> bool:
        return bool(self.states)

    def end_sequence(self, page: int) -> None:
        """See `RecurrentBook.end`."""
        self._book.end(page)

    def plan(self, plan: AttentionPlan) -> RecurrentPlan[np.ndarray] | None:
        """What the layers do with a batch, which has to be computed next; None: there are none."""
        return plan_batch(self._book, plan) if self.states else None

    def use(self, plan: RecurrentPlan[Any] | None, device: torch.device) -> None:
        self._now = None if plan is None else on_device(plan, device)

    def reserve(self, rows: int, device: torch.device) -> FixedPlan | None:
        """Buffers for plans of up to so many rows; None: no layer keeps a state."""
        if not self.states:
            return None
        self.make_room(rows)
        self._padding = self._padding or self._book.reserve_padding()
        return FixedPlan(rows, self._book.history, self._padding, device)

    def make_room(self, rows: int) -> None:
        """Have the pools get room at once for plans of up to so many rows."""
        self._book.reserve_entries(fixed_entries(rows))

    def use_fixed(self, fixed: FixedPlan) -> None:
        book = self._book
        self._now = replace(fixed.plan, capacity=book.capacity, num_states=book.num_states)

    def fits(self, plan: RecurrentPlan[np.ndarray]) -> bool:
        """Whether the pools of all layers have room for a plan, so that none is replaced."""
        return all(state.has_room(plan) for state in self.states)

    @property
    def num_growths(self) -> int:
        """How often pools of the layers were replaced by larger ones."""
        return sum(state.num_growths for state in self.states)

    @torch.inference_mode()
    def start_from(self, page: int, slots: np.ndarray) -> None:
        """See `RecurrentBook.start_from`; copies the state."""
        if not self.states:
            return
        to, source = self._book.start_from(page, slots)
        for state in self.states:
            state.copy(to, source, self._book.num_states)


def attach(
    module: nn.Module, current: Callable[[], RecurrentPlan[torch.Tensor]]
) -> RecurrentState | None:
    """Let a module that convolves compute batches of tree rows; None: it is another one."""
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType) or CONVOLUTION not in forward.__code__.co_names:
        return None
    names = set(forward.__code__.co_names)
    kernels = [each for each in module.children() if isinstance(each, nn.Conv1d)]
    assert len(kernels) == 1, f"{type(module).__name__} has {len(kernels)} convolutions"
    state = RecurrentState(kernels[0].kernel_size[0] - 1, current)
    ours: dict[str, Callable[..., Any]] = {CONVOLUTION: state.convolve}
    space = forward.__globals__
    for name in names.intersection(DELTA_RULES):
        ours[name] = state.apply_delta_rule(space[name])
    if SCAN in names:
        ours[SCAN] = state.scan(space[SCAN])
    copied = forward.__name__, forward.__defaults__, forward.__closure__
    copy = FunctionType(forward.__code__, {**space, **ours}, *copied)
    copy.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(copy, module)
    return state
