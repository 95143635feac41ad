"""GGUF files: their config, tensors and tokenizer, as Transformers names and reads them.

Tensors are dequantised one by one when they are read (`gguf.dequantize`), and rows of Llama's
queries and keys put back into Hugging Face's order.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.engine.headers import Tensor
from pipespec.engine.stored.lazy import LazyTensor
from pipespec.errors import ModelError
from pipespec.system.cache import remembered

if TYPE_CHECKING:  # whoever knows a file already can do without
    from collections.abc import Iterator

    import numpy as np
    from gguf import GGUFReader

GGUF = "gguf"
PACKAGE = "gguf"
SUFFIX = ".gguf"
# Of what is remembered of a file: to be raised when `_read` refuses or says something else.
FORM = 2
# What `general.architecture` may be; each has its test in tests/integration/test_gguf.py.
ARCHITECTURES = ("llama", "qwen2", "qwen3")
# llama.cpp has the halves of each head of these in turns; Hugging Face has one after the other.
PERMUTED = {"llama": (".attn_q.", ".attn_k.")}
# Of what another library says of a file a message shows so many characters.
LONGEST_REASON = 400
FOREIGN = "take another file, or a safetensors checkpoint"
EMBEDDING = "token_embd.weight"
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True)
class GgufHeader:
    """What a file says of its model.

    `config` is that of Transformers, JSON as in config.json. `tensors` is JSON too: of each name of
    Transformers that of the file and the shape. `eos` are the token ids that end a text; `permuted`
    are the parts of the file's names whose rows are in llama.cpp's order.
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
        """The file's name and the shape of each tensor."""
        return {
            name: (theirs, tuple(shape))
            for name, (theirs, shape) in json.loads(self.tensors).items()
        }

    @property
    def plain(self) -> dict[str, Tensor]:
        """The headers of its weights as plain float32."""
        return {
            name: Tensor(shape, 4 * math.prod(shape), "F32")
            for name, (_, shape) in self.stored.items()
        }


def is_gguf(path: str | Path) -> bool:
    """Is this the name of a GGUF file."""
    return str(path).endswith(SUFFIX) and not os.path.isdir(path)


def header(path: Path) -> GgufHeader:
    """Read a file's header, or recall what was read of it. Raises ModelError."""
    packages = {}
    for name in ("transformers", PACKAGE):
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return remembered(
        "gguf", GgufHeader, {"form": FORM, **identity(path), **packages}, lambda: _read(path)
    )


def identity(path: Path) -> dict[str, Any]:
    """What a file is told from others by, without reading it. Raises ModelError."""
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); make it readable") from error
    return {"file": str(path.absolute()), "size": stat.st_size, "time": stat.st_mtime_ns}


@contextmanager
def opened(path: Path) -> Iterator[dict[str, LazyTensor]]:
    """The file's tensors as a state dict, each dequantised when it is asked for."""
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

    yield {
        name: LazyTensor(shape, "F32", partial(read, theirs))
        for name, (theirs, shape) in found.stored.items()
    }


def load_config(path: Path) -> Any:
    """The config as an object of Transformers. Raises ModelError."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**header(path).settings)


def load_tokenizer(path: Path) -> Any:
    """The tokenizer in the file, as Transformers builds it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


def _halves(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head, from pairs of the two halves to one half after the other."""
    pairs = weights.reshape(heads, weights.shape[0] // heads // 2, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def _reader(path: Path) -> GGUFReader:
    try:
        from gguf import GGMLQuantizationType, GGUFReader
    except ImportError as error:
        raise ModelError(
            f"{path} needs {PACKAGE}, which is not installed; pip install 'pipespec[quantize]'"
        ) from error
    try:
        return GGUFReader(path)
    except Exception as error:  # whatever numpy says of bytes that are not there
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
    _refuse_what_is_not_mapped(path, reader, kind)
    config = _config(path, reader, kind)
    names = _names(reader, kind, config)
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
    """What the metadata hold under a name, None if nothing."""
    field = reader.fields.get(name)
    return None if field is None else field.contents()


def _refuse_what_is_not_mapped(path: Path, reader: GGUFReader, kind: str) -> None:
    """Raise ModelError for what would be computed otherwise than in llama.cpp."""
    from gguf import dequantize

    names = {tensor.name for tensor in reader.tensors}
    scaling = _field(reader, f"{kind}.rope.scaling.type")
    if scaling is None:  # then llama.cpp takes a factor for a linear one; the second name is old
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
    """As Transformers reads it, and what it passes over."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:  # any file's values meet any class's code
        why = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_REASON]
        raise ModelError(f"the metadata of {path} are not valid: {why}; {FOREIGN}") from error
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


def _names(reader: GGUFReader, kind: str, config: Any) -> dict[str, list[Any]]:
    """Of each tensor of Transformers' model that the file has: its name there and its shape."""
    import torch
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers import AutoModelForCausalLM

    of_kind = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == kind)
    known = get_tensor_name_map(of_kind, config.num_hidden_layers)
    shapes = {each.name: [int(n) for n in reversed(each.shape)] for each in reader.tensors}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = {}
    for name in model.state_dict():
        stem, _, suffix = name.rpartition(".")
        theirs = f"{known.get_name(stem)}.{suffix}"
        if theirs in shapes:
            found[name] = [theirs, shapes[theirs]]
    return found
