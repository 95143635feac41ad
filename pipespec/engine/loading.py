"""From the files of a checkpoint to the layers of a slice, through Transformers' own loading."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipespec.engine import int4
from pipespec.engine.architectures import require_supported
from pipespec.engine.attention import hook
from pipespec.engine.precision import name_of
from pipespec.engine.quantization import KEPT, loading_options, stored_packing
from pipespec.engine.slicing import sliced_class
from pipespec.engine.stored import folder, gguf
from pipespec.engine.tensor_parallel import Group, cut, require_divisible, settle
from pipespec.errors import ModelError
from pipespec.system.quiet import quiet

with quiet():
    from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
    from transformers.utils import logging as transformers_logging

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
    group: Group | None = None,
) -> PreTrainedModel:
    """The model's own class with the weights of `layers`, or with a member's part of them; see
    `ModelSlice.load`."""
    with lock, quiet(), _log_level(progress):
        config = _config(path)
        require_supported(config.model_type, path)
        assert layers.step == 1
        assert 0 <= layers.start < layers.stop <= config.num_hidden_layers
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
        prepare: Callable[[PreTrainedModel], None] | None = None
        if group is not None:
            quantized = gguf.is_gguf(path) or stored is not None or quantization is not None
            require_divisible(config, path, group.size, quantized=quantized)
            prepare = partial(cut, group=group)
        if gguf.is_gguf(path):
            with gguf.opened(path) as state:
                model, loaded = _plain(config, sliced_class(config, layers), state, dtype, options)
        elif packing is not None:
            del config.quantization_config  # to Transformers it is a model of plain weights
            with folder.opened(path, packing) as (state, kept):
                prepare = partial(int4.replace, names=kept if quantization == KEPT else ())
                model_class = sliced_class(config, layers, prepare)
                model, loaded = _plain(config, model_class, state, dtype, options)
                int4.fill(model, kept, device)
        else:
            model, loaded = sliced_class(config, layers, prepare).from_pretrained(
                path,
                config=config,
                dtype=dtype if dtype is not None else "auto",
                **options,
                **loading_options(config, quantization, dtype),
            )
    for what in ("missing_keys", "mismatched_keys"):
        if loaded[what]:
            raise ModelError(
                f"{path} does not fit its config.json: {len(loaded[what])} "
                f"{what.replace('_keys', ' tensors')}, for example "
                f"{_name(min(loaded[what]))}; fetch the checkpoint again"
            )
    if group is not None:
        settle(model, group)
    if dtype is not None and model.dtype != dtype:
        raise ModelError(
            f"{path} is quantised for {name_of(model.dtype)}, not {name_of(dtype)}; leave "
            "model.dtype out"
        )
    return model


def _config(path: Path) -> PretrainedConfig:
    if not gguf.is_gguf(path):
        return AutoConfig.from_pretrained(path, local_files_only=True)
    return gguf.load_config(path)


def _plain(
    config: PretrainedConfig,
    model_class: type[PreTrainedModel],
    state: Mapping[str, Any],
    dtype: torch.dtype | None,
    options: Mapping[str, Any],
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model of plain weights that are read one by one, by default in the config's type."""
    return model_class.from_pretrained(
        None,
        config=config,
        dtype=dtype or config.dtype or torch.float16,
        state_dict=state,
        **options,
    )


@contextmanager
def _log_level(progress: bool) -> Iterator[None]:
    """Keep Transformers from printing: what matters of its reports is raised instead."""
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
