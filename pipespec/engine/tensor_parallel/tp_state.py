"""The tensors of a checkpoint as a tensor-parallel member reads them: of each its part alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from pipespec.engine.formats.lazy import DTYPES
from pipespec.engine.formats.tp_cuts import Cut, CutUnits
from pipespec.engine.tensor_parallel.tensor_parallel import (
    TPGroup,
    TPPlan,
    add_collectives,
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


class Member:
    """A member of a group while it loads.

    Attributes:
        plan: how the group divides the model; set by `prepare`.
    """

    plan: TPPlan

    def __init__(self, group: TPGroup, units: CutUnits):
        self.group, self.units = group, units

    def prepare(
        self,
        state: MutableMapping[str, Any],
        keep: Callable[..., None],
        model: PreTrainedModel,
    ) -> None:
        """Make this member's part of a model whose weights will be loaded from this state dict;
        `keep` replaces layers of a model, given its `cuts`. Raises ModelError."""
        self.plan = plan_cuts(model, self.group.size, self.units)
        mine = {name: parts[self.group.rank] for name, parts in self.plan.cuts.items()}
        cut_state(model, state, mine)
        shrink(model, mine)
        keep(model, cuts=mine)
        add_collectives(model, self.group, self.plan)
