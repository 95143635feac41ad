"""A contiguous slice of the layers of a Hugging Face causal language model.

There is no model code of our own: a slice is the model's own class without the modules of other
slices, which Transformers loads and runs. Only attention is ours: Transformers calls a registered
function, which calls a backend with the layer's KV pool (`pipespec.engine.attention`)."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipespec.engine.attention import hook, select
from pipespec.engine.attention.attention_plan import AttentionBackend, AttentionPlan, causal_plan
from pipespec.engine.attention.hook import chunk_of
from pipespec.engine.attention.self_test import AttentionLayer
from pipespec.engine.checkpoint.building import lock
from pipespec.engine.formats.architectures import num_layers_of, require_supported
from pipespec.engine.formats.quantization import GGML_FORMATS, KEPT_FORMATS
from pipespec.engine.graphs.ggml_graph import SliceGraph, use_ggml
from pipespec.engine.graphs.graphs import Compute, SliceGraphs
from pipespec.engine.low_bit import cpu_products
from pipespec.engine.low_bit.experts import make_experts_batch_invariant
from pipespec.engine.low_bit.kept_linear import make_batch_invariant
from pipespec.engine.low_bit.kept_weights import weight_bytes
from pipespec.engine.precision import KV_PLAIN
from pipespec.engine.recurrence.recurrent_layers import RecurrentLayers
from pipespec.engine.slice.loading import ComputedBase, drop_placeholders, load, sliced_class
from pipespec.engine.slice.whole_slice import WholeSlice
from pipespec.errors import ModelError
from pipespec.system.device_copy import to_device
from pipespec.system.liveness import StepTimes
from pipespec.system.silence_warnings import silence_warnings

with silence_warnings():
    from transformers import PretrainedConfig, PreTrainedModel


class ModelSlice:
    """Layers `layers` of a checkpoint, with a KV pool of `num_slots` token slots per layer.

    The slice with layer 0 takes token ids; the one with the last layer returns hidden states
    after the final norm and has `logits`. Slices share no state; each belongs to one thread.

    Attributes:
        model, base: the module with the output head, and that with the layers.
        taps: its layers whose outputs are delivered, for a draft head.
        parallel: the devices that compute it together. recurrent: its layers with a running state.
        attention: the name of its backend; `any_attention`: whether it may be any.
        graphs, compiled, of_ggml, products: how it computes (`pipespec.engine.slice.speedups`).
        refused: a sentence for each optimisation that is not used.
        earlier: the layers of a draft head before this one.
    """

    earlier: tuple[Any, ...] = ()

    def __init__(
        self,
        model: PreTrainedModel,
        layers: range,
        num_slots: int,
        attention: str,
        *,
        batch_invariant: bool = False,
        parallel: WholeSlice,
        kv_dtype: str = KV_PLAIN,
        taps: Collection[int] = (),
    ):
        """Wrap a loaded model. `batch_invariant`: on a CPU, make the result of a row independent of
        its batch, also in bfloat16. Others: see `load`."""
        config = model.config
        self.layers, self.num_slots = layers, num_slots
        self.num_layers: int = num_layers_of(config)  # of the whole model
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.model, self.base = model, model.base_model
        drop_placeholders(model, layers)
        self.num_weight_bytes = weight_bytes(model)
        # From now on the model's own forward pass computes the output head only.
        setattr(model, model.base_model_prefix, ComputedBase(self.base))
        self.parallel = parallel
        # SDPA needs no self-test, so it is used until the first row has allocated the pools.
        self.backend = select.make_backend(select.SDPA, self.device, num_slots)
        self.attentions = [
            state
            for index, layer in enumerate(self.base.layers)
            for state in hook.attach(
                layer, self.backend, num_slots, chunk_of(config, index), kv_dtype
            )
        ]
        self.recurrent = RecurrentLayers(self.base.layers, num_slots)
        self.batch_invariant = batch_invariant and self.device.type == "cpu"
        if self.batch_invariant:
            make_batch_invariant(nn.ModuleList((self.base, model)))
            make_experts_batch_invariant(self.base)
        self.taps = [layer for layer in layers if layer in taps]
        self._tapped: list[Tensor] = []
        for layer in self.taps:
            self.base.layers[layer - layers.start].register_forward_hook(self._tap)
        self.graphs = SliceGraphs()
        self.compiled: Compute | None = None
        self.of_ggml: SliceGraph | None = None
        self._steps = StepTimes()
        self.any_attention = attention == select.AUTO
        self.products = cpu_products.USUAL
        # One row lets every layer allocate its pool: too little memory shows at load.
        position, slot = torch.zeros(1, dtype=torch.long), np.zeros(1, np.int64)
        row = position if self.is_first else torch.zeros(1, self.input_size, dtype=self.dtype)
        self.forward(row, position, causal_plan(slot[:0], slot))
        name, backend, self.refused = self._select(attention)
        self.set_backend(name, backend)

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
        attention: str = select.AUTO,
        parallel: WholeSlice | None = None,
        kv_dtype: str = KV_PLAIN,
        context: int | None = None,
        taps: Collection[int] = (),
    ) -> ModelSlice:
        """Load `layers` of the checkpoint `path` and allocate their KV pools.

        Args:
            dtype: of the weights; None: that of the checkpoint.
            quantization: one of QUANTIZATIONS, for plain weights, or KEPT_FORMATS, for weights
                that are stored so.
            attention: the name of a backend.
            parallel: load this device's part of the slice. Each `forward` then needs all devices.
            kv_dtype: one of KV_DTYPES, with `attention` "auto" or "sdpa".
            context: the longest sequence, in tokens, to which rotary frequencies belong that depend
                on it; None: that of the checkpoint.
            taps: layers of the model whose outputs are delivered, as far as they are of these.

        Raises:
            ModelError: the architecture is not supported or cannot be divided among the devices,
                tensors are missing or have another shape, or the quantised checkpoint does not
                support `dtype`.
        """
        parallel, device = parallel or WholeSlice(), torch.device(device)
        model = load(Path(path), layers, dtype, quantization, device, parallel, context)
        kept = quantization in KEPT_FORMATS
        how: dict[str, Any] = {"batch_invariant": kept, "parallel": parallel, "kv_dtype": kv_dtype}
        made = cls(model, layers, num_slots, attention, taps=taps, **how)
        if made.any_attention and quantization in GGML_FORMATS:
            use_ggml(made)
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
        attention: str = select.AUTO,
    ) -> ModelSlice:
        """A slice of a model with this `config` and random weights, for measurements. All layers
        are created first, also those outside of `layers`."""
        with lock, torch.device(device):
            require_supported(config.model_type, "the model")
            hook.register()
            model = sliced_class(config, layers)._from_config(
                deepcopy(config), dtype=dtype, attn_implementation=hook.NAME
            )
        return cls(model.eval(), layers, num_slots, attention, parallel=WholeSlice())

    # --- what it is -----------------------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.num_layers

    @property
    def input_size(self) -> int:
        """Columns of the hidden states that it takes, unless it takes token ids."""
        return self.hidden_size

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """The attention of each layer, for self-tests and measurements."""
        return [state.layer for state in self.attentions if state.layer is not None]

    @property
    def num_kv_bytes(self) -> int:
        return sum(layer.pool.num_bytes for layer in self.attention_layers)

    def describe(self) -> dict[str, Any]:
        """How it computes, as JSON values."""
        return {
            "device": str(self.device),
            "devices": self.parallel.size,
            "attention": self.attention,
            "graph_rows": list(self.graphs.rows),
            "compiled": self.compiled is not None,
            "products": self.products,
            "refused": self.refused,
        }

    # --- computing ------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, inputs: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Run one batch through the layers, storing its K and V at `plan.write`; returns hidden
        states `[rows, hidden]`, and behind them in the same rows the outputs of the layers `taps`.

        `inputs`: on any device, token ids, int64 `[rows]`, on the first slice, else hidden states
        of the slice before. `positions`: int64 `[rows]`."""
        with self._steps.step(len(positions)):
            self.parallel.batch(inputs, plan)
            if self.of_ggml is not None:
                return self.of_ggml.forward(inputs, plan)
            states = self.recurrent.plan(plan)
            replayed = self.graphs.run(inputs, positions, plan, states)
            if replayed is not None:
                return replayed
            self.backend.prepare(plan)
            self.recurrent.use(states, self.device)
            inputs, positions = (to_device(each, self.device) for each in (inputs, positions))
            if self.compiled is not None:
                return self.compiled(inputs, positions)
            return self.compute(inputs, positions)

    def compute(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """The part of `forward` that can be compiled or captured; the backend has the plan."""
        self._tapped.clear()
        output = self.base(
            **{"input_ids" if self.is_first else "inputs_embeds": inputs.unsqueeze(0)},
            position_ids=positions.unsqueeze(0),
            use_cache=False,
        )
        hidden: Tensor = output.last_hidden_state.squeeze(0)
        return torch.cat((hidden, *self._tapped), -1) if self.taps else hidden

    def _tap(self, _: nn.Module, __: object, output: Any) -> None:
        found = output[0] if isinstance(output, tuple) else output
        self._tapped.append(found.squeeze(0))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """`[k, hidden]` as the last slice's `forward` returned it -> `[k, vocab]`. If several
        devices compute the slice, each has a part of the vocabulary."""
        return self.parallel.logits(hidden, self._own_logits)

    @torch.inference_mode()
    def best_tokens(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The largest of the `logits` of each row, and its token: `[k]` each, NaN if a logit is.
        Several devices exchange no more than these."""
        return self.parallel.best_tokens(hidden, self._own_logits)

    def _own_logits(self, hidden: Tensor) -> Tensor:
        """The logits of this device's part of the vocabulary."""
        assert self.is_last, "only the last slice has a head"
        replayed = self.graphs.logits(hidden)
        return self.head(hidden) if replayed is None else replayed

    def head(self, hidden: Tensor) -> Tensor:
        """The part of `logits` that can be captured."""
        return self.model(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits.squeeze(0)

    def example_batch(self, rows: int, context: int = 0) -> tuple[Tensor, Tensor, AttentionPlan]:
        """A random batch behind a text of so many tokens, which was never computed: inputs,
        positions, plan. The same at every start, as what is measured with it decides how all is
        computed."""
        inputs = self.random_hidden(rows, self.input_size)
        if self.is_first:
            same = torch.Generator().manual_seed(0)
            inputs = torch.randint(self.vocab_size, (rows,), generator=same).to(self.device)
        slots = np.arange(context + rows)
        plan = causal_plan(slots[:context], slots[context:], imagined=context > 0)
        return inputs, torch.from_numpy(plan.positions).to(self.device), plan

    def random_hidden(self, rows: int, columns: int | None = None) -> Tensor:
        size = rows, columns or self.hidden_size
        drawn = torch.randn(size, generator=torch.Generator().manual_seed(0))
        return drawn.to(self.device, self.dtype)

    # --- its attention --------------------------------------------------------------------------

    @property
    def reads_in_place(self) -> bool:
        """Whether K and V whose slots rise with positions take less time to read."""
        return self.of_ggml is not None

    @torch.inference_mode()
    def move_kv(self, old: np.ndarray, new: np.ndarray) -> None:
        """Move K and V of all layers from the old slots to the new ones, `[slots]` each."""
        source, target = torch.from_numpy(old), torch.from_numpy(new)
        for layer in self.attention_layers:
            for pool in (layer.pool.keys, layer.pool.values):
                pool[target] = pool[source]

    def set_backend(self, name: str, backend: AttentionBackend) -> None:
        """Use another backend from now on, which has passed its self-test; drops all graphs."""
        self.graphs.drop()
        self.attention, self.backend = name, backend
        for state in self.attentions:
            state.backend = backend

    def adopt_backend(self, name: str) -> None:
        """Use the backend that the other devices use. Raises ModelError if it fails its self-test
        here."""
        if name == self.attention:
            return
        found, backend, refused = self._select(name)
        if found != name:
            raise ModelError(
                f"the devices of a stage must use the same attention, and one of them uses {name}: "
                f"{' '.join(refused)} Set model.attention={found}"
            )
        self.set_backend(name, backend)

    @torch.inference_mode()
    def _select(self, name: str) -> tuple[str, AttentionBackend, list[str]]:
        layers, invariant = self.attention_layers, self.batch_invariant
        return select.select_backend(name, self.device, self.num_slots, layers, invariant)
