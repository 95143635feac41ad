"""GGUF files: config, tensors and tokenizer, with the names of Transformers.

Tensors are dequantised one by one when they are read (`gguf.dequantize`), and the rows of Llama's
queries and keys are restored to Hugging Face's order.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.engine.formats.gguf_bounds import check_bounds
from pipespec.engine.formats.lazy import LazyTensor
from pipespec.engine.safetensors_headers import Tensor
from pipespec.errors import ModelError
from pipespec.system.cache import cached_call
from pipespec.system.validation import shown

if TYPE_CHECKING:  # not needed if the header is cached
    import numpy as np
    from gguf import GGUFReader

GGUF = "gguf"
PACKAGE = "gguf"
SUFFIX = ".gguf"
# The version of cached headers: increase it when `_read` changes its result.
FORM = 2
# Supported values of `general.architecture`; each has a test in tests/integration/test_gguf.py.
ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Matrices in which llama.cpp interleaves the two halves of each head; Hugging Face does not.
PERMUTED = {"llama": (".attn_q.", ".attn_k.")}
# Characters of another library's message in an error message.
LONGEST_REASON = 400
FOREIGN = "take another file, or a safetensors checkpoint"
EMBEDDING = "token_embd.weight"
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True)
class GgufHeader:
    """The header of a file.

    Attributes:
        config: the config of Transformers, JSON as in config.json.
        tensors: JSON: for each name of Transformers the name in the file and the shape.
        eos: token ids that end a text.
        permuted: parts of names in the file of matrices whose rows are in llama.cpp's order.
    """

    config: str
    tensors: str
    eos: list[int]
    permuted: list[str]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The config."""
        found: dict[str, Any] = json.loads(self.config)
        return found

    @cached_property
    def stored(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The name in the file and the shape of each tensor."""
        return {
            name: (theirs, tuple(shape))
            for name, (theirs, shape) in json.loads(self.tensors).items()
        }

    @property
    def plain(self) -> dict[str, Tensor]:
        """The headers of the weights once dequantised to float32."""
        return {
            name: Tensor(shape, 4 * math.prod(shape), "F32")
            for name, (_, shape) in self.stored.items()
        }


def is_gguf(path: str | Path) -> bool:
    """Whether this is the name of a GGUF file."""
    return str(path).endswith(SUFFIX) and not os.path.isdir(path)


def header(path: Path) -> GgufHeader:
    """The header of a file, read or from the cache. Raises ModelError."""
    packages = {}
    for name in ("transformers", PACKAGE):
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return cached_call(
        "gguf", GgufHeader, {"form": FORM, **identity(path), **packages}, _read, path
    )


def identity(path: Path) -> dict[str, Any]:
    """What identifies a version of a file in the cache, without reading it. Raises ModelError."""
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); make it readable") from error
    return {"file": str(path.absolute()), "size": stat.st_size, "time": stat.st_mtime_ns}


def lazy_state(path: Path) -> dict[str, LazyTensor]:
    """The tensors as a state dict; each is dequantised when it is read."""
    found, reader = header(path), _reader(path)
    raw = {tensor.name: tensor for tensor in reader.tensors}
    heads = found.settings["num_attention_heads"]
    of = {".attn_q.": heads, ".attn_k.": found.settings.get("num_key_value_heads") or heads}

    def read(name: str) -> Any:
        import torch
        from gguf import dequantize

        weights = dequantize(raw[name].data, raw[name].tensor_type)
        for part in found.permuted:
            if part in name:
                weights = _halves(weights, of[part])
        return torch.from_numpy(weights.copy() if not weights.flags.writeable else weights)

    return {
        name: LazyTensor(shape, "F32", partial(read, theirs))
        for name, (theirs, shape) in found.stored.items()
    }


def load_config(path: Path) -> Any:
    """The config as a `PretrainedConfig` of Transformers. Raises ModelError."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**header(path).settings)


def load_tokenizer(path: Path) -> Any:
    """The tokenizer in the file, as Transformers builds it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


def _halves(weights: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of each head from interleaved halves to one half after the other."""
    pairs = weights.reshape(heads, weights.shape[0] // heads // 2, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def block_sizes(path: Path) -> dict[int, tuple[int, int]]:
    """Numbers and bytes of a block of each type of tensor. Raises ModelError."""
    try:
        from gguf import GGML_QUANT_SIZES
    except ImportError as error:
        raise ModelError(
            f"{path} needs {PACKAGE}, which is not installed; pip install 'pipespec[quantize]'"
        ) from error
    return {kind.value: (int(n), int(size)) for kind, (n, size) in GGML_QUANT_SIZES.items()}


def tensor_ranges(path: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor begins and ends, by its name in the file. Raises ModelError."""
    return check_bounds(path, block_sizes(path))


def _reader(path: Path) -> GGUFReader:
    check_bounds(path, block_sizes(path))
    from gguf import GGMLQuantizationType, GGUFReader

    try:
        return GGUFReader(path)
    except Exception as error:  # numpy raises anything for missing bytes
        why = " ".join(str(error).split())[:200]
        if GGMLQuantizationType.__name__ in why:
            raise ModelError(
                f"{path} holds tensors of a type that {PACKAGE} does not know ({why}); {FOREIGN}"
            ) from error
        raise ModelError(f"{path} is not a whole GGUF file ({why}); fetch it again") from error


def _read(path: Path) -> GgufHeader:
    if _PART.search(path.name):
        raise ModelError(
            f"{path} is one part of several; join them with `llama-gguf-split --merge`"
        )
    reader = _reader(path)
    kind = _field(reader, "general.architecture")
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"{path} holds a model of the architecture {kind!r}, which is not read from GGUF; read "
            f"are {', '.join(ARCHITECTURES)}"
        )
    layers = _field(reader, f"{kind}.block_count")
    if not isinstance(layers, int) or not 0 < layers <= len(reader.tensors):
        raise ModelError(
            f"the metadata of {path} count {shown(layers)} layers ({kind}.block_count), but it "
            f"holds {len(reader.tensors)} tensors; fetch it again"
        )
    _refuse_what_is_not_mapped(path, reader, kind)
    config = _config(path, reader, kind)
    names = _names(path, reader, kind, config)
    homeless = {each.name for each in reader.tensors} - {theirs for theirs, _ in names.values()}
    if homeless:
        raise ModelError(
            f"{path} holds {len(homeless)} tensors that {config.model_type} of Transformers has "
            f"no place for, for example {min(homeless)}; {FOREIGN}"
        )
    eos = [_field(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return GgufHeader(
        json.dumps(config.to_dict()),
        json.dumps(names),
        sorted({int(each) for each in eos if each is not None}),
        list(PERMUTED.get(kind, ())),
    )


def _field(reader: GGUFReader, name: str) -> Any:
    """The metadata with this name; None: there is none."""
    field = reader.fields.get(name)
    return None if field is None else field.contents()


def _refuse_what_is_not_mapped(path: Path, reader: GGUFReader, kind: str) -> None:
    """Raise ModelError for features that Transformers would compute differently from llama.cpp."""
    from gguf import dequantize

    names = {tensor.name for tensor in reader.tensors}
    scaling = _field(reader, f"{kind}.rope.scaling.type")
    if scaling is None:  # for llama.cpp a factor then means linear; the second name is old
        factors = (_field(reader, f"{kind}.rope.{of}") for of in ("scaling.factor", "scale_linear"))
        scaling = next(("linear" for factor in factors if factor not in (None, 0, 1)), "none")
    if scaling != "none" or "rope_freqs.weight" in names:
        raise ModelError(f"{path} scales its rotary embedding, which is not read; {FOREIGN}")
    if _field(reader, f"{kind}.expert_count"):
        raise ModelError(f"{path} holds a mixture of experts, which is not read; {FOREIGN}")
    tried = set()
    for tensor in reader.tensors:
        if tensor.tensor_type in tried:
            continue
        tried.add(tensor.tensor_type)
        try:
            dequantize(tensor.data[:1], tensor.tensor_type)
        except Exception as error:
            raise ModelError(
                f"{path} holds tensors of type {tensor.tensor_type.name}, which {PACKAGE} does not "
                f"dequantise; {FOREIGN}"
            ) from error


def _config(path: Path, reader: GGUFReader, kind: str) -> Any:
    """The config as Transformers reads it, with the fields that it ignores."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:  # model code may raise anything for invalid values
        raise _not_valid(path, error) from error
    head_dim = _field(reader, f"{kind}.attention.key_length")
    if head_dim is not None and hasattr(config, "head_dim"):
        config.head_dim = int(head_dim)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turned = _field(reader, f"{kind}.rope.dimension_count")
    if turned not in (None, size):
        raise ModelError(
            f"{path} turns {turned} of the {size} numbers of a head by their position, which is "
            f"not read; {FOREIGN}"
        )
    for tensor in reader.tensors:
        if tensor.name == EMBEDDING:  # its rows may be more than the tokenizer's tokens
            config.vocab_size = int(tensor.shape[-1])
    return config


def _not_valid(path: Path, error: Exception) -> ModelError:
    why = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_REASON]
    return ModelError(f"the metadata of {path} are not valid: {why}; {FOREIGN}")


def _names(path: Path, reader: GGUFReader, kind: str, config: Any) -> dict[str, list[Any]]:
    """Of each tensor of Transformers' model that the file has: its name there and its shape."""
    import torch
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers import AutoModelForCausalLM

    of_kind = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == kind)
    known = get_tensor_name_map(of_kind, config.num_hidden_layers)
    shapes = {each.name: [int(n) for n in reversed(each.shape)] for each in reader.tensors}
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # model code may raise anything for invalid values
        raise _not_valid(path, error) from error
    found = {}
    for name in model.state_dict():
        stem, _, suffix = name.rpartition(".")
        theirs = f"{known.get_name(stem)}.{suffix}"
        if theirs in shapes:
            found[name] = [theirs, shapes[theirs]]
    return found
