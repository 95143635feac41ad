"""The experts of a mixture as layers whose weights stay in the few bits of their files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from pipespec.engine.formats.tp_cuts import NO_CUTS, Cut
from pipespec.engine.low_bit.expert_loop import use_loop
from pipespec.engine.low_bit.expert_matrix import ExpertMatrix
from pipespec.engine.low_bit.row_blocks import linear_in_blocks
from pipespec.errors import ModelError

if TYPE_CHECKING:
    from pipespec.engine.low_bit.kept_weights import LayerMaker

# The matrix of an expert in the files: its layer, its number, its name.
_EXPERT = re.compile(r"(?:^|\.)layers\.(\d+)\..*\bexperts\.(\d+)\.(\w+)$")
# The names in the files of the parts of each stack of Transformers.
_STACKS = {
    "gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")),
    "down_proj": (("down_proj", "w2"),),
}
_MIXTURE = re.compile(r"(?:^|\.)layers\.(\d+)\..*\bexperts$")
# Experts of a layer that the files have together, as gpt-oss's, and the number of one.
_STACKED = re.compile(r"(.*\bexperts)\.(gate_up_proj|down_proj)\.(\d+)$")
PLAIN = "set model.keep_quantized=no"


class ExpertStack(nn.Module):
    """The matrices of the experts of a layer, in place of a parameter `[experts, out, in]` whose
    rows may be those of several matrices of the files."""

    def __init__(self, experts: Iterable[Sequence[nn.Module]]):
        super().__init__()
        self.experts = nn.ModuleList(nn.ModuleList(parts) for parts in experts)

    def __getitem__(self, expert: int | Tensor) -> ExpertMatrix:
        return ExpertMatrix(self.experts[int(expert)].children())


class RowBlockStack(nn.Module):
    """A plain stack `[experts, out, in]` whose products do not depend on the other rows of their
    batch."""

    def __init__(self, plain: nn.Parameter):
        super().__init__()
        self.plain = plain

    def __getitem__(self, expert: int | Tensor) -> ExpertMatrix:
        return ExpertMatrix([partial(linear_in_blocks, weight=self.plain[int(expert)])])


def replace_experts(
    model: nn.Module, names: Iterable[str], make: LayerMaker, cuts: Mapping[str, Cut] = NO_CUTS
) -> None:
    """Let the mixtures of a model have their experts, of these names in the files, in what `make`
    makes. A stack of which none is named stays as it is; `cuts` as in `kept_weights.replace`.
    Raises ModelError if a mixture is of another form."""
    by_layer: dict[int, dict[tuple[int, str], str]] = {}
    stacked: dict[str, dict[str, list[str]]] = {}
    for name in names:
        if (found := _EXPERT.search(name)) is not None:
            by_layer.setdefault(int(found[1]), {})[int(found[2]), found[3]] = name
        elif (found := _STACKED.search(name)) is not None:
            stacked.setdefault(found[1], {}).setdefault(found[2], []).append(name)
    for path, module in list(model.named_modules()):
        if (found := _MIXTURE.search(path)) is not None and int(found[1]) in by_layer:
            _replace_stacks(module, by_layer[int(found[1])], path, make, cuts)
        elif path in stacked:
            _replace_transposed(module, stacked[path], make)


def _replace_transposed(
    module: nn.Module, stacks: Mapping[str, Sequence[str]], make: LayerMaker
) -> None:
    """Replace parameters `[experts, in, out]`, given the names of the experts of each."""
    for stack, sources in stacks.items():
        _, inputs, out = getattr(module, stack).shape
        delattr(module, stack)
        setattr(module, stack, _stack([[each] for each in sources], out, inputs, make))
    use_loop(module)


def _replace_stacks(
    module: nn.Module,
    held: Mapping[tuple[int, str], str],
    path: str,
    make: LayerMaker,
    cuts: Mapping[str, Cut],
) -> None:
    for stack, of_parts in _STACKS.items():
        if not any((0, name) in held for names in of_parts for name in names):
            continue
        plain = getattr(module, stack, None)
        if not isinstance(plain, Tensor) or plain.ndim != 3 or getattr(module, "has_bias", False):
            raise ModelError(f"the experts {path} have no place for packed matrices; {PLAIN}")
        if not plain.numel():
            continue
        count, out, inputs = plain.shape
        delattr(module, stack)
        sources = [
            [held[expert, _name(held, expert, names, path)] for names in of_parts]
            for expert in range(count)
        ]
        found = _stack(sources, out // len(of_parts), inputs, make)
        if (cut := cuts.get(f"{path}.{stack}")) is not None:
            for layer in found.modules():
                layer.part = cut.part  # type: ignore[assignment]
        setattr(module, stack, found)
    use_loop(module)


def _stack(sources: Sequence[Sequence[str]], out: int, inputs: int, make: LayerMaker) -> nn.Module:
    """The experts of a layer, of the names of the matrices `[out, inputs]` of each."""
    whole = make.experts(sources, out, inputs)
    return whole or ExpertStack([make.layer(n, out, inputs) for n in names] for names in sources)


def make_experts_batch_invariant(model: nn.Module) -> None:
    """Let the experts of a model that are plain compute blocks of rows; stacks that Transformers
    has transposed stay as they are."""
    for path, module in list(model.named_modules()):
        transposed = getattr(module, "is_transposed", False)
        if _MIXTURE.search(path) is None or transposed or getattr(module, "has_bias", False):
            continue
        for stack in _STACKS:
            plain = getattr(module, stack, None)
            if isinstance(plain, nn.Parameter) and plain.ndim == 3:
                delattr(module, stack)
                setattr(module, stack, RowBlockStack(plain))
                use_loop(module)


def _name(held: Mapping[tuple[int, str], str], expert: int, names: Sequence[str], path: str) -> str:
    """Which of these names the files have."""
    for name in names:
        if (expert, name) in held:
            return name
    raise ModelError(f"{path}.{expert} has no packed {names[0]}; {PLAIN}")
