"""Loads the layers of a slice from a checkpoint, by Transformers' own loading code."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from pipespec.engine.attention import hook
from pipespec.engine.checkpoint.building import alone, build, require_all, source_of
from pipespec.engine.checkpoint.checkpoint import open_files
from pipespec.engine.checkpoint.partial_checkpoint import require_parts
from pipespec.engine.formats.architectures import num_layers_of, require_supported
from pipespec.engine.formats.quantization import QUANTIZATIONS, loading_options
from pipespec.engine.formats.slice_tensors import parts_of
from pipespec.engine.formats.stored import DTYPES, KeptMatrix
from pipespec.engine.low_bit import kept_weights
from pipespec.engine.precision import name_of
from pipespec.engine.slice.slicing import sliced_class
from pipespec.engine.tensor_parallel.tensor_parallel import TPGroup
from pipespec.engine.tensor_parallel.tp_divisibility import has_plan, require_tp_divisible
from pipespec.engine.tensor_parallel.tp_member import TPMember, WholeSlice
from pipespec.errors import ModelError
from pipespec.system.silence_warnings import silence_warnings

with silence_warnings():
    from transformers import PreTrainedModel


def load(
    path: Path,
    layers: range,
    dtype: torch.dtype | None,
    quantization: str | None,
    device: torch.device,
    group: TPGroup | None,
    *,
    progress: bool,
) -> tuple[PreTrainedModel, WholeSlice]:
    """The model's own class with the weights of `layers`, or with a member's part of them, and what
    it knows of the other members; see `ModelSlice.load`."""
    with alone(progress=progress):
        files = open_files(path)
        config = files.config()
        require_supported(config.model_type, path)
        assert layers.step == 1
        assert 0 <= layers.start < layers.stop <= num_layers_of(config)
        parts = parts_of(layers, num_layers_of(config), tied=config.tie_word_embeddings)
        require_parts(path, parts)
        hook.register()
        if not files.by_package and getattr(config, "quantization_config", None) is not None:
            del config.quantization_config  # for Transformers it has plain weights
        computed = dtype or config.dtype or getattr(torch, DTYPES[files.dtype])
        parallel = WholeSlice()
        if group is not None:
            requantized = files.by_package or quantization in QUANTIZATIONS
            args = path, config.model_type, has_plan(config), group.size
            require_tp_divisible(*args, requantized=requantized)
            parallel = TPMember(group, files.units())
        kept: dict[str, KeptMatrix] = {}
        if quantization is not None and quantization == files.kept_format:
            with_ggml = kept_weights.with_ggml(device)
            kept = files.kept(parts, with_ggml=with_ggml, divided=group is not None)
        kinds = {name: each.kind for name, each in kept.items()}
        make = kept_weights.LayerMaker(kinds, device, computed)
        keep = partial(kept_weights.replace, names=kept, make=make)
        with source_of(files, parts, computed) as source:
            model, loaded = build(
                sliced_class(config, layers, partial(parallel.prepare, source[1], keep)),
                config,
                source,
                device,
                dtype=computed,
                attn_implementation=hook.NAME,
                **loading_options(quantization, dtype),
            )
        if quantization is not None:
            kept_weights.fill(model, kept, device, quantization)
    require_all(path, loaded)
    parallel.loaded(model)
    if dtype is not None and model.dtype != dtype:
        raise ModelError(
            f"{path} is quantised for {name_of(model.dtype)}, not {name_of(dtype)}; leave "
            "model.dtype out"
        )
    return model, parallel
