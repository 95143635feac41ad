"""How a model is divided among the members of a group, and its modules as a member has them.

Transformers' tensor-parallel plan of an architecture says along which side each matrix is divided;
`tp_cuts` says where. A member's model has matrices of the size of its parts. By the plan, the
output of a module is summed over the members, or their parts are concatenated. Norms are whole on
every member, so all members have the same hidden states.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipespec.engine.attention.hook import is_attention
from pipespec.engine.formats.stored import Units
from pipespec.engine.tensor_parallel import tp_cuts
from pipespec.engine.tensor_parallel.tensor_parallel import TPGroup, gather_columns, sum_parts
from pipespec.engine.tensor_parallel.tp_cuts import Cut
from pipespec.errors import ModelError
from pipespec.system.silence_warnings import silence_warnings

with silence_warnings():
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

# The rule of an embedding of which a member has the rows of some tokens.
EMBEDDING = "embedding"
_QUERY_NORM = ".q_norm.weight"
_KV = (".k_proj", ".v_proj")
_BIAS = ".bias"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class TPPlan:
    """How the members of a group divide a model.

    Attributes:
        rules: of the plan of Transformers, by the names of modules and parameters of the layers.
        cuts: the cuts of all members of each parameter that is divided.
        vocabulary: the tokens of all members, of embedding and output head.
    """

    rules: Mapping[str, str]
    cuts: Mapping[str, Sequence[Cut]]
    vocabulary: Sequence[Cut]


def plan_cuts(model: PreTrainedModel, size: int, units: Units) -> TPPlan:
    """How `size` members divide a model whose stored matrices have these units. Raises ModelError
    if heads cannot be divided equally, if there are too few units for all, or if every head has a
    norm of its own, which no plan divides."""
    parameters, config = dict(model.named_parameters()), model.config
    if any(name.endswith(_QUERY_NORM) and each.ndim > 1 for name, each in parameters.items()):
        raise ModelError(
            f"{config.name_or_path} has a norm for every attention head, which "
            f"{size} devices cannot divide; make each device a stage of its own"
        )
    rules = _rules(model)
    try:
        found = {
            name: _cuts_of(model, name, each, rules[name], size, units)
            for name, each in parameters.items()
            if (rule := rules.get(name)) in tp_cuts.COLWISE
            or (rule in tp_cuts.ROWWISE and not name.endswith(_BIAS))
        }
        tokens = tp_cuts.share(config.vocab_size, math.lcm(tp_cuts.ALIGNMENT, units.rows), size)
    except ValueError as error:
        raise ModelError(
            f"{size} devices cannot share {config.name_or_path}: {error}; take another number of "
            "devices, or make each device a stage of its own"
        ) from None
    vocabulary = [Cut(tp_cuts.OUT, part.start, part.stop, config.vocab_size) for part in tokens]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is embedding or module is head:  # without parameters in another slice
            names = [f"{name}.{parameter}" for parameter, _ in module.named_parameters()]
            found |= dict.fromkeys(names, vocabulary)
            if module is embedding and names:
                rules[name] = EMBEDDING
    return TPPlan(rules, found, vocabulary)


def _cuts_of(
    model: PreTrainedModel, name: str, parameter: Tensor, rule: str, size: int, units: Units
) -> list[Cut]:
    """The cuts of all members of a parameter. Where there are fewer KV heads than members, several
    have the same one. Raises ValueError as the functions of `tp_cuts` do."""
    side = tp_cuts.IN if rule in tp_cuts.ROWWISE else tp_cuts.OUT
    matrices = 2 if rule == tp_cuts.PACKED and parameter.ndim > 1 else 1
    total = parameter.shape[Cut(side, 0, 0, 1).dimension(parameter.shape)] // matrices
    unit = units.rows if side == tp_cuts.OUT else units.columns
    owner = name.rpartition(".")[0].rpartition(".")[0]
    if rule in ("colwise", "rowwise") and is_attention(model.get_submodule(owner)):
        heads, num_parts = model.config.num_attention_heads, size
        if name.rpartition(".")[0].endswith(_KV):
            heads = num_kv_heads(model.config)
            num_parts = min(size, heads)
        parts = tp_cuts.equal_parts(total, math.lcm(total // heads, unit), size, num_parts)
    elif rule in (tp_cuts.GATHERED, tp_cuts.SPLIT):
        parts = tp_cuts.share(total, unit, size)
    else:  # columns of an MLP are rows of one of its matrices and columns of the next
        unit = math.lcm(tp_cuts.ALIGNMENT, units.rows, units.columns)
        parts = tp_cuts.share(total, unit, size)
    return [Cut(side, part.start, part.stop, total) for part in parts]


def _rules(model: PreTrainedModel) -> dict[str, str]:
    """The rules of the modules and parameters of the layers. The plan has `*` for each number in a
    name; a parameter without a rule of its own has that of its module."""
    plan = {name: rule for name, rule in model.tp_plan.items() if ".layers." in name}
    unknown = set(plan.values()) - {*tp_cuts.SUMMED, tp_cuts.GATHERED, *tp_cuts.LOCAL}
    assert not unknown, f"unknown rules: {unknown}"
    found: dict[str, str] = {}
    for module_name, module in model.named_modules():
        of_module = plan.get(_NUMBER.sub("*", module_name))
        for parameter, _ in module.named_parameters(recurse=False):
            name = f"{module_name}.{parameter}" if module_name else parameter
            rule = plan.get(_NUMBER.sub("*", name), of_module)
            if rule is not None:
                found[name] = rule
        if of_module is not None:
            found[module_name] = of_module
    return found


def num_kv_heads(config: PretrainedConfig) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


# --- a member's part ---------------------------------------------------------------------------


class CutTensor:
    """A part of a tensor of a state dict, which is a slice of a safetensors file or a
    `LazyTensor`; nothing else of it is read."""

    def __init__(self, whole: Any, cut: Cut):
        self.whole, self.cut = whole, cut

    def get_shape(self) -> list[int]:
        return list(self.cut.shape(self.whole.get_shape()))

    def get_dtype(self) -> str:
        return str(self.whole.get_dtype())

    def __getitem__(self, _: Any) -> Tensor:
        shape = self.whole.get_shape()
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


def shrink(model: PreTrainedModel, cuts: Mapping[str, Cut]) -> None:
    """Before the weights load: make the parameters as large as a member's parts of them."""
    for name, mine in cuts.items():
        owner, _, parameter = name.rpartition(".")
        module = model.get_submodule(owner)
        whole = module.get_parameter(parameter)
        part = nn.Parameter(whole.new_empty(mine.shape(whole.shape)), requires_grad=False)
        module.register_parameter(parameter, part)
        if isinstance(module, nn.Linear):
            if mine.side == tp_cuts.OUT:
                module.out_features = mine.size
            else:
                module.in_features = mine.size
        elif isinstance(module, nn.Embedding):
            module.num_embeddings, module.padding_idx = mine.size, None


def add_collectives(model: PreTrainedModel, group: TPGroup, plan: TPPlan) -> None:
    """Let the modules of a model with this member's parts communicate in their forward passes."""
    for name, module in model.named_modules():
        if (rule := plan.rules.get(name)) is not None:
            _add_collective(module, rule, group, plan.cuts.get(f"{name}.weight", ()))


def drop_summed_biases(model: PreTrainedModel, plan: TPPlan) -> None:
    """Before the weights load: drop each bias that is added to a sum, which member 0 adds."""
    for name, module in model.named_modules():
        if plan.rules.get(name) in tp_cuts.SUMMED and getattr(module, "bias", None) is not None:
            module.bias = None


def _add_collective(module: nn.Module, rule: str, group: TPGroup, parts: Sequence[Cut]) -> None:
    """Add the collective of its rule to a module's forward pass, given the parts of all members."""
    if rule == EMBEDDING:
        _add_lookup(module, group, parts)
    elif rule == tp_cuts.SPLIT:
        mine = parts[group.rank]

        def part(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            whole, *rest = inputs
            return whole[..., mine.start : mine.stop], *rest

        module.register_forward_pre_hook(part)
    if rule in tp_cuts.SUMMED:
        module.register_forward_hook(lambda _, __, output: sum_parts(group.gather(output)))
    elif rule == tp_cuts.GATHERED:

        def whole(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            return gather_columns(group, output, parts)

        module.register_forward_hook(whole)


def _add_lookup(module: Any, group: TPGroup, parts: Sequence[Cut]) -> None:
    """Let an embedding of some tokens return the rows of all. Of each row one member's numbers are
    not zero, so their sum is exact."""
    mine = parts[group.rank]
    others: list[Tensor] = []

    def localise(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ids, *rest = inputs
        others[:] = [(ids < mine.start) | (ids >= mine.stop)]
        return (ids - mine.start).masked_fill(others[0], 0), *rest

    def add(_: nn.Module, __: Any, found: Tensor) -> Tensor:
        return sum_parts(group.gather(found.masked_fill(others[0].unsqueeze(-1), 0)))

    module.register_forward_pre_hook(localise)
    module.register_forward_hook(add)
