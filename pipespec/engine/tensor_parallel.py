"""One member's shard of a slice: several devices of a host compute every layer together.

The rules are Transformers' own: the tensor-parallel plan of an architecture says along which side
each matrix is cut, and its loader reads of each tensor no more than the member's part. What runs
is ours, as a group's sum must not depend on the batch (`total`) and the group may be any: where
the plan says so, a module's output is added up over the members, or their parts are put together.
Embedding, norms and head are whole on every member, so each has the same hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from pipespec.engine.shares import own_heads, require_shareable
from pipespec.errors import ModelError
from pipespec.system.quiet import quiet

with quiet():
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

# What the rules of the supported architectures' plans ask of a module's forward; a rule that is
# not here leaves it as it is, since its input is whole and its output is the member's part.
_SUMMED = ("rowwise", "rowwise_split_input", "moe_tp_experts")
_SPLIT = "rowwise_split_input"
_GATHERED = "colwise_gather_output"
_LOCAL = ("colwise", "packed_colwise", "mla_kv_a_proj", "replicated_with_grad_allreduce")
_QUERY_NORM = ".q_norm.weight"
_ALIGNMENT = 16
_KV = (".k_proj", ".v_proj")


class Group(Protocol):
    """The members of one slice, of which this is number `rank` of `size`.

    `records`: a recorded graph can contain what `gather` does.
    """

    rank: int
    size: int

    @property
    def records(self) -> bool: ...

    def gather(self, mine: Tensor) -> Sequence[Tensor]:
        """Every member's tensor, by rank; all have the same shape. Raises `RankFailed`."""
        ...


class Seat:
    """A member's place, which it keeps as long as its weights, while the group is another in each
    epoch: a `Group` for `ModelSlice.load`.

    Until it first meets the others each sum is of its own part, so many times. That has the shape
    of the whole, which is all that loading asks for, and nobody waits for a member that loads.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self._group: Group | None = _Alone(rank, size)

    @property
    def records(self) -> bool:
        """See `Group`."""
        assert self._group is not None, "the members do not meet"
        return self._group.records

    def gather(self, mine: Tensor) -> Sequence[Tensor]:
        """See `Group`."""
        assert self._group is not None, "the members do not meet"
        return self._group.gather(mine)

    @contextmanager
    def meet(self, group: Group) -> Iterator[None]:
        """Compute with the members of `group` within the block."""
        assert (group.rank, group.size) == (self.rank, self.size)
        self._group = group
        try:
            yield
        finally:
            self._group = None


class _Alone:
    records = True

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def gather(self, mine: Tensor) -> Sequence[Tensor]:
        return [mine] * self.size


def total(parts: Sequence[Tensor]) -> Tensor:
    """The sum, added up by rank: the bits of a row do not depend on the batch around it.

    The all-reduce of a library cuts the whole batch into pieces that are added in different
    orders, so that with three members a row's place would matter.
    """
    result = parts[0]
    for part in parts[1:]:
        result = result + part
    return result


def require_divisible(config: PretrainedConfig, path: Path, size: int, *, quantized: bool) -> None:
    """Raise `ModelError` unless `size` members can share the layers of a model."""
    require_shareable(
        path,
        config.model_type,
        bool(config.base_model_tp_plan),
        config.num_attention_heads,
        size,
        quantized=quantized,
    )


def cut(model: PreTrainedModel, group: Group) -> None:
    """Before the weights load: mark of each tensor what this member reads, and add to the forward
    of the layers what the members do together.

    Raises `ModelError` if a member's part of the experts of a mixture cannot be multiplied, or if
    every head has a norm of its own, which no plan cuts.
    """
    mesh = _Mesh(group)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    if any(name.endswith(_QUERY_NORM) and each.ndim > 1 for name, each in parameters.items()):
        raise ModelError(
            f"{model.config.name_or_path} has a norm for every attention head, which "
            f"{group.size} devices cannot share; make each device a stage of its own"
        )
    for name, rule in _plan(model, group.size).items():
        if name in parameters:
            owner, _, parameter = name.rpartition(".")
            ALL_PARALLEL_STYLES[rule].shard_param(modules[owner], parameter, mesh)
            part = modules[owner].get_parameter(parameter)
            if isinstance(part, DTensor) and part.ndim == 3:
                _require_aligned(part.to_local(), group.size)
        else:
            _join(modules[name], rule, group)


def settle(model: PreTrainedModel, group: Group) -> None:
    """Once the weights are loaded: plain tensors, of which one member alone has each bias that
    is added to a sum."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                local = nn.Parameter(parameter.to_local().detach(), requires_grad=False)
                setattr(module, name, local)
    if group.rank:
        rules = _plan(model, group.size)
        for name, module in model.named_modules():
            if rules.get(name) in _SUMMED and isinstance(module, nn.Linear):
                module.register_parameter("bias", None)


def own_kv_heads(config: PretrainedConfig, group: Group) -> tuple[int, ...] | None:
    """Which KV heads this member's query heads attend to, one for each equal run of them.

    None where those that the member has are the ones: they were cut as the query heads were.
    """
    heads, kv_heads = config.num_attention_heads, _num_kv_heads(config)
    if not (_splits_kv(config.base_model_tp_plan) and kv_heads % group.size):
        return None
    return own_heads(heads, kv_heads, group.rank, group.size)


def _num_kv_heads(config: PretrainedConfig) -> int:
    found: int | None = getattr(config, "num_key_value_heads", None)
    return config.num_attention_heads if found is None else found


def _splits_kv(plan: Mapping[str, str]) -> bool:
    return any(name.endswith(_KV) and rule == "colwise" for name, rule in plan.items())


def _plan(model: PreTrainedModel, size: int) -> dict[str, str]:
    """The rule of each module and parameter of the layers that has one."""
    whole_kv = _num_kv_heads(model.config) % size != 0
    rules = {
        name: rule
        for name, rule in model.tp_plan.items()
        if ".layers." in name and not (whole_kv and rule == "colwise" and name.endswith(_KV))
    }
    unknown = set(rules.values()) - {*_SUMMED, _GATHERED, *_LOCAL}
    assert not unknown, f"rules that are not known: {unknown}"
    expanded: dict[str, str] = model._expand_parallel_plan(rules)
    return expanded


def _require_aligned(experts: Tensor, size: int) -> None:
    """Torch's grouped product wants rows that begin at multiples of so many bytes."""
    sides = experts.shape[1:]
    if any(side == 0 or side * experts.itemsize % _ALIGNMENT for side in sides):
        raise ModelError(
            f"the experts of the model cannot be divided among {size} devices: parts of "
            f"{sides[0]} by {sides[1]} are no multiples of {_ALIGNMENT} bytes; take another number"
        )


def _join(module: nn.Module, rule: str, group: Group) -> None:
    """Add to a module's forward what its rule asks of the members together."""
    rank, size = group.rank, group.size
    if rule == _SPLIT:

        def part(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            whole, *rest = inputs
            width = -(-whole.shape[-1] // size)
            return whole[..., rank * width : (rank + 1) * width], *rest

        module.register_forward_pre_hook(part)
    if rule in _SUMMED:
        module.register_forward_hook(lambda _, __, output: total(group.gather(output)))
    elif rule == _GATHERED:
        width: int = module.out_features  # type: ignore[assignment]

        def whole(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            # The last members' parts are shorter where it does not divide.
            output = functional.pad(output, (0, -(-width // size) - output.shape[-1]))
            return torch.cat(list(group.gather(output)), -1)[..., :width]

        module.register_forward_hook(whole)


class _Mesh(DeviceMesh):
    """What Transformers cuts tensors by: a member's place, and no connection to the others."""

    def __init__(self, group: Group):
        with torch.device("cpu"):  # a model is made on the device "meta"
            members = torch.arange(group.size)
            super().__init__("cpu", members, _init_backend=False, _rank=group.rank)
        self._member = group.rank

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return self._member

    # Torch's own equality leaves the rank out, and its caches would give one member's shard to
    # another of the same process.
    __eq__ = object.__eq__
    __hash__ = object.__hash__
