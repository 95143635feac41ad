"""A contiguous slice of the layers of a Hugging Face causal language model.

There is no model code of our own: a slice is the model's own class without the modules of other
slices. Transformers reads exactly the tensors that remain, converts, fuses, casts and quantises
them as it does for the whole model, and runs its own forward pass. Only attention is ours:
Transformers calls a registered function, which calls a backend with the layer's KV pool
(`pipespec.engine.attention`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pipespec.engine.attention import hook, select
from pipespec.engine.attention.attention_plan import AttentionBackend, AttentionPlan, causal_plan
from pipespec.engine.attention.self_test import AttentionLayer
from pipespec.engine.attention.variants import chunk_of
from pipespec.engine.checkpoint.building import lock
from pipespec.engine.formats.architectures import num_layers_of, require_supported
from pipespec.engine.formats.quantization import GGML_FORMATS, KEPT_FORMATS
from pipespec.engine.graphs.compiling import Compute, compile_slice
from pipespec.engine.graphs.ggml_graph import SliceGraph, make_slice_graph
from pipespec.engine.graphs.graphs import CaptureFunction, capture_cuda_graph
from pipespec.engine.graphs.slice_graphs import SliceGraphs
from pipespec.engine.low_bit import cpu_products
from pipespec.engine.low_bit.expert_counts import ExpertCounts
from pipespec.engine.low_bit.expert_stack import make_experts_batch_invariant
from pipespec.engine.low_bit.kept_weights import held_bytes
from pipespec.engine.low_bit.row_blocks import make_batch_invariant
from pipespec.engine.precision import KV_PLAIN
from pipespec.engine.recurrence.recurrent_layers import RecurrentLayers
from pipespec.engine.slice import loading
from pipespec.engine.slice.slicing import (
    ComputedBase,
    drop_placeholders,
    sliced_class,
)
from pipespec.engine.tensor_parallel.tensor_parallel import (
    TPGroup,
    TPPlan,
    gather_best,
    gather_columns,
)
from pipespec.errors import ModelError
from pipespec.system.device_copy import to_device
from pipespec.system.liveness import StepTimes
from pipespec.system.silence_warnings import silence_warnings

with silence_warnings():
    from transformers import PretrainedConfig, PreTrainedModel


class Driver(Protocol):
    """Lets the other members of a group compute what this one computes."""

    def __call__(self, inputs: Tensor, plan: AttentionPlan) -> None:
        """A batch, before it is computed."""
        ...

    def logits(self, hidden: Tensor) -> None:
        """Hidden states, before their logits are computed."""
        ...

    def best_tokens(self, hidden: Tensor) -> None:
        """Hidden states, before the tokens with the largest logits are."""
        ...


class ModelSlice:
    """Layers `layers` of a checkpoint, with a KV pool of `num_slots` token slots per layer.

    The slice with layer 0 takes token ids; the one with the last layer returns hidden states
    after the final norm and has `logits`. Slices share no state; each belongs to one thread.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: range,
        num_slots: int,
        attention: AttentionBackend | str,
        *,
        batch_invariant: bool = False,
        group: TPGroup | None = None,
        tp_plan: TPPlan | None = None,
        kv_dtype: str = KV_PLAIN,
    ):
        """Wrap a model that `loading.load` returned, and of a member of a group how it is divided.

        `batch_invariant`: on a CPU, make the result of a row independent of its batch, also in
        bfloat16. `kv_dtype`: one of KV_DTYPES; K and V in 8 bits are read by SDPA alone."""
        config = model.config
        self.layers = layers
        self.num_layers: int = num_layers_of(config)  # of the whole model
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.num_slots = num_slots
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._model = model
        self._base = model.base_model
        drop_placeholders(model, layers)
        self.num_weight_bytes = _num_bytes(model.state_dict().values()) + held_bytes(model)
        # From now on the model's own forward pass computes the output head only.
        setattr(model, model.base_model_prefix, ComputedBase(self._base))
        given = None if isinstance(attention, str) else attention
        self._any_attention = attention == select.AUTO
        # SDPA needs no self-test, so it is used until the first row has allocated the pools.
        self._slice = hook.SliceBackend(
            given or select.make_backend(select.SDPA, self.device, num_slots)
        )
        kv_heads = None
        if group is not None and tp_plan is not None and tp_plan.heads is not None:
            kv_heads = tp_plan.heads[group.rank].selected
        self._attentions = [
            state
            for index, layer in enumerate(self._base.layers)
            for state in hook.attach(
                layer,
                self._slice,
                num_slots,
                chunk=chunk_of(config, index),
                kv_heads=kv_heads,
                kv_dtype=kv_dtype,
            )
        ]
        self.recurrent = RecurrentLayers(self._base.layers, num_slots)
        self.batch_invariant = batch_invariant and self.device.type == "cpu"
        if self.batch_invariant:
            make_batch_invariant(nn.ModuleList((self._base, model)))
            make_experts_batch_invariant(self._base)
        self.experts = ExpertCounts(self._base)
        self.graphs = SliceGraphs()
        self._compiled: Compute | None = None
        self._steps = StepTimes()
        self.group, self._tp_plan = group, tp_plan
        self._driver: Driver | None = None
        self._whole: SliceGraph | None = None
        self._allocate()
        # The name of the backend, and a sentence for each optimisation that is not used.
        self.attention, self.refused = "given", list[str]()
        self.products = cpu_products.USUAL
        if isinstance(attention, str):
            with torch.inference_mode():
                self.attention, self._slice.attention, self.refused = select.select_backend(
                    attention,
                    self.device,
                    num_slots,
                    self.attention_layers,
                    batch_invariant=self.batch_invariant,
                )

    @classmethod
    def load(
        cls,
        path: str | Path,
        layers: range,
        *,
        dtype: torch.dtype | None = None,
        quantization: str | None = None,
        device: torch.device | str = "cpu",
        num_slots: int,
        attention: AttentionBackend | str = select.AUTO,
        progress: bool = False,
        group: TPGroup | None = None,
        kv_dtype: str = KV_PLAIN,
    ) -> ModelSlice:
        """Load `layers` of the checkpoint `path` and allocate their KV pools.

        Args:
            dtype: of the weights; None: that of the checkpoint.
            quantization: one of QUANTIZATIONS, for plain weights, or KEPT_FORMATS, for weights
                that are stored so.
            attention: the name of a backend, or a backend for this slice, without self-test.
            progress: show the progress bar of Transformers.
            group: load this member's shard of the slice. Each `forward` then needs all members.
            kv_dtype: one of KV_DTYPES, with `attention` "auto" or "sdpa".

        Raises:
            ModelError: the architecture is not supported or cannot be divided among the members,
                tensors are missing or have another shape, or the quantised checkpoint does not
                support `dtype`.
        """
        model, tp_plan = loading.load(
            Path(path),
            layers,
            dtype=dtype,
            quantization=quantization,
            device=torch.device(device),
            progress=progress,
            group=group,
        )
        batch_invariant = quantization in KEPT_FORMATS
        made = cls(
            model,
            layers,
            num_slots,
            attention,
            batch_invariant=batch_invariant,
            group=group,
            tp_plan=tp_plan,
            kv_dtype=kv_dtype,
        )
        if attention == select.AUTO and quantization in GGML_FORMATS:
            made.use_ggml()
        return made

    @classmethod
    def random(
        cls,
        config: PretrainedConfig,
        layers: range,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_slots: int,
        attention: AttentionBackend | str = select.AUTO,
    ) -> ModelSlice:
        """A slice of a model with this `config` and random weights, for measurements.

        All layers of `config` are created first, also those outside of `layers`.
        """
        with lock, torch.device(device):
            require_supported(config.model_type, "the model")
            hook.register()
            model = sliced_class(config, layers)._from_config(
                deepcopy(config), dtype=dtype, attn_implementation=hook.NAME
            )
        return cls(model.eval(), layers, num_slots, attention)

    def use_ggml(self) -> None:
        """Compute all layers as one graph of ggml, if they are of its pattern; no KV slot may be in
        use."""
        if self.device.type != "cpu" or self.dtype != torch.float32 or self.group is not None:
            return
        self._whole, refused = make_slice_graph(self, self._base, self._attentions)
        if self._whole is not None:
            self.attention = "ggml"
        elif refused:
            self.refused.append(refused)

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.num_layers

    @property
    def backend(self) -> AttentionBackend:
        """The attention backend of its layers."""
        return self._slice.attention

    def set_driver(self, call: Driver | None) -> None:
        """Call this with every batch and before logits from now on; None: stop."""
        self._driver = call

    def adopt_backend(self, name: str) -> None:
        """Use the backend that the other members of the group use. Raises ModelError if it fails
        its self-test here."""
        if name == self.attention:
            return
        with torch.inference_mode():
            found, backend, refused = select.select_backend(
                name,
                self.device,
                self.num_slots,
                self.attention_layers,
                batch_invariant=self.batch_invariant,
            )
        if found != name:
            raise ModelError(
                f"the devices of a stage must use the same attention, and one of them uses {name}: "
                f"{' '.join(refused)} Set model.attention={found}"
            )
        self.set_backend(name, backend)

    def set_backend(self, name: str, backend: AttentionBackend) -> None:
        """Use another backend from now on, which has passed its self-test; drops all graphs."""
        self.graphs.drop()
        self.attention, self._slice.attention = name, backend

    def describe(self) -> dict[str, Any]:
        """How it computes, as JSON values."""
        return {
            "device": str(self.device),
            "devices": 1 if self.group is None else self.group.size,
            "attention": self.attention,
            "graph_rows": list(self.graph_rows),
            "compiled": self._compiled is not None,
            "products": self.products,
            "refused": self.refused,
        }

    @property
    def graph_rows(self) -> tuple[int, ...]:
        """The numbers of rows of the graphs."""
        return self.graphs.rows

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """The attention of each layer, for self-tests and measurements."""
        return [state.layer for state in self._attentions if state.pool is not None]

    @property
    def num_kv_bytes(self) -> int:
        """Bytes of all KV pools of the slice."""
        return sum(state.pool.num_bytes for state in self._attentions if state.pool is not None)

    @torch.inference_mode()
    def forward(self, inputs: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Run one batch through the layers, storing its K and V at `plan.write`.

        Args:
            inputs: token ids, int64 `[rows]`, on the first slice; else hidden states
                `[rows, hidden]` of the slice before. On any device.
            positions: int64 `[rows]`.

        Returns hidden states `[rows, hidden]`.
        """
        with self._steps.step(len(positions)):
            if self._driver is not None:
                self._driver(inputs, plan)
            if self._whole is not None:
                return self._whole.forward(inputs, plan)
            states = self.recurrent.plan(plan)
            replayed = self.graphs.run(inputs, positions, plan, states)
            if replayed is not None:
                return replayed
            self._slice.attention.prepare(plan)
            self.recurrent.use(states, self.device)
            inputs, positions = (to_device(each, self.device) for each in (inputs, positions))
            if self._compiled is not None:
                return self._compiled(inputs, positions)
            with self.experts.sampled(len(positions)):
                return self.compute(inputs, positions)

    @torch.inference_mode()
    def compile(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compile the slice by torch.compile with this backend, which fuses small operations.

        No KV slot may be in use meanwhile. If it cannot be compiled, or its results differ by more
        than rounding, the slice is computed as before; `refused` says why.
        """
        if self._whole is not None:
            self.refused.append("The slice is not compiled, as ggml computes all of it.")
            return
        if self.recurrent:
            self.refused.append("The slice is not compiled, as some layers keep a running state.")
            return
        if self.group is not None:
            self.refused.append(
                "The slice is not compiled, as compilers cannot handle the communication between "
                "its tensor-parallel members."
            )
            return
        try:
            self._compiled = compile_slice(self, backend)
        except Exception as error:  # noqa: BLE001 - models, compilers and drivers raise anything
            why = " ".join(str(error).split())[:200]
            self.refused.append(f"The slice is not compiled: {why}.")

    def use_fastest_products(self, room: float = math.inf) -> None:
        """On a CPU, compute linear layers in the way that is fastest here for few rows
        (`pipespec.engine.low_bit.cpu_products`), where rows may depend on their batch by rounding.

        `room`: bytes that other copies of the weights may take, beside those of all KV pools.
        """
        if self.device.type != "cpu" or self.batch_invariant:
            return
        whole = nn.ModuleList((self._base, self._model))
        self.products = cpu_products.use_fastest(whole, room - self.num_kv_bytes)
        if self.products == cpu_products.GGML and self._any_attention:
            self.use_ggml()

    def _computed(self, inputs: Tensor, positions: Tensor) -> Tensor:
        return (self._compiled or self.compute)(inputs, positions)

    @torch.inference_mode()
    def capture_graphs(
        self, buckets: Sequence[int], capture: CaptureFunction = capture_cuda_graph
    ) -> None:
        """Capture a graph for each number of rows in `buckets`, and replay them from now on.

        No KV slot may be in use meanwhile, and all members of a group capture at the same time.
        What cannot be captured, or gives other results, is computed as before; `refused` says why.
        """
        if self.group is not None and not self.group.supports_graphs:
            self.graphs.drop()
            self.refused.append(
                "The slice is computed without graphs, as the host adds up the results of its "
                "tensor-parallel members."
            )
            return
        self.refused += self.graphs.capture_layers(
            self._computed,
            [self.example_batch(rows)[0] for rows in sorted(buckets)],
            self._slice.attention,
            self.attention,
            self.recurrent,
            self.least_of_group(self.num_slots),
            capture,
            lambda well: self.least_of_group(well) == 1,
        )

    def least_of_group(self, mine: int) -> int:
        """The least of what the members that compute the slice together say. Raises RankFailed."""
        if self.group is None:
            return mine
        return min(int(each) for each in self.group.gather(torch.tensor([int(mine)])))

    @torch.inference_mode()
    def capture_head(
        self, buckets: Sequence[int], capture: CaptureFunction = capture_cuda_graph
    ) -> None:
        """The same for the output head of the last slice, or this member's part of it, whatever its
        attention; no other member takes part."""
        if self.is_last:
            examples = [self._random_hidden(rows) for rows in sorted(buckets)]
            self.refused += self.graphs.capture_heads(self._head, examples, capture)

    def example_batch(self, rows: int, context: int = 0) -> tuple[Tensor, Tensor, AttentionPlan]:
        """A random batch behind a text of so many tokens, which was never computed: inputs,
        positions, plan."""
        inputs = self._random_hidden(rows)
        if self.is_first:
            inputs = torch.randint(self.vocab_size, (rows,), device=self.device)
        slots = np.arange(context + rows)
        plan = causal_plan(slots[:context], slots[context:], imagined=context > 0)
        return inputs, torch.from_numpy(plan.positions).to(self.device), plan

    def compute(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """The part of `forward` that can be compiled or captured; the backend has the plan."""
        output = self._base(
            **{"input_ids" if self.is_first else "inputs_embeds": inputs.unsqueeze(0)},
            position_ids=positions.unsqueeze(0),
            use_cache=False,
        )
        return output.last_hidden_state.squeeze(0)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """`[k, hidden]` as the last slice's `forward` returned it -> `[k, vocab]`.

        A group needs all members for it, of which each computes those of a part of the vocabulary.
        """
        if self._driver is not None:
            self._driver.logits(hidden)
        found = self._own_logits(hidden)
        if self.group is None or self._tp_plan is None:
            return found
        return gather_columns(self.group, found, self._tp_plan.vocabulary)

    @torch.inference_mode()
    def best_tokens(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The largest of the `logits` of each row, and its token: `[k]` each, NaN if a logit is.

        The members of a group exchange no more than these.
        """
        if self._driver is not None:
            self._driver.best_tokens(hidden)
        found = self._own_logits(hidden)
        if self.group is None or self._tp_plan is None:
            best = found.max(-1)
            return best.values, best.indices
        return gather_best(self.group, found, self._tp_plan.vocabulary)

    def _own_logits(self, hidden: Tensor) -> Tensor:
        """The logits of this member's part of the vocabulary."""
        assert self.is_last, "only the last slice has a head"
        replayed = self.graphs.logits(hidden)
        return self._head(hidden) if replayed is None else replayed

    def _head(self, hidden: Tensor) -> Tensor:
        return self._model(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits.squeeze(0)

    def _random_hidden(self, rows: int) -> Tensor:
        return torch.randn(rows, self.hidden_size, device=self.device).to(self.dtype)

    def _allocate(self) -> None:
        """Run one row, so that every layer allocates its pool: too little memory shows at load."""
        position = torch.zeros(1, dtype=torch.long)
        row = position
        if not self.is_first:
            row = torch.zeros(1, self.hidden_size, dtype=self.dtype)
        slot = np.zeros(1, np.int64)
        self.forward(row, position, causal_plan(slot[:0], slot))


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors, counted by address, as a tied head appears twice."""
    found: dict[int, int] = {}

    def add(tensor: Any) -> None:
        if is_traceable_wrapper_subclass(tensor):  # torchao's: values and scales
            for name in tensor.__tensor_flatten__()[0]:
                add(getattr(tensor, name))
        else:
            found[tensor.data_ptr()] = tensor.nbytes

    for tensor in tensors:
        add(tensor)
    return sum(found.values())
