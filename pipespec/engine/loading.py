"""Loads the layers of a slice from a checkpoint, by Transformers' own loading code."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipespec.engine import block_linear, kept_weights
from pipespec.engine.architectures import require_supported
from pipespec.engine.attention import hook
from pipespec.engine.checkpoint.formats import gguf, packed_checkpoint
from pipespec.engine.checkpoint.formats.lazy import LazyTensor, Part
from pipespec.engine.checkpoint.model_config import FOREIGN, LONGEST_REASON, load_config
from pipespec.engine.checkpoint.partial_checkpoint import loadable, require_parts
from pipespec.engine.checkpoint.quantization import QUANTIZATIONS, loading_options, stored_packing
from pipespec.engine.checkpoint.safetensors_headers import CONFIG, Tensor, read_json
from pipespec.engine.checkpoint.slice_tensors import LAYER, parts_of
from pipespec.engine.checkpoint.text_part import is_multimodal
from pipespec.engine.expert_stack import MakeLayer
from pipespec.engine.ggml import library as ggml
from pipespec.engine.ggml.linear import GgmlLinear
from pipespec.engine.precision import name_of
from pipespec.engine.slicing import num_layers_of, sliced_class
from pipespec.engine.tensor_parallel import (
    TPGroup,
    TPPlan,
    drop_repeated_biases,
    require_divisible,
)
from pipespec.engine.tp_shares import units_of
from pipespec.engine.tp_state import Member
from pipespec.errors import ModelError
from pipespec.system.silence_warnings import silence_warnings

with silence_warnings():
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging as transformers_logging

# Part of Transformers' message on tensors that it cannot stack or concatenate.
_CONVERSION = "automatic conversion of the weights"

# `from_pretrained` sets process-wide state while it runs (default dtype, initialisers, log
# level), and the ranks of a test cluster are threads of one process.
lock = threading.Lock()


def load(
    path: Path,
    layers: range,
    *,
    dtype: torch.dtype | None,
    quantization: str | None,
    device: torch.device,
    progress: bool,
    group: TPGroup | None = None,
) -> tuple[PreTrainedModel, TPPlan | None]:
    """The model's own class with the weights of `layers`, or with a member's part of them, and how
    the members divide it; see `ModelSlice.load`."""
    with lock, silence_warnings(), _log_level(progress):
        config = load_config(path)
        require_supported(config.model_type, path)
        assert layers.step == 1
        assert 0 <= layers.start < layers.stop <= num_layers_of(config)
        parts = parts_of(layers, num_layers_of(config), tied=config.tie_word_embeddings)
        require_parts(path, parts)
        hook.register()
        options = {
            "device_map": {"": device},
            "attn_implementation": hook.NAME,
            "local_files_only": True,
            "use_safetensors": True,
            "ignore_mismatched_sizes": True,
            "output_loading_info": True,
        }
        stored = getattr(config, "quantization_config", None)
        packing = stored_packing(path, stored)
        member: Member | None = None
        if group is not None:
            requantized = (stored is not None and packing is None) or quantization in QUANTIZATIONS
            require_divisible(config, path, group.size, requantized=requantized)
            member = Member(group, units_of(path, stored))

        def model_class(
            state: MutableMapping[str, Any], names: Iterable[str] = (), make: MakeLayer = nn.Linear
        ) -> type[PreTrainedModel]:
            """For weights of this state dict; `make` makes the layers of these matrices."""
            keep = partial(kept_weights.replace, names=tuple(names), make=make)
            prepare = keep if member is None else partial(member.prepare, state, keep)
            return sliced_class(config, layers, prepare)

        if gguf.is_gguf(path):
            computed = dtype or config.dtype or torch.float16
            with_ggml = device.type == "cpu" and ggml.load() is not None
            kinds: Mapping[str, str] = {}
            if quantization == gguf.GGUF:
                found = gguf.header(path)
                kinds = found.of_ggml if with_ggml and member is None else found.kept
            state, blocks = gguf.lazy_state(path, computed, kinds, with_ggml=with_ggml)
            make: MakeLayer = GgmlLinear
            if not with_ggml:
                packed = device.type != "cpu" and computed == torch.bfloat16
                make = partial(block_linear.make_linear, kinds, packed)
            model, loaded = _plain(config, model_class(state, kinds, make), state, dtype, options)
            kept_weights.fill(model, blocks, device, gguf.GGUF)
        elif packing is not None:
            del config.quantization_config  # for Transformers it has plain weights
            state, kept = packed_checkpoint.lazy_state(path, packing, parts)
            names = kept if quantization == packing.format else ()
            of_format = kept_weights.layer_for(
                packing.format, device, dtype or config.dtype or torch.float16
            )
            model, loaded = _plain(
                config, model_class(state, names, of_format), state, dtype, options
            )
            kept_weights.fill(model, kept, device, packing.format)
        elif member is not None or is_multimodal(read_json(path / CONFIG)):
            state = packed_checkpoint.stored_state(path, parts)
            more = loading_options(config, quantization, dtype)
            model, loaded = _plain(config, model_class(state), state, dtype, options | more)
        else:
            with loadable(path, parts) as folder:
                model, loaded = sliced_class(config, layers).from_pretrained(
                    folder,
                    config=config,
                    dtype=dtype if dtype is not None else "auto",
                    **options,
                    **loading_options(config, quantization, dtype),
                )
    _require_all(path, loaded)
    if member is not None:
        drop_repeated_biases(model, member.group, member.plan)
    if dtype is not None and model.dtype != dtype:
        raise ModelError(
            f"{path} is quantised for {name_of(model.dtype)}, not {name_of(dtype)}; leave "
            "model.dtype out"
        )
    return model, None if member is None else member.plan


def check_fit(path: Path, tensors: Mapping[str, Tensor], *, strict: bool) -> int:
    """Load a model from the headers of plain weights, on PyTorch's meta device, and return how many
    tensors it leaves out.

    Transformers renames and stacks tensors as for real weights. Raises ModelError if tensors are
    missing or have another shape, or if the config is not valid; with `strict` also if weights of
    layers would be left out.
    """

    def empty(tensor: Tensor, _: Part) -> torch.Tensor:
        return torch.empty(tensor.shape, device="meta")

    with lock, silence_warnings(), _log_level(progress=False):
        config = load_config(path)
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config  # the headers are those of plain weights
        state = {
            name: LazyTensor(tensor.shape, "F32", partial(empty, tensor))
            for name, tensor in tensors.items()
        }
        options = {
            "device_map": {"": torch.device("meta")},
            "ignore_mismatched_sizes": True,
            "output_loading_info": True,
        }
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        try:
            _, loaded = _plain(config, model_class, state, torch.float32, options)
        except Exception as error:  # model code may raise anything for invalid values
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST_REASON]
            if _CONVERSION in reason:  # the rest refers to a report that is not shown
                reason = "tensors that the model concatenates do not fit together"
            raise ModelError(
                f"no model can be made of {path} and its config.json ({reason}); {FOREIGN}"
            ) from error
    _require_all(path, loaded)
    left_out = [_name(key) for key in loaded["unexpected_keys"]]
    extra = getattr(config, "num_nextn_predict_layers", None) or 0
    mtp = range(num_layers_of(config), num_layers_of(config) + extra)
    weights = [
        name
        for name in left_out
        if (layer := LAYER.search(name)) is not None
        and int(layer[1]) not in mtp
        and name.endswith((".weight", ".bias"))
    ]
    if weights and strict:
        raise ModelError(
            f"{path} does not fit its config.json: {len(weights)} tensors of its layers would be "
            f"left out, for example {min(weights)}; correct config.json, or fetch the checkpoint "
            "again"
        )
    return len(left_out)


def _require_all(path: Path, loaded: Mapping[str, Any]) -> None:
    """Raise ModelError unless loading found every tensor, in its shape."""
    for what in ("missing_keys", "mismatched_keys"):
        if loaded[what]:
            raise ModelError(
                f"{path} does not fit its config.json: {len(loaded[what])} "
                f"{what.replace('_keys', ' tensors')}, for example "
                f"{_name(min(loaded[what]))}; fetch the checkpoint again"
            )


def _plain(
    config: PretrainedConfig,
    model_class: type[PreTrainedModel],
    state: Mapping[str, Any],
    dtype: torch.dtype | None,
    options: Mapping[str, Any],
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model of plain weights that are read lazily, by default in the config's type."""
    return model_class.from_pretrained(
        None,
        config=config,
        dtype=dtype or config.dtype or torch.float16,
        state_dict=state,
        **options,
    )


@contextmanager
def _log_level(progress: bool) -> Iterator[None]:
    """Keep Transformers from printing; faults in its reports are raised as errors instead."""
    level, bar = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )
    transformers_logging.set_verbosity_error()
    if not progress:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bar:
            transformers_logging.enable_progress_bar()


def _name(key: str | tuple[Any, ...]) -> str:
    return key if isinstance(key, str) else str(key[0])
