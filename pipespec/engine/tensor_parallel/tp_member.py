"""What a slice knows of tensor parallelism: one object, from its loading on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pipespec.engine.attention.attention_plan import AttentionPlan
from pipespec.engine.formats.stored import DTYPES
from pipespec.engine.formats.tp_cuts import Cut, CutUnits
from pipespec.engine.tensor_parallel.tensor_parallel import TPGroup, gather_best, gather_columns
from pipespec.engine.tensor_parallel.tp_plan import (
    TPPlan,
    add_collectives,
    drop_summed_biases,
    plan_cuts,
    shrink,
)
from pipespec.system.silence_warnings import silence_warnings

with silence_warnings():
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )


class Driver(Protocol):
    """Lets the other members compute what this one computes; the calls raise `RankFailed`."""

    def batch(self, inputs: Tensor, plan: AttentionPlan) -> None: ...
    def head(self, hidden: Tensor, *, best: bool) -> None: ...


class WholeSlice:
    """Of a slice that one device computes: every call does what it would without the object.

    Attributes:
        size: devices that compute the slice.
        kv_heads: those of the KV heads of its model to which this device's query heads attend;
            None: all.
        no_compiler: why the slice cannot be compiled, as a clause.
    """

    size = 1
    kv_heads: Sequence[int] | None = None
    no_compiler = ""

    def no_graphs(self) -> str:
        """Why the slice cannot be captured now, as a clause."""
        return ""

    def prepare(
        self, state: MutableMapping[str, Any] | None, keep: Callable[..., None], model: Any
    ) -> None:
        """Before the weights of a model load, from this state dict; `keep` replaces layers of a
        model, given of which parameters it has what part. Raises ModelError."""
        keep(model, {})

    def loaded(self, model: PreTrainedModel) -> None:
        """After the weights are loaded."""

    def batch(self, inputs: Tensor, plan: AttentionPlan) -> None:
        """Before a batch is computed."""

    def logits(self, hidden: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """The logits of hidden states, where `compute` returns those of this device."""
        return compute(hidden)

    def best_tokens(
        self, hidden: Tensor, compute: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The largest of the logits of each row, and its token, `[k]` each."""
        best = compute(hidden).max(-1)
        return best.values, best.indices

    def least(self, mine: int) -> int:
        """The least of what the devices that compute the slice say. Raises RankFailed."""
        return mine


class TPMember(WholeSlice):
    """Of a slice that a group computes together.

    Attributes:
        plan: how the group divides the model; set by `prepare`.
        driver: is called before everything that all members must compute; None: they are called
            alike.
    """

    plan: TPPlan
    driver: Driver | None = None
    no_compiler = "as compilers cannot handle the communication between its tensor-parallel members"

    def __init__(self, group: TPGroup, units: CutUnits):
        self.group, self.units, self.size = group, units, group.size

    def no_graphs(self) -> str:
        if self.group.supports_graphs:
            return ""
        return "as the host adds up the results of its tensor-parallel members"

    def prepare(
        self, state: MutableMapping[str, Any] | None, keep: Callable[..., None], model: Any
    ) -> None:
        assert state is not None, "packages' matrices are not divided"
        self.plan = plan_cuts(model, self.size, self.units)
        if self.plan.heads is not None:
            self.kv_heads = self.plan.heads[self.group.rank].selected
        mine = {name: parts[self.group.rank] for name, parts in self.plan.cuts.items()}
        cut_state(model, state, mine)
        shrink(model, mine)
        keep(model, {name: cut.part for name, cut in mine.items()})
        add_collectives(model, self.group, self.plan)

    def loaded(self, model: PreTrainedModel) -> None:
        if self.group.rank:
            drop_summed_biases(model, self.plan)

    def batch(self, inputs: Tensor, plan: AttentionPlan) -> None:
        if self.driver is not None:
            self.driver.batch(inputs, plan)

    def logits(self, hidden: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        if self.driver is not None:
            self.driver.head(hidden, best=False)
        return gather_columns(self.group, compute(hidden), self.plan.vocabulary)

    def best_tokens(
        self, hidden: Tensor, compute: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        if self.driver is not None:
            self.driver.head(hidden, best=True)
        return gather_best(self.group, compute(hidden), self.plan.vocabulary)

    def least(self, mine: int) -> int:
        return min(int(each) for each in self.group.gather(torch.tensor([int(mine)])))


class CutTensor:
    """A part of a tensor of a state dict, which is a slice of a safetensors file or a
    `LazyTensor`; nothing else of it is read."""

    def __init__(self, whole: Any, cut: Cut):
        self.whole, self.cut = whole, cut

    def get_shape(self) -> list[int]:
        return list(self.cut.shape(self.whole.get_shape()))

    def get_dtype(self) -> str:
        return str(self.whole.get_dtype())

    def __getitem__(self, _: Any) -> torch.Tensor:
        shape = self.whole.get_shape()
        if not self.cut.size:
            return torch.empty(self.get_shape(), dtype=getattr(torch, DTYPES[self.get_dtype()]))
        parts = [self.whole[index] for index in self.cut.indices(shape)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.cut.dimension(shape))


def cut_state(
    model: PreTrainedModel, state: MutableMapping[str, Any], cuts: Mapping[str, Cut]
) -> None:
    """Replace the tensors of a state dict that a model whose parameters are cut so will load by
    their parts. A parameter may be made of several tensors, each of one of its matrices."""
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    parameters = model.state_dict()
    for name in sorted(state, key=dot_natural_key):
        found, _ = rename_source_key(
            name, renamings, converters, model.base_model_prefix, parameters
        )
        if found not in parameters and name in parameters:
            found, _ = rename_source_key(name, [], [], model.base_model_prefix, parameters)
        if (cut := cuts.get(found)) is not None:
            state[name] = CutTensor(state[name], cut)
