"""Weights that stay in the few bits of their files: packed integers, FP8, and blocks of GGUF.

The layers with such weights are replaced before a model loads, and filled once it has. The results
differ from those of dequantised weights, so all stages of a cluster must use the same format.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pipespec.engine.formats.gguf import is_int4
from pipespec.engine.formats.quantization import KEPT_FORMATS
from pipespec.engine.formats.stored import WHOLE, KeptMatrix, Part, row_parts
from pipespec.engine.ggml import compute
from pipespec.engine.ggml import library as ggml
from pipespec.engine.low_bit.experts import (
    MIXTURE,
    PLAIN,
    STACKS,
    ExpertStack,
    GgmlExperts,
    use_loop,
)
from pipespec.engine.low_bit.kept_linear import (
    DequantisedLinear,
    GgmlEmbedding,
    GgmlLinear,
    Int4Linear,
    KeptLinear,
)
from pipespec.errors import ModelError
from pipespec.system import heap
from pipespec.system.liveness import progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GgmlLayer = GgmlLinear | GgmlEmbedding | GgmlExperts
# The matrix of an expert in the files: its layer, its number and name; or the name of the stack of
# all experts of a layer, as gpt-oss has them, and its number.
_EXPERT = re.compile(r"(?:^|\.)layers\.(\d+)\..*\bexperts\.(?:(\d+)\.(\w+)|(\w+)\.(\d+))$")
# The allowed error of a product, relative to its largest number.
TOLERANCE = 0.02
# A row must be the same in batches of these sizes.
TEST_BATCH_SIZES = (1, 2, 3, 8, 17, 64)
# After so many weights the memory in which they were unpacked is given back.
RELEASED = 8 << 20


def with_ggml(device: torch.device) -> bool:
    return device.type == "cpu" and ggml.load() is not None


class LayerMaker:
    """Makes the layers of matrices of these kinds (`KeptMatrix`), by their names in the files, in a
    model of this type."""

    def __init__(self, kinds: Mapping[str, str], device: torch.device, dtype: torch.dtype):
        self._kinds, self._device, self._dtype = kinds, device, dtype

    def layer(self, name: str, out: int, inputs: int, bias: Any = None) -> nn.Module:
        """A layer without weights for the matrix of this name, with so many rows and columns."""
        kind = self._kinds[name]
        if self._by_ggml(kind):
            return GgmlLinear(name, out, inputs, bias)
        if self._device.type != "cpu" and self._dtype == torch.bfloat16 and is_int4(kind, out):
            return Int4Linear(name, out, inputs, bias)
        return DequantisedLinear(name, out, inputs, bias)

    def experts(self, names: Sequence[Sequence[str]], out: int, inputs: int) -> nn.Module:
        """The same for all experts of a layer, of the names of the matrices of each."""
        kinds = [{self._kinds[name] for name in same} for same in zip(*names, strict=True)]
        if self._by_ggml(self._kinds[names[0][0]]) and all(len(each) == 1 for each in kinds):
            return GgmlExperts(names, out, inputs)
        return ExpertStack([self.layer(name, out, inputs) for name in each] for each in names)

    def _by_ggml(self, kind: str) -> bool:
        return kind in ggml.TYPES and with_ggml(self._device)


def replace(
    model: nn.Module, parts: Mapping[str, Part], *, names: Collection[str], make: LayerMaker
) -> None:
    """Let `make` make the layers of the matrices with these names in the files, where the model has
    them.

    `parts`: of the parameters of which the model has no more; those without rows or columns stay as
    they are. Raises ModelError."""
    for name in names:
        parent, _, child = name.rpartition(".")
        try:
            plain = model.get_submodule(name)
        except AttributeError:  # belongs to another slice
            continue
        if isinstance(plain, nn.Linear) and plain.weight.numel():
            kept = make.layer(name, plain.out_features, plain.in_features, plain.bias)
            kept.part = parts.get(f"{name}.weight", WHOLE)  # type: ignore[assignment]
            setattr(model.get_submodule(parent), child, kept)
        elif GgmlEmbedding.can_replace(plain):
            setattr(model.get_submodule(parent), child, GgmlEmbedding(name, plain))
            _untie(model, name)
    _replace_experts(model, names, make, parts)


def _replace_experts(
    model: nn.Module, names: Iterable[str], make: LayerMaker, parts: Mapping[str, Part]
) -> None:
    """The same for the experts of mixtures. A stack of which none is named stays as it is. Raises
    ModelError if a mixture is of another form."""
    by_layer: dict[int, dict[tuple[int, str], str]] = {}
    for name in names:
        if (found := _EXPERT.search(name)) is not None:
            expert = int(found[2] or found[5]), found[3] or found[4]
            by_layer.setdefault(int(found[1]), {})[expert] = name
    for path, module in list(model.named_modules()):
        if (found := MIXTURE.search(path)) is not None and int(found[1]) in by_layer:
            _replace_stacks(module, by_layer[int(found[1])], path, make, parts)


def _replace_stacks(
    module: nn.Module,
    held: Mapping[tuple[int, str], str],
    path: str,
    make: LayerMaker,
    parts: Mapping[str, Part],
) -> None:
    transposed = getattr(module, "is_transposed", False)
    for stack, plain_parts in STACKS.items():
        # The files have a transposed stack too.
        of_parts: Sequence[Sequence[str]] = ((stack,),) if transposed else plain_parts
        if not any((0, name) in held for names in of_parts for name in names):
            continue
        plain = getattr(module, stack, None)
        has_bias = getattr(module, "has_bias", False) and not transposed
        if not isinstance(plain, Tensor) or plain.ndim != 3 or has_bias:
            raise ModelError(f"the experts {path} have no place for packed matrices; {PLAIN}")
        if not plain.numel():
            continue
        count, *sizes = plain.shape
        out, inputs = reversed(sizes) if transposed else sizes
        delattr(module, stack)
        sources = [
            [held[expert, _name(held, expert, names, path)] for names in of_parts]
            for expert in range(count)
        ]
        found = make.experts(sources, out // len(of_parts), inputs)
        for layer in found.modules():
            layer.part = parts.get(f"{path}.{stack}", WHOLE)  # type: ignore[assignment]
        setattr(module, stack, found)
    use_loop(module)


def _name(held: Mapping[tuple[int, str], str], expert: int, names: Sequence[str], path: str) -> str:
    for name in names:
        if (expert, name) in held:
            return name
    raise ModelError(f"{path}.{expert} has no packed {names[0]}; {PLAIN}")


def _untie(model: Any, embedding: str) -> None:
    """Let the output head, if it is tied, have the weights of this embedding as a layer of its
    own."""
    head = model.get_output_embeddings()
    if model.config.tie_word_embeddings and isinstance(head, nn.Linear):
        own = GgmlLinear(embedding, head.out_features, head.in_features, head.bias)
        model.set_output_embeddings(own)
    model.all_tied_weights_keys = {}


def fill(
    model: PreTrainedModel, weights: Mapping[str, KeptMatrix], device: torch.device, form: str
) -> None:
    """Read the weights of the layers that `replace` made, and test the first of each shape. Raises
    ModelError."""
    tested, unpacked = set(), 0
    heap.release()

    def fill_one(module: Any) -> Any:
        read: Any
        if isinstance(module, GgmlExperts):
            read = [[weights[name].read(module.part) for name in each] for each in module.sources]
        else:
            read = weights[module.source].read(module.part)
        try:
            module.fill(read, device)
        except ModelError as error:
            raise ModelError(
                f"{module.source} cannot stay in {KEPT_FORMATS[form]}: {error}; {PLAIN}"
            ) from error
        progress.load(module.num_bytes)
        return read

    by_ggml = [each for each in model.modules() if isinstance(each, GgmlLayer)]
    with ThreadPoolExecutor(compute.num_threads()) as threads:
        list(threads.map(fill_one, by_ggml))  # its products of each type have been tested
    for module in model.modules():
        if isinstance(module, GgmlLayer) or not isinstance(module, KeptLinear):
            continue
        read = fill_one(module)
        form_of = weights[module.source].kind
        shape = (type(module), form_of, module.out_features, module.in_features)
        if shape not in tested:
            heap.release()  # what `fill` has freed
            wrong = self_test_error(module, read, device, model.dtype)
            if wrong is not None:
                raise ModelError(
                    f"the product for weights in {KEPT_FORMATS[form]} failed its self-test on "
                    f"{device}: in {module.source}, {wrong}; {PLAIN}"
                )
            tested.add(shape)
            unpacked = RELEASED
        unpacked += module.out_features * module.in_features
        if unpacked > RELEASED:
            unpacked = 0
            heap.release()
    heap.release()


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights of a model; those of a tied head count once."""
    found: dict[int | str, int] = {}

    def add(tensor: Any) -> None:
        if is_traceable_wrapper_subclass(tensor):  # torchao's: values and scales
            for name in tensor.__tensor_flatten__()[0]:
                add(getattr(tensor, name))
        else:
            found[tensor.data_ptr()] = tensor.nbytes

    for tensor in model.state_dict().values():
        add(tensor)
    layers = (each for each in model.modules() if isinstance(each, KeptLinear | GgmlLayer))
    return sum((found | {each.source: each.num_bytes for each in layers}).values())


def self_test_error(
    layer: KeptLinear, weights: Any, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why the products of a layer on this device are wrong, as a clause; None: they are right."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(max(TEST_BATCH_SIZES), layer.in_features, generator=generator)
    rows = rows.to(device, dtype)
    with torch.inference_mode():
        whole = layer.product(rows)  # without the bias, and the collectives of members
        if not whole.isfinite().all():
            return "its products are not finite"
        for size in TEST_BATCH_SIZES:
            if not torch.equal(layer.product(rows[:size]), whole[:size]):
                return f"a row differs in a batch of {size}"
        heap.release()  # what the products have freed
        exact, expected = rows.float(), torch.empty_like(whole, dtype=torch.float32)
        for some in row_parts(weights.shape, 1):
            expected[:, some] = exact @ weights.part(some).dense().float().T.to(device)
    off = float((whole.float() - expected).abs().max() / expected.abs().max())
    return None if off <= TOLERANCE else f"its error is {off:.3f} of the largest number"
