"""A contiguous slice of the layers of a Hugging Face causal language model.

No model code of our own: a slice is the model's own class with some modules left out before its
weights are loaded, so Transformers itself reads exactly the tensors that remain (converted,
fused, cast and quantised as it would for the whole model) and runs its own forward. Only
attention is ours: Transformers calls a registered function, which hands the layer's pool and
the batch's plan to a backend (`pipespec.engine.attention`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pipespec.engine import loading
from pipespec.engine.architectures import require_supported
from pipespec.engine.attention import choose, hook
from pipespec.engine.attention.flat import FlatAttention
from pipespec.engine.attention.plan import Attention, AttentionPlan, causal_plan
from pipespec.engine.attention.proof import Layer
from pipespec.engine.compiling import Compute, compiled
from pipespec.engine.graphs import Recorder, Recording, record_cuda
from pipespec.engine.quantization import KEPT
from pipespec.engine.slicing import drop_placeholders, sliced_class
from pipespec.engine.tensor_parallel import Group, own_kv_heads
from pipespec.errors import ModelError
from pipespec.system.quiet import quiet

with quiet():
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import MoeModelOutputWithPast

# What is called with the inputs and the plan of a batch.
Lead = Callable[[Tensor, AttentionPlan], None]


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
        attention: Attention | str,
        *,
        steady: bool = False,
        group: Group | None = None,
    ):
        """Wrap what `load` loaded. `steady`: on a CPU a row is the same in every batch, also in
        bfloat16."""
        config = model.config
        self.layers = layers
        self.num_layers: int = config.num_hidden_layers  # of the whole model
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.num_slots = num_slots
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._model = model
        self._base = model.base_model
        drop_placeholders(model, layers)
        self.num_weight_bytes = _num_bytes(model.state_dict().values())
        # From here on the model's own forward is the head alone.
        setattr(model, model.base_model_prefix, _Done())
        given = None if isinstance(attention, str) else attention
        # Its layers refer to it by number. What needs no proof makes their pools.
        self._slice = hook.Slice(given or choose.make(choose.SDPA, self.device, num_slots))
        kv_heads = None if group is None else own_kv_heads(config, group)
        self._attentions = [
            hook.attach(layer, self._slice, num_slots, kv_heads) for layer in self._base.layers
        ]
        self._steady = steady and self.device.type == "cpu"
        self._recordings: list[Recording] = []  # of rising numbers of rows
        self._compiled: Compute | None = None
        self.group = group
        self._lead: Lead | None = None
        self._allocate()
        # The backend's name, and a sentence on each that was wanted and does not serve.
        self.attention, self.refused = "given", list[str]()
        # Milliseconds of a batch, and of reading the weights, where that was measured (`tuning`).
        self.step_ms: float | None = None
        self.floor_ms: float | None = None
        if isinstance(attention, str):
            with torch.inference_mode():
                self.attention, self._slice.attention, self.refused = choose.choose(
                    attention, self.device, num_slots, self.attention_layers, steady=self._steady
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
        attention: Attention | str = choose.AUTO,
        progress: bool = False,
        group: Group | None = None,
    ) -> ModelSlice:
        """Load `layers` of the checkpoint folder `path` and allocate their KV pools.

        `attention` is the name of a backend, or one for this slice alone that is not proved.
        `dtype` None keeps the checkpoint's; `quantization` is one of QUANTIZATIONS, for plain
        weights, or KEPT, for such as are packed in four bits. Prints nothing, unless `progress`
        asks for the progress bar of Transformers. With a `group` it is this member's part of the
        slice, and this as well as each `forward` needs all members at once.

        Raises `ModelError` if the architecture is not supported or cannot be shared by so many
        members, if tensors are missing or of another shape, or if a quantised checkpoint cannot
        be had in that type.
        """
        model = loading.load(
            Path(path),
            layers,
            dtype=dtype,
            quantization=quantization,
            device=torch.device(device),
            progress=progress,
            group=group,
        )
        steady = quantization == KEPT
        return cls(model, layers, num_slots, attention, steady=steady, group=group)

    @classmethod
    def random(
        cls,
        config: PretrainedConfig,
        layers: range,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_slots: int,
        attention: Attention | str = choose.AUTO,
    ) -> ModelSlice:
        """A slice of a model of that `config` with random weights, for measurements.

        Every layer that `config` counts is made at first, also those outside of `layers`.
        """
        with loading.lock, torch.device(device):
            require_supported(config.model_type, "the model")
            hook.register()
            model = sliced_class(config, layers)._from_config(
                config, dtype=dtype, attn_implementation=hook.NAME
            )
        return cls(model.eval(), layers, num_slots, attention)

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.num_layers

    @property
    def backend(self) -> Attention:
        """What its layers attend with."""
        return self._slice.attention

    def lead(self, call: Lead | None) -> None:
        """Hand each batch to `call` from now on before it is computed; None: to nobody."""
        self._lead = call

    def attend_as(self, name: str) -> None:
        """Attend with the backend that other members of the group have found. Raises ModelError if
        it does not prove itself here."""
        if name == self.attention:
            return
        with torch.inference_mode():
            found, backend, refused = choose.choose(
                name, self.device, self.num_slots, self.attention_layers, steady=self._steady
            )
        if found != name:
            raise ModelError(
                f"the devices of a stage must attend alike, and one of them uses {name}: "
                f"{' '.join(refused)} Set model.attention={found}"
            )
        self.attend_by(name, backend)

    def attend_by(self, name: str, backend: Attention) -> None:
        """Attend with another backend from now on, which has proved itself; without graphs."""
        self._recordings = []
        self.attention, self._slice.attention = name, backend

    def outcome(self) -> dict[str, Any]:
        """How it computes, as JSON can hold it."""
        return {
            "device": str(self.device),
            "devices": 1 if self.group is None else self.group.size,
            "attention": self.attention,
            "graph_rows": list(self.graph_rows),
            "compiled": self._compiled is not None,
            "refused": self.refused,
            "step_ms": self.step_ms,
            "floor_ms": self.floor_ms,
        }

    @property
    def graph_rows(self) -> tuple[int, ...]:
        """Batches of up to so many rows are computed by graphs."""
        return tuple(recording.rows for recording in self._recordings)

    def replay_only(self, buckets: Collection[int]) -> None:
        """Forget the recordings of other numbers of rows."""
        self._recordings = [each for each in self._recordings if each.rows in buckets]

    @property
    def attention_layers(self) -> list[Layer]:
        """What the attention of each layer works on."""
        return [state.layer for state in self._attentions]

    @property
    def num_kv_bytes(self) -> int:
        """Bytes of all KV pools of the slice."""
        return sum(state.pool.num_bytes for state in self._attentions if state.pool is not None)

    @torch.inference_mode()
    def forward(self, inputs: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Run one batch through the layers, storing its K and V at `plan.write`.

        `inputs`: token ids int64 `[rows]` on the first slice, else the hidden states
        `[rows, hidden]` that the slice before returned. `positions` int64 `[rows]`. Returns
        `[rows, hidden]`. Inputs may lie on any device.
        """
        if self._lead is not None:
            self._lead(inputs, plan)
        for recording in self._recordings:
            if len(positions) <= recording.rows:
                replayed = recording.run(inputs, positions, plan)
                if replayed is not None:
                    return replayed
        self._slice.attention.prepare(plan)
        return self._computed(inputs.to(self.device), positions.to(self.device))

    @torch.inference_mode()
    def compile(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Have torch.compile fuse what lies between the products from now on, by this backend.

        The KV slots are nobody's until this is over. What cannot be compiled, or is off by more
        than rounding, is computed as before; `refused` says why.
        """
        if self.group is not None:
            self.refused.append(
                "The slice is computed without a compiler, which cannot see what the members of "
                "its group do together."
            )
            return
        try:
            self._compiled = compiled(self, backend)
        except Exception as error:  # noqa: BLE001 - a model's, a compiler's, a driver's
            why = " ".join(str(error).split())[:200]
            self.refused.append(f"The slice is computed without a compiler: {why}.")

    def _computed(self, inputs: Tensor, positions: Tensor) -> Tensor:
        return (self._compiled or self.compute)(inputs, positions)

    @torch.inference_mode()
    def record(self, buckets: Sequence[int], record: Recorder = record_cuda) -> None:
        """Compute batches of up to so many rows by replaying a recording from now on.

        The KV slots are nobody's until this is over, and all members of a group record at once.
        What cannot be recorded, or does not give the very same, is computed as before; `refused`
        says why.
        """
        self._recordings = []
        if self.group is not None and not self.group.records:
            self.refused.append(
                "The slice is computed without graphs: the host adds up what the members of its "
                "group have computed."
            )
            return
        attention = self._slice.attention
        for rows in sorted(buckets):
            inputs, _, _ = self.example(rows)
            try:
                if not isinstance(attention, FlatAttention):
                    raise ValueError(f"attention={self.attention} cannot be recorded")
                self._recordings.append(
                    Recording(self._computed, inputs, attention, self.num_slots, record)
                )
            except Exception as error:  # noqa: BLE001 - a model's, a driver's, a kernel's
                why = " ".join(str(error).split())[:200]
                self.refused.append(
                    f"Batches of up to {rows} rows are computed without a graph: {why}."
                )

    def example(self, rows: int) -> tuple[Tensor, Tensor, AttentionPlan]:
        """A batch of a text's first rows: inputs, positions, plan."""
        inputs = torch.randn(rows, self.hidden_size, device=self.device).to(self.dtype)
        if self.is_first:
            inputs = torch.randint(self.vocab_size, (rows,), device=self.device)
        slots = np.arange(rows)
        plan = causal_plan(slots[:0], slots)
        return inputs, torch.arange(rows, device=self.device), plan

    def compute(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """`forward` by the plan that attention has: what a compiler or a recorder may take for
        one graph."""
        output = self._base(
            **{"input_ids" if self.is_first else "inputs_embeds": inputs.unsqueeze(0)},
            position_ids=positions.unsqueeze(0),
            use_cache=False,
        )
        return output.last_hidden_state.squeeze(0)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """`[k, hidden]` as the last slice's `forward` returned it -> `[k, vocab]`."""
        assert self.is_last, "only the last slice has a head"
        if self._steady and len(hidden) == 1:  # the product with one row is another kernel's
            return self.logits(hidden.expand(2, -1))[:1]
        return self._model(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits.squeeze(0)

    def _allocate(self) -> None:
        """Run one row, which allocates every layer's pool: too little memory shows at load."""
        position = torch.zeros(1, dtype=torch.long)
        row = position
        if not self.is_first:
            row = torch.zeros(1, self.hidden_size, dtype=self.dtype)
        slot = np.zeros(1, np.int64)
        self.forward(row, position, causal_plan(slot[:0], slot))


class _Done(nn.Module):
    """In the place of a base model whose layers have run already."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> MoeModelOutputWithPast:
        # The output type with the most fields: heads of mixtures also look at router logits.
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """What the tensors take, counted by address: a tied head appears twice."""
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
