"""A whole slice of decoder layers as one graph of ggml. Above 350 lines, as the graph is read with
the constants that it is made of.

Transformers' forward pass takes a millisecond of Python a layer, which on a CPU is as long as the
products of a small model. Layers of the pattern

    x = x + output(attention(query, key, value of norm(x)))
    x = x + down(activation(gate(norm(x))) * up(norm(x)))

with RMS norms and rotary positions need none of it. A slice is recognised by its modules, and its
graph is used only if its parts compute the same as Transformers' modules, for rows of a prompt and
of an answer. The KV pools stay those of the slice. A row attends to its own keys in the order of
their positions, one after the other, so its result does not depend on the other rows of its batch,
to the bit. Rows of prompts are computed many at a time, in graphs of their own, so theirs does not
either.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipespec.engine.attention.attention_plan import AttentionPlan, Segment
from pipespec.engine.attention.hook import AttentionState
from pipespec.engine.ggml import compute, library
from pipespec.engine.ggml.compute import WIDE, Computer, empty, matrix, place
from pipespec.engine.ggml.library import I32, I64, TYPES, Library
from pipespec.engine.low_bit.kept_linear import GgmlEmbedding, GgmlLinear

F32, F16 = TYPES["F32"], TYPES["F16"]
# ggml's numbers of the two ways to rotate: neighbours, or one half with the other.
_NEIGHBOURS, _HALVES = 0, 2
# Bytes of the graphs that are kept, of the numbers of rows and keys that were used last, unless one
# has more. To make one takes a tenth of a millisecond a layer.
KEPT_BYTES = 64 << 20
# Layers with fewer bytes of weights are computed by one thread: another would wait for the first
# one after each operation for longer than it computes.
LEAST_SHARED = 16 << 20
# Keys of a graph are a multiple of this, so that decoding uses each for some steps.
KEYS = 64
# Keys are read in place if they are spread over at most so many times as many slots. To gather one
# takes as long as to pass by eight.
SPREAD = 4
FLOAT = 4  # bytes
# Rows of a prompt that are computed together; ggml's attention has tiles from 64 rows on.
MOST_WIDE = 56
# Tensors and operations for a layer, and beside the layers.
_OF_LAYER, _BESIDE = 64, 64
_LAYER_NORMS = {"input_layernorm", "post_attention_layernorm"}
_LAYER = {"self_attn", "mlp", *_LAYER_NORMS}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
# Matrices whose rows may be in the order of another rotation.
_TURNED = {"q_proj", "k_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_ACTIVATIONS = ("SiLUActivation", "SiLU")


@dataclass(frozen=True)
class _Product:
    """A matrix and its bias, in the order of the file's rows."""

    weights: compute.Matrix
    bias: compute.GgmlTensor | None


@dataclass(frozen=True)
class _Norm:
    weight: compute.GgmlTensor
    epsilon: float


@dataclass(frozen=True)
class _Layer:
    """The constants of a layer, by the names of its modules, and its pools
    `[slots, kv_heads * dim]`."""

    products: dict[str, _Product]
    norms: dict[str, _Norm | None]
    keys: compute.GgmlTensor
    values: compute.GgmlTensor
    heads: int
    kv_heads: int
    dim: int
    rotation: int
    scaling: float


# Rows, keys, where these begin in the pools, whether the rows are of a prompt, and who computes.
_Shape = tuple[int, int, int | None, bool, Computer]


@dataclass(eq=False)
class _Planned:
    """A graph for so many rows and keys, with the memory of its inputs, and of its outputs: hidden
    states and those of tapped layers. `read`: the slots of keys that are gathered."""

    graph: int
    inputs: np.ndarray
    positions: np.ndarray
    write: np.ndarray
    read: np.ndarray | None
    mask: np.ndarray
    outputs: list[np.ndarray]
    held: list[Any]
    num_bytes: int


# Rows of the batch that tests ggml's graph, and the largest difference from what a layer of
# Transformers adds to its rows, relative to its length: both round rows to 8 bits in every product,
# one of another row by rounding errors. Behind one another layers would make that larger.
GGML_ROWS, GGML_TOLERANCE = 5, 0.02


class NotOfThePattern(Exception):
    """The modules of a slice are not those that a graph can be made of."""


class SliceGraph:
    """The layers of a slice as graphs of ggml, one for each number of rows and keys."""

    def __init__(self, model: Any, base: nn.Module, attentions: Sequence[AttentionState]):
        """Of a `ModelSlice` with these modules. Raises NotOfThePattern."""
        found = library.load()
        assert found is not None, "callers have looked whether there is ggml"
        self._library: Library = found
        self._hidden_size = model.hidden_size
        rotary = getattr(base, "rotary_emb", None)
        frequencies = getattr(rotary, "inv_freq", None)
        _require(isinstance(frequencies, Tensor) and frequencies.ndim == 1)
        assert isinstance(frequencies, Tensor)
        _require(getattr(rotary, "rope_type", None) in ("default", "linear", "llama3", "yarn"))
        # ggml divides the position by these numbers, and multiplies it with powers of 1.
        self._divisors = self._constant(1 / frequencies.float())
        self._rotated = 2 * len(frequencies)
        self._magnitude = float(getattr(rotary, "attention_scaling", 1.0))
        layers: Any = base.layers
        _require(len(attentions) == len(layers))
        pairs = zip(layers, attentions, strict=True)
        self._layers = [self._layer(*each) for each in pairs]
        self._embedding: compute.GgmlTensor | None = None
        if model.is_first:
            table = getattr(base, "embed_tokens", None)
            if isinstance(table, GgmlEmbedding) and table.scale == 1.0:
                self._embedding = table.weights
            else:
                _require(type(table) is nn.Embedding)
                self._embedding = self._plain(table)
        self._norm = self._norm_of(getattr(base, "norm", None)) if model.is_last else None
        self._taps = [layer - model.layers.start for layer in model.taps]
        of_products = [product for layer in self._layers for product in layer.products.values()]
        num_bytes = sum(product.weights.num_bytes for product in of_products)
        self._threads = 1 if num_bytes < LEAST_SHARED else None
        self._slots = self._layers[0].keys.shape[0]
        self._planned: OrderedDict[_Shape, _Planned] = OrderedDict()

    # --- the constants --------------------------------------------------------------------------

    def _constant(self, numbers: Tensor) -> compute.GgmlTensor:
        memory = empty(numbers.numel())
        memory[:] = numbers.detach().float().numpy()
        return compute.GgmlTensor(self._library, F32, memory.shape, memory, 0)

    def _plain(self, module: Any) -> compute.GgmlTensor:
        _require(hasattr(module, "weight"))
        weight = module.weight.detach()
        _require(type(weight) is Tensor and weight.dtype == torch.float32)  # torchao has subclasses
        return matrix(self._library, "F32", weight.numpy(), tuple(weight.shape))

    def _product(self, module: Any) -> tuple[_Product, Tensor | None]:
        """The matrix of a linear layer, and the order of its rows."""
        order = None
        if type(module) is GgmlLinear:
            weights, order = module.weights, module.order
        else:
            _require(isinstance(module, nn.Linear))
            weights = self._plain(module)
        bias = module.bias
        if bias is not None and order is not None:
            stored = torch.empty_like(bias)
            stored[order] = bias
            bias = stored
        return _Product(weights, None if bias is None else self._constant(bias)), order

    def _norm_of(self, module: Any) -> _Norm:
        _require(type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"))
        return _Norm(self._constant(module.weight), float(module.variance_epsilon))

    def _layer(self, module: Any, state: AttentionState) -> _Layer:
        _require(_children(module) == _LAYER)
        attention, mlp, own = module.self_attn, module.mlp, state.layer
        assert own is not None
        options, pool = own.options, own.pool
        _require(_children(attention) - _HEAD_NORMS == _ATTENTION)
        _require(_children(mlp) - {"act_fn"} == _MLP)
        _require(type(mlp.act_fn).__name__ in _ACTIVATIONS)
        special = (options.window, options.softcap, options.sinks, options.chunk)
        _require(all(each is None for each in (*special, state.temperature)))
        _require(pool.keys.dtype == pool.values.dtype == torch.float32)
        slots, kv_heads, dim = pool.keys.shape
        _require(pool.values.shape == pool.keys.shape)
        modules = dict([*attention.named_children(), *mlp.named_children()])
        found = {name: self._product(modules[name]) for name in (*_ATTENTION, *_MLP)}
        turned = found["q_proj"][1]
        _require(all(order is None or name in _TURNED for name, (_, order) in found.items()))
        norms: dict[str, _Norm | None] = {
            name: self._norm_of(modules[name]) if name in modules else None for name in _HEAD_NORMS
        }
        _require(all(each is None or each.weight.shape == (dim,) for each in norms.values()))
        _require(turned is None or not any(norms.values()))
        norms |= {name: self._norm_of(getattr(module, name)) for name in _LAYER_NORMS}
        keys, values = (
            compute.GgmlTensor(
                self._library, F32, (slots, kv_heads * dim), each.view(slots, -1).numpy(), 0
            )
            for each in (pool.keys, pool.values)
        )
        return _Layer(
            products={name: product for name, (product, _) in found.items()},
            norms=norms,
            keys=keys,
            values=values,
            heads=own.heads,
            kv_heads=kv_heads,
            dim=dim,
            rotation=_HALVES if turned is None else _NEIGHBOURS,
            scaling=options.scaling,
        )

    # --- computing ------------------------------------------------------------------------------

    def part(self, start: int, stop: int) -> SliceGraph:
        """Some of the layers; with none, the embedding before the first or the norm behind the
        last."""
        part = copy(self)
        part._layers, part._planned = self._layers[start:stop], OrderedDict()
        part._taps = []
        part._embedding = self._embedding if stop == 0 else None
        part._norm = self._norm if start == len(self._layers) else None
        return part

    def forward(self, inputs: Tensor, plan: AttentionPlan) -> Tensor:
        """See `ModelSlice.forward`."""
        given = inputs.numpy()
        output = empty(len(plan.write), self._hidden_size * (1 + len(self._taps)))
        for wide in (True, False):  # prompts first, as later rows of their batch see them
            for segments in _passes(plan, wide=wide):
                rows = np.concatenate([np.arange(own.start, own.stop) for own, _ in segments])
                output[rows] = self._computed(given[rows], plan, rows, segments, wide)
        return torch.from_numpy(output)

    def _computed(
        self,
        inputs: np.ndarray,
        plan: AttentionPlan,
        rows: np.ndarray,
        segments: Sequence[tuple[slice, Segment]],
        wide: bool,
    ) -> np.ndarray:
        """The result of these rows of a batch, those that its segments have in these slices."""
        computer = compute.computer(self._threads)
        seen = _seen(segments)
        start, keys = self._range(seen)
        count = len(rows)
        padding = -count % WIDE if wide else 0
        planned = self._graph(computer, count + padding, keys, start, wide)
        for memory, values in (
            (planned.inputs, inputs),
            (planned.positions, plan.positions[rows]),
            (planned.write, plan.write[rows]),
        ):
            memory[:count] = values
            memory[count:] = values[-1]  # the last row once more
        if planned.read is not None:
            slots = np.concatenate([each.slots for each in seen])
            planned.read[: len(slots)] = slots
            planned.read[len(slots) :] = 0
        planned.mask.fill(-np.inf)
        first = 0
        for each in seen:
            num_keys, mask = len(each.slots), planned.mask[each.rows]
            shared = num_keys - each.mask.shape[1]
            at = first if start is None else int(each.slots[0]) - start
            if start is None or each.slots[-1] - each.slots[0] < num_keys:
                mask[:, at : at + shared] = 0
                mask[:, at + shared : at + num_keys][each.mask] = 0
            else:  # between them are slots of others
                columns = each.slots - start
                mask[:, columns[:shared]] = 0
                row, key = each.mask.nonzero()
                mask[row, columns[shared + key]] = 0
            first += num_keys
        planned.mask[count:] = planned.mask[count - 1]
        computer.compute(planned.graph, wide=wide)
        hidden, *tapped = (each[:count] for each in planned.outputs)
        return np.concatenate((hidden, *tapped), 1) if tapped else hidden

    def _range(self, seen: Sequence[_Seen]) -> tuple[int | None, int]:
        """Where the keys of a batch begin in the pools and how many slots they take there, if each
        row's rise with their positions and so can be read in place, with the others masked; else
        None, and how many are gathered."""
        count = sum(len(each.slots) for each in seen)
        if all((each.slots[1:] > each.slots[:-1]).all() for each in seen):
            first = min(int(each.slots[0]) for each in seen)
            last = max(int(each.slots[-1]) for each in seen)
            start = first - first % KEYS
            length = -(-(last + 1 - start) // KEYS) * KEYS
            start = min(start, self._slots - length)
            if start >= 0 and length <= SPREAD * count + KEYS:
                return start, length
        return None, -(-count // KEYS) * KEYS

    def _graph(
        self, computer: Computer, rows: int, keys: int, start: int | None, wide: bool
    ) -> _Planned:
        """The graph for so many rows and keys, from those that are kept or made now."""
        key = (rows, keys, start, wide, computer)
        if (planned := self._planned.get(key)) is not None:
            self._planned.move_to_end(key)
            return planned
        planned = self._planned[key] = self._make(rows, keys, start, wide)
        num_bytes = sum(each.num_bytes for each in self._planned.values())
        while num_bytes > KEPT_BYTES and len(self._planned) > 1:
            num_bytes -= self._planned.popitem(last=False)[1].num_bytes
        return planned

    def _make(self, rows: int, keys: int, start: int | None, wide: bool) -> _Planned:
        lib = self._library
        count = _OF_LAYER * len(self._layers) + _BESIDE
        context = lib.context(count, count)
        held: list[Any] = []

        def given(kind: int, dtype: Any, *shape: int) -> tuple[int, np.ndarray]:
            tensor = compute.GgmlTensor(lib, kind, shape, empty(*shape, dtype=dtype), context)
            lib.set_input(tensor.address)
            held.append(tensor)
            return tensor.address, tensor.memory

        if self._embedding is not None:
            tokens, inputs = given(I32, np.int32, rows)
            x = lib.get_rows(context, self._embedding.address, tokens)
        else:
            x, inputs = given(F32, np.float32, rows, self._hidden_size)
        at, positions = given(I32, np.int32, rows)
        to, write = given(I64, np.int64, rows)
        of, read = given(I32, np.int32, keys) if start is None else (0, None)
        sees, mask = given(F16, np.float16, rows, keys)

        def norm(x: int, how: _Norm | None) -> int:
            if how is None:
                return x
            return lib.mul(context, lib.rms_norm(context, x, how.epsilon), how.weight.address)

        def product(x: int, how: _Product) -> int:
            outputs, inputs = how.weights.shape
            if how.weights.by_row and not wide:
                x = lib.reshape_3d(context, x, inputs, 1, rows)
            y = lib.mul_mat(context, how.weights.address, x)
            y = lib.reshape_2d(context, y, outputs, rows)
            return y if how.bias is None else lib.add(context, y, how.bias.address)

        def rotated(x: int, layer: _Layer, heads: int, how: _Norm | None) -> int:
            x = norm(lib.reshape_3d(context, x, layer.dim, heads, rows), how)
            return lib.rope_ext(
                context, x, at, self._divisors.address, self._rotated, layer.rotation, 0,
                1.0, 1.0, 0.0, self._magnitude, 0.0, 0.0,
            )  # fmt: skip

        def stored(pool: compute.GgmlTensor, x: int, layer: _Layer) -> int:
            """Store K or V, and return those of all keys: `[dim, keys, kv_heads]` of ggml."""
            width = layer.kv_heads * layer.dim
            x = lib.reshape_2d(context, x, width, rows)
            found = lib.set_rows(context, pool.address, x, to)
            shape = layer.dim, layer.kv_heads, keys
            if start is None:
                found = lib.reshape_3d(context, lib.get_rows(context, found, of), *shape)
            else:
                steps = FLOAT * layer.dim, FLOAT * width, FLOAT * width * start
                found = lib.view_3d(context, found, *shape, *steps)
            return lib.permute(context, found, 0, 2, 1, 3)

        tapped: list[int] = []
        for number, layer in enumerate(self._layers):
            by, norms = layer.products, layer.norms
            y = norm(x, norms["input_layernorm"])
            query = rotated(product(y, by["q_proj"]), layer, layer.heads, norms["q_norm"])
            key = rotated(product(y, by["k_proj"]), layer, layer.kv_heads, norms["k_norm"])
            value = product(y, by["v_proj"])
            seen = lib.flash_attn_ext(
                context,
                lib.permute(context, query, 0, 2, 1, 3),
                stored(layer.keys, key, layer),
                stored(layer.values, value, layer),
                sees,
                layer.scaling,
                0.0,
                0.0,
            )
            seen = lib.reshape_2d(context, seen, layer.heads * layer.dim, rows)
            x = lib.add(context, product(seen, by["o_proj"]), x)
            y = norm(x, norms["post_attention_layernorm"])
            y = lib.swiglu_split(context, product(y, by["gate_proj"]), product(y, by["up_proj"]))
            x = lib.add(context, product(y, by["down_proj"]), x)
            if number in self._taps:
                tapped.append(x)
        graph, buffers, outputs = lib.new_graph_custom(context, count, False), [], []
        # Without a final norm the last layer's output may be both.
        hidden = norm(x, self._norm)
        for of in dict.fromkeys((hidden, *tapped)):
            outputs.append(empty(rows, self._hidden_size))
            lib.set_output(of)
            buffers.append(place(lib, of, outputs[-1]))
            lib.build_forward_expand(graph, of)
        if hidden in tapped:
            outputs.append(outputs[0])
        memory = lib.gallocr_new(lib.backend_cpu_buffer_type())
        if not lib.gallocr_alloc_graph(memory, graph):
            _free(lib, buffers, memory, context)
            raise MemoryError("there is no memory for a batch")
        num_bytes = lib.gallocr_get_buffer_size(memory, 0) + mask.nbytes
        num_bytes += sum(each.nbytes for each in outputs) + lib.context_bytes(count, count)
        planned = _Planned(graph, inputs, positions, write, read, mask, outputs, held, num_bytes)
        weakref.finalize(planned, _free, lib, buffers, memory, context)
        return planned


def _free(lib: Library, buffers: Sequence[int], memory: int, context: int) -> None:
    lib.gallocr_free(memory)
    for buffer in buffers:
        lib.backend_buffer_free(buffer)
    lib.free(context)


def _children(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()} if isinstance(module, nn.Module) else set()


def _require(holds: bool) -> None:
    if not holds:
        raise NotOfThePattern


def _passes(plan: AttentionPlan, *, wide: bool) -> Iterator[list[tuple[slice, Segment]]]:
    """What is computed together: segments, and which of their rows; rows of prompts, MOST_WIDE at a
    time, or all others."""
    found: list[tuple[slice, Segment]] = []
    for segment in plan.segments:
        middle = segment.rows.start + segment.num_prompt
        if not wide:
            if middle < segment.rows.stop:
                found.append((slice(middle, segment.rows.stop), segment))
            continue
        for start in range(segment.rows.start, middle, MOST_WIDE):
            yield [(slice(start, min(start + MOST_WIDE, middle)), segment)]
    if found:
        yield found


@dataclass(slots=True, eq=False)
class _Seen:
    """What some rows of a batch see: keys in the order of their positions, of which the last are of
    a tree, and `mask`, bool `[rows, tree keys]`, says who sees these."""

    rows: slice
    slots: np.ndarray
    mask: np.ndarray


def _seen(segments: Sequence[tuple[slice, Segment]]) -> list[_Seen]:
    """Of the given rows of each segment, which follow one another."""
    found, row = [], 0
    for rows, segment in segments:
        order = np.argsort(segment.tree_positions, kind="stable")
        slots = np.concatenate((segment.prefix, segment.tree[order]))
        start, count = rows.start - segment.rows.start, rows.stop - rows.start
        mask = segment.mask[start : start + count, order]
        found.append(_Seen(slice(row, row + count), slots, mask))
        row += count
    return found


def use_ggml(model: Any) -> None:
    """Compute all layers as one graph of ggml, if they are of its pattern."""
    if model.device.type != "cpu" or model.dtype != torch.float32 or model.parallel.size > 1:
        return
    if library.load() is None:
        model.refused.append(library.why_not())
        return
    try:
        graph = SliceGraph(model, model.base, model.attentions)
    except NotOfThePattern:
        return
    off = _largest_difference(graph, model)
    if off <= GGML_TOLERANCE:
        model.of_ggml, model.attention = graph, "ggml"
    else:
        model.refused.append(
            f"ggml computes the layers one by one, as its graph of them is off by {off:.3f}."
        )


def _largest_difference(graph: SliceGraph, model: Any) -> float:
    """How far the parts of a graph are from what Transformers' modules compute of the same rows, of
    a prompt and of an answer, relative to what they change."""
    inputs, positions, plan = model.example_batch(GGML_ROWS)
    layers, count = model.base.layers, len(model.base.layers)
    given: list[Tensor] = []
    hooks = [
        each.register_forward_pre_hook(lambda _, args: given.append(args[0].squeeze(0)))
        for each in (*layers, *([model.base.norm] if model.is_last else []))
    ]
    output = model.forward(inputs, positions, plan)[:, : model.hidden_size]
    for hook in hooks:
        hook.remove()
    # What a part takes, its result, and what that is relative to.
    parts = [
        (graph.part(layer, layer + 1), before, after, after - before)
        for layer, (before, after) in enumerate(pairwise([*given, output][: count + 1]))
    ]
    if model.is_first:
        parts.append((graph.part(0, 0), inputs, given[0], given[0]))
    if model.is_last:
        parts.append((graph.part(count, count), given[-1], output, output))
    answer = replace(plan, segments=[replace(each, num_prompt=0) for each in plan.segments])
    return max(
        float((part.forward(before, each) - after).norm() / change.norm())
        for part, before, after, change in parts
        for each in (plan, answer)
    )
