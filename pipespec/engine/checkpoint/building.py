"""Makes models by Transformers' own loading code, of weights or of headers alone."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipespec.engine.checkpoint.checkpoint import StoredFiles
from pipespec.engine.formats.architectures import num_layers_of
from pipespec.engine.formats.safetensors_folder import FOREIGN
from pipespec.engine.formats.safetensors_headers import Tensor
from pipespec.engine.formats.slice_tensors import LAYER
from pipespec.engine.formats.stored import LazyTensor, Part
from pipespec.errors import ModelError
from pipespec.system.liveness import progress
from pipespec.system.silence_warnings import silence_warnings
from pipespec.system.validation import reason

with silence_warnings():
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging as transformers_logging

# Part of Transformers' message on tensors that it cannot stack or concatenate.
_CONVERSION = "automatic conversion of the weights"

# `from_pretrained` sets process-wide state while it runs (default dtype, initialisers, log
# level), and the ranks of a test cluster are threads of one process.
lock = threading.Lock()


@contextmanager
def alone() -> Iterator[None]:
    """Make models one at a time, and keep Transformers from printing; faults in its reports are
    raised as errors instead."""
    with lock, silence_warnings():
        level, bar = (
            transformers_logging.get_verbosity(),
            transformers_logging.is_progress_bar_enabled(),
        )
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(level)
            if bar:
                transformers_logging.enable_progress_bar()


def source_of(
    files: StoredFiles, parts: Collection[str], dtype: torch.dtype
) -> tuple[Path | None, dict[str, Any] | None]:
    """What `from_pretrained` loads these parts (`slice_tensors`) from: a state dict whose tensors
    are read lazily, or the folder that a package of Transformers reads."""
    if files.by_package:
        return files.path, None
    return None, {name: _Counted(files.tensor(name, dtype), dtype) for name in files.headers(parts)}


class _Counted:
    """A slice of a checkpoint that counts, when it is read, what it takes in a model of `dtype`."""

    def __init__(self, tensor: Any, dtype: torch.dtype):
        self._tensor, self._dtype = tensor, dtype
        self.get_shape, self.get_dtype = tensor.get_shape, tensor.get_dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        found: torch.Tensor = self._tensor[index]
        progress.load(found.numel() * self._dtype.itemsize)
        return found


def build(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    source: tuple[Path | None, Mapping[str, Any] | None],
    device: torch.device,
    **options: Any,
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """A model of the weights of a `source_of`, and what Transformers reports of them."""
    folder, state = source
    return model_class.from_pretrained(
        folder,
        config=config,
        state_dict=state,
        device_map={"": device},
        local_files_only=True,
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **options,
    )


def require_all(path: Path, loaded: Mapping[str, Any]) -> None:
    """Raise ModelError unless loading found every tensor, in its shape."""
    for what in ("missing_keys", "mismatched_keys"):
        if loaded[what]:
            raise ModelError(
                f"{path} does not fit its config.json: {len(loaded[what])} "
                f"{what.replace('_keys', ' tensors')}, for example "
                f"{_name(min(loaded[what]))}; fetch the checkpoint again"
            )


def check_fit(files: StoredFiles, tensors: Mapping[str, Tensor], *, strict: bool) -> None:
    """Load a model from the headers of plain weights, on PyTorch's meta device.

    Transformers renames and stacks tensors as for real weights. Raises ModelError if tensors are
    missing or have another shape, or if the config is not valid; with `strict` also if weights of
    layers would be left out.
    """

    path = files.path
    with alone():
        config = files.config()
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config  # the headers are those of plain weights
        state = {name: without_numbers(each.shape) for name, each in tensors.items()}
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        try:
            _, loaded = build(
                model_class, config, (None, state), torch.device("meta"), dtype=torch.float32
            )
        except Exception as error:  # model code may raise anything for invalid values
            why = reason(error)
            if _CONVERSION in why:  # the rest refers to a report that is not shown
                why = "tensors that the model concatenates do not fit together"
            raise ModelError(
                f"no model can be made of {path} and its config.json ({why}); {FOREIGN}"
            ) from error
    require_all(path, loaded)
    extra = getattr(config, "num_nextn_predict_layers", None) or 0
    mtp = range(num_layers_of(config), num_layers_of(config) + extra)
    weights = [
        name
        for name in map(_name, loaded["unexpected_keys"])
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


def without_numbers(shape: tuple[int, ...]) -> LazyTensor:
    """A tensor of this shape on PyTorch's meta device."""
    return LazyTensor(shape, "F32", partial(_empty, shape))


def _empty(shape: tuple[int, ...], _: Part) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def _name(key: str | tuple[Any, ...]) -> str:
    return key if isinstance(key, str) else str(key[0])
