"""Tensor parallelism: several devices of a host compute every layer of a slice together.

Transformers' tensor-parallel plan of an architecture says along which side each matrix is divided,
and its loader reads only the member's shard of each tensor. The collectives are ours, as a sum must
not depend on the batch (`sum_parts`) and must work with any `TPGroup`: by the plan, the output of a
module is summed over the members, or their parts are concatenated. Embedding, norms and output head
are whole on every member, so all members have the same hidden states.
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

from pipespec.engine.tp_divisibility import (
    GATHERED,
    LOCAL,
    SPLIT,
    SUMMED,
    has_plan,
    local_kv_heads,
    require_tp_divisible,
)
from pipespec.errors import ModelError
from pipespec.system.silence_warnings import silence_warnings

with silence_warnings():
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

_QUERY_NORM = ".q_norm.weight"
_ALIGNMENT = 16
_KV = (".k_proj", ".v_proj")


class TPGroup(Protocol):
    """The members that compute a slice together; this one is number `rank` of `size`.

    `supports_graphs`: a CUDA graph can contain `gather`.
    """

    rank: int
    size: int

    @property
    def supports_graphs(self) -> bool: ...

    def gather(self, mine: Tensor) -> Sequence[Tensor]:
        """Every member's tensor, by rank; all have the same shape. Raises `RankFailed`."""
        ...


class TPRank:
    """The `TPGroup` of a loaded slice: a fixed rank, and a process group that differs in each
    epoch.

    Until the first epoch, `gather` repeats the member's own tensor. This has the right shape, which
    is all that loading needs, and members do not wait for one another while they load.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self._group: TPGroup | None = _LoadingGroup(rank, size)

    @property
    def supports_graphs(self) -> bool:
        """See `TPGroup`."""
        assert self._group is not None, "the members do not meet"
        return self._group.supports_graphs

    def gather(self, mine: Tensor) -> Sequence[Tensor]:
        """See `TPGroup`."""
        assert self._group is not None, "the members do not meet"
        return self._group.gather(mine)

    @contextmanager
    def joined(self, group: TPGroup) -> Iterator[None]:
        """Use this group within the block."""
        assert (group.rank, group.size) == (self.rank, self.size)
        self._group = group
        try:
            yield
        finally:
            self._group = None


class _LoadingGroup:
    supports_graphs = True

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def gather(self, mine: Tensor) -> Sequence[Tensor]:
        return [mine] * self.size


def sum_parts(parts: Sequence[Tensor]) -> Tensor:
    """The sum in the order of ranks, so that the bits of a row do not depend on its batch.

    The all-reduce of a library divides the batch into pieces that are added in different orders;
    with three members or more, the position of a row would matter.
    """
    result = parts[0]
    for part in parts[1:]:
        result = result + part
    return result


def require_divisible(config: PretrainedConfig, path: Path, size: int, *, quantized: bool) -> None:
    """Raise ModelError unless the layers of a model can be divided among `size` members."""
    divisible = has_plan(config)
    require_tp_divisible(
        path,
        config.model_type,
        divisible,
        config.num_attention_heads if divisible else 1,
        size,
        quantized=quantized,
    )


def shard_model(model: PreTrainedModel, group: TPGroup) -> None:
    """Before the weights load: shard the parameters for this member, and add the collectives to the
    modules of the layers.

    Raises ModelError if a member's part of the experts of a mixture cannot be multiplied, or if
    every head has a norm of its own, which no plan divides.
    """
    mesh = _Mesh(group)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    if any(name.endswith(_QUERY_NORM) and each.ndim > 1 for name, each in parameters.items()):
        raise ModelError(
            f"{model.config.name_or_path} has a norm for every attention head, which "
            f"{group.size} devices cannot divide; make each device a stage of its own"
        )
    for name, rule in _plan(model, group.size).items():
        if name in parameters:
            owner, _, parameter = name.rpartition(".")
            ALL_PARALLEL_STYLES[rule].shard_param(modules[owner], parameter, mesh)
            part = modules[owner].get_parameter(parameter)
            if isinstance(part, DTensor) and part.ndim == 3:
                _require_aligned(part.to_local(), group.size)
        else:
            _add_collectives(modules[name], rule, group)


def finalize_shards(model: PreTrainedModel, group: TPGroup) -> None:
    """After the weights are loaded: turn shards into plain tensors, and leave each bias that is
    added to a sum on member 0 only."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                local = nn.Parameter(parameter.to_local().detach(), requires_grad=False)
                setattr(module, name, local)
    if group.rank:
        rules = _plan(model, group.size)
        for name, module in model.named_modules():
            if rules.get(name) in SUMMED and isinstance(module, nn.Linear):
                module.register_parameter("bias", None)


def select_kv_heads(config: PretrainedConfig, group: TPGroup) -> tuple[int, ...] | None:
    """The KV heads that this member's query heads attend to, one for each equal run of them.

    None: exactly those that the member has, as they were divided like the query heads.
    """
    heads, kv_heads = config.num_attention_heads, _num_kv_heads(config)
    if not (_splits_kv(config.base_model_tp_plan) and kv_heads % group.size):
        return None
    return local_kv_heads(heads, kv_heads, group.rank, group.size)


def _num_kv_heads(config: PretrainedConfig) -> int:
    found: int | None = getattr(config, "num_key_value_heads", None)
    return config.num_attention_heads if found is None else found


def _splits_kv(plan: Mapping[str, str]) -> bool:
    return any(name.endswith(_KV) and rule == "colwise" for name, rule in plan.items())


def _plan(model: PreTrainedModel, size: int) -> dict[str, str]:
    """The rules of the modules and parameters of the layers."""
    whole_kv = _num_kv_heads(model.config) % size != 0
    rules = {
        name: rule
        for name, rule in model.tp_plan.items()
        if ".layers." in name and not (whole_kv and rule == "colwise" and name.endswith(_KV))
    }
    unknown = set(rules.values()) - {*SUMMED, GATHERED, *LOCAL}
    assert not unknown, f"unknown rules: {unknown}"
    expanded: dict[str, str] = model._expand_parallel_plan(rules)
    return expanded


def _require_aligned(experts: Tensor, size: int) -> None:
    """Raise ModelError unless rows are multiples of 16 bytes, as torch's grouped product
    requires."""
    sides = experts.shape[1:]
    if any(side == 0 or side * experts.itemsize % _ALIGNMENT for side in sides):
        raise ModelError(
            f"the experts of the model cannot be divided among {size} devices: parts of "
            f"{sides[0]} by {sides[1]} are no multiples of {_ALIGNMENT} bytes; take another number"
        )


def _add_collectives(module: nn.Module, rule: str, group: TPGroup) -> None:
    """Add the collective of its rule to a module's forward pass."""
    rank, size = group.rank, group.size
    if rule == SPLIT:

        def part(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            whole, *rest = inputs
            width = -(-whole.shape[-1] // size)
            return whole[..., rank * width : (rank + 1) * width], *rest

        module.register_forward_pre_hook(part)
    if rule in SUMMED:
        module.register_forward_hook(lambda _, __, output: sum_parts(group.gather(output)))
    elif rule == GATHERED:
        width: int = module.out_features  # type: ignore[assignment]

        def whole(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            # The last members' parts are shorter if the width is not divisible.
            output = functional.pad(output, (0, -(-width // size) - output.shape[-1]))
            return torch.cat(list(group.gather(output)), -1)[..., :width]

        module.register_forward_hook(whole)


class _Mesh(DeviceMesh):
    """The device mesh by which Transformers shards tensors: a rank without connections."""

    def __init__(self, group: TPGroup):
        with torch.device("cpu"):  # the model is created on the device "meta"
            members = torch.arange(group.size)
            super().__init__("cpu", members, _init_backend=False, _rank=group.rank)
        self._member = group.rank

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return self._member

    # Torch's equality ignores the rank, so that its caches would return the shard of another member
    # of the same process.
    __eq__ = object.__eq__
    __hash__ = object.__hash__
