"""GGUF files: config, tensors and tokenizer, with the names of a safetensors checkpoint.
Above 350 lines, as a header is read with the tensors that it describes.

Tensors are read one by one, either dequantised (`gguf.dequantize`) or as the blocks of the file.
The rows of Llama's queries and keys are restored to Hugging Face's order.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pipespec.engine.formats import gguf_tokenizer
from pipespec.engine.formats.fill_in_parts import row_parts
from pipespec.engine.formats.gguf_file import GgufFile, parts_of
from pipespec.engine.formats.gguf_metadata import (
    FOREIGN,
    architecture_of,
    config_of,
    names_of,
    partner_of,
)
from pipespec.engine.formats.gguf_tensors import (
    LATENT,
    ROWS,
    TRANSPOSED,
    Stored,
    in_turns,
    joined,
    stored_matrix,
)
from pipespec.engine.formats.lazy import STORED, WHOLE, LazyTensor, Part, Units, part_shape, per
from pipespec.engine.formats.matrix_packing import WEIGHT
from pipespec.engine.formats.packing import INT4_OUT_MULTIPLE
from pipespec.engine.formats.safetensors_headers import Tensor
from pipespec.engine.formats.slice_tensors import EMBEDDING_NAME, LAYER, needed, part_of
from pipespec.engine.formats.stored import KeptLayer, KeptMatrix, Storage
from pipespec.engine.ggml.library import TYPES as GGML_TYPES
from pipespec.engine.precision import name_of
from pipespec.errors import ModelError
from pipespec.system.result_cache import cached_call

if TYPE_CHECKING:  # not needed if the header is cached
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType

    from pipespec.engine.formats.gguf_blocks import BlockWeights, GgmlWeights

# The format of weights in memory.
GGUF = "gguf"
SUFFIX = ".gguf"
# The version of cached headers: increase it when `_read` changes its result.
FORM = 7
# The types that stay in their bits on every device, and those of them that become packed integers
# on a GPU in bfloat16, with two numbers for each group of 32.
INT4_KINDS = ("Q4_0", "Q4_1", "Q4_K")
KEPT_KINDS = (*INT4_KINDS, "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "MXFP4")
PLAIN_KINDS = ("F32", "F16", "BF16")
INT4_BYTES = 20 / 32


@dataclass(frozen=True)
class GgufHeader:
    """The header of a file.

    Attributes:
        settings: the config of Transformers, as in config.json.
        tensors: of each name of a checkpoint the fields of `gguf_tensors.Stored`.
        type_of: the type of each tensor and bytes of a number, by its name in the file.
        eos: token ids that end a text.
        permuted: parts of names in the file of matrices whose rows are in llama.cpp's order.
        shifted: norms are stored plus 1.
    """

    settings: Mapping[str, Any]
    tensors: Mapping[str, Any]
    type_of: Mapping[str, Any]
    eos: list[int]
    permuted: list[str]
    shifted: bool

    @cached_property
    def stored(self) -> dict[str, Stored]:
        """Each tensor, by its name in a checkpoint."""
        return {
            name: Stored(tuple(names), tuple(shape), expert, form)
            for name, (names, shape, expert, form) in self.tensors.items()
        }

    @cached_property
    def kept(self) -> dict[str, str]:
        """The type of each matrix of the layers that stays in few bits, by its name."""
        return self._matrices(KEPT_KINDS, layers=True)

    @cached_property
    def of_ggml(self) -> dict[str, str]:
        """The type of each matrix that ggml can multiply, by its name."""
        return self._matrices(GGML_TYPES, layers=False)

    def _matrices(self, types: Collection[str], *, layers: bool) -> dict[str, str]:
        """The type of each matrix of one of these types, by its name; with `layers`, of a layer."""
        found: dict[str, str] = {}
        for name, each in self.stored.items():
            kinds = {self.type_of[theirs][0] for theirs in each.names}
            kind = kinds.pop()
            if kinds or kind not in types or (layers and not LAYER.search(name)):
                continue
            if each.form == TRANSPOSED:
                found |= {f"{name}.{expert}": kind for expert in range(each.shape[0])}
            elif len(each.shape) == 2 and each.form == ROWS and name.endswith(WEIGHT):
                found[name.removesuffix(WEIGHT)] = kind
        # Transformers has gate and up in one stack.
        return {
            name: kind
            for name, kind in found.items()
            if (partner := partner_of(name)) is None or partner in found
        }

    @property
    def ends(self) -> tuple[int, int]:
        """Bytes of the embedding and of an output head of its own, as the file has them."""
        found = [0, 0]
        for name, each in self.stored.items():
            if len(each.shape) == 2 and not LAYER.search(name):
                kind, num_bytes = self.type_of[each.names[0]]
                is_head = EMBEDDING_NAME.search(name) is None
                each_weight = num_bytes if kind in GGML_TYPES else 4
                found[is_head] += int(math.prod(each.shape) * each_weight)
        return found[0], found[1]

    @property
    def kept_layers(self) -> tuple[KeptLayer, ...]:
        """What stays in few bits in each layer."""
        found = [KeptLayer()] * int(self.settings["num_hidden_layers"])
        for name, each in self.stored.items():
            layer, (kind, num_bytes) = LAYER.search(name), self.type_of[each.names[0]]
            if layer is None or kind in PLAIN_KINDS:
                continue
            count = math.prod(each.shape)
            matrix = f"{name}.0" if each.form == TRANSPOSED else name.removesuffix(WEIGHT)
            if matrix in self.kept:
                out = each.shape[-1 if each.form == TRANSPOSED else 0]
                num_bytes = INT4_BYTES if is_int4(kind, out) else num_bytes
                found[int(layer[1])] += KeptLayer(count, int(count * num_bytes))
            else:
                found[int(layer[1])] += KeptLayer(expanded=count)
        return tuple(found)


def is_int4(kind: str, out: int) -> bool:
    """Whether a matrix with so many rows of these blocks can become packed integers."""
    return kind in INT4_KINDS and out % INT4_OUT_MULTIPLE == 0


def is_gguf(path: str | Path) -> bool:
    """Whether this is the name of a GGUF file."""
    return str(path).endswith(SUFFIX) and not os.path.isdir(path)


def header(path: Path) -> GgufHeader:
    """The header of a file, read or from the cache. Raises ModelError."""
    packages = {name: importlib.metadata.version(name) for name in ("transformers", "gguf")}
    return cached_call("gguf", GgufHeader, {**identity(path), **packages}, _read, path)


def identity(path: Path) -> dict[str, Any]:
    """What identifies a version of a checkpoint in the cache, without reading it. Raises
    ModelError."""
    try:
        stats = [part.stat() for part in _parts_here(path)]
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); make it readable") from error
    sizes = [(stat.st_size, stat.st_mtime_ns) for stat in stats]
    return {"form": FORM, "file": str(path.absolute()), "parts": sizes}


def require_tokenizer(path: Path) -> None:
    """Raise ModelError if the tokenizer in a file is of a kind that is not read."""
    file = GgufFile(parts_of(path)[0])
    kind, split = (file.metadata(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind is not None and (why := gguf_tokenizer.refusal(kind, split)) is not None:
        raise ModelError(f"the tokenizer in {path} cannot be used ({why}); {FOREIGN}")


def _parts_here(path: Path) -> tuple[Path, ...]:
    """The files of a checkpoint. Raises ModelError if one is missing."""
    parts = parts_of(path)
    for part in parts if parts[1:] else ():
        if not part.is_file():
            raise ModelError(
                f"{parts[0]} is the first of {len(parts)} files, of which {part.name} is missing; "
                "put it there too"
            )
    return parts


class GgufFiles:
    """A GGUF file, or several, of which the path is that of the first, with the members of
    `SafetensorsFolder`."""

    kept_format = GGUF
    by_package = False
    dtype = "F16"  # of a model whose config names none

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def header(self) -> GgufHeader:
        return header(self.path)

    @cached_property
    def places(self) -> GgufFile:
        """Where each tensor is, and its numbers."""
        return _reader(self.path)

    @property
    def raw(self) -> Mapping[str, Any]:
        return self.header.settings

    def headers(self, parts: Collection[str] | None = None) -> dict[str, Tensor]:
        stored = self.header.stored
        names = stored if parts is None else needed(stored, parts)
        return {name: Tensor.of(stored[name].shape, "F32") for name in names}

    def storage(self) -> Storage:
        found = self.header
        return Storage(None, GGUF, found.kept_layers, GGUF, found.ends)

    def units(self) -> Units:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        columns = {
            GGML_QUANT_SIZES[GGMLQuantizationType[self.header.type_of[theirs][0]]][0]
            for name, each in self.header.stored.items()
            if LAYER.search(name) and len(each.shape) > 1
            for theirs in each.names
        }
        return Units(INT4_OUT_MULTIPLE if self.header.kept else 1, math.lcm(*columns))

    def weight_files(self) -> tuple[Path, ...]:
        return parts_of(self.path)

    def names_by_file(self, parts: Collection[str]) -> dict[Path, dict[str, str]]:
        stored, places = self.header.stored, self.places.tensors
        found: dict[Path, dict[str, str]] = {}
        for name in needed(stored, parts):
            for number, in_file in enumerate(stored[name].names):
                of_file = found.setdefault(places[in_file].file, {})
                of_file[f"{name} ({in_file})" if number else name] = in_file
        return found

    def config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(**self.header.settings)

    def eos(self, default: Any) -> tuple[int, ...]:
        return tuple(self.header.eos)

    def tokenizer_state(self) -> Any:
        return identity(self.path)

    def tokenizer(self) -> Any:
        backend, template, special = gguf_tokenizer.load_tokenizer(self.places.metadata)
        return SimpleNamespace(
            backend_tokenizer=backend, chat_template=template, special_tokens_map=special
        )

    def tokenizer_refused(self, reason: str) -> ModelError:
        return ModelError(f"the tokenizer in {self.path} cannot be used ({reason}); {FOREIGN}")

    # --- tensors ------------------------------------------------------------------------------

    def tensor(self, name: str, dtype: torch.dtype) -> LazyTensor:
        """It is dequantised when it is read, to float32; a matrix of no layer, which are the
        largest, becomes `dtype`: models may have some of a layer in float32."""
        import torch

        stored = self.header.stored[name]
        dtype = torch.float32 if LAYER.search(name) else dtype
        return LazyTensor(stored.shape, STORED[name_of(dtype)], partial(self._dense, stored, dtype))

    def kept(
        self, parts: Collection[str], *, with_ggml: bool, divided: bool
    ) -> dict[str, KeptMatrix]:
        """With ggml they are views of the mapped file, else copies."""
        found = self.header.of_ggml if with_ggml and not divided else self.header.kept
        read = self._of_ggml if with_ggml else self._blocks
        return {
            name: KeptMatrix(kind, partial(read, stored_matrix(self.header.stored, name), kind))
            for name, kind in found.items()
            if part_of(f"{name}{WEIGHT}") in parts
        }

    def _read(self, stored: Stored, theirs: str, part: Part) -> np.ndarray:
        """Rows and columns of a tensor as they are stored, the rows in Hugging Face's order."""
        data = self._data(stored, theirs)
        if part != WHOLE:
            assert stored.form in (ROWS, LATENT), "transposed stacks are read as a whole"
        if stored.form == LATENT:
            return data[per(part[0], stored.shape[0] // len(data))]
        rows, columns = part
        if columns != slice(None):
            size, num_bytes = self._block(theirs)
            blocks = per(columns, size)
            scale = num_bytes if data.dtype == "u1" else 1  # else numbers
            data = data[..., blocks.start * scale : blocks.stop * scale]
        order = self._order(theirs, len(data))
        return data[rows] if order is None else data[order[rows]]

    def _data(self, stored: Stored, theirs: str) -> np.ndarray:
        data = self.places.data(theirs)
        return data if stored.expert is None else data[stored.expert]

    def _order(self, theirs: str, count: int) -> np.ndarray | None:
        """Which row each of Hugging Face's rows is: those of the halves of a head take turns in the
        file. None: they are in order."""
        import numpy as np

        settings = self.header.settings
        heads = settings["num_attention_heads"]
        of = {".attn_q.": heads, ".attn_k.": settings.get("num_key_value_heads") or heads}
        found = [of[name] for name in self.header.permuted if name in theirs]
        if not found:
            return None
        return np.arange(count).reshape(found[0], -1, 2).swapaxes(1, 2).reshape(-1)

    def _kind(self, theirs: str) -> GGMLQuantizationType:
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType(self.places.tensors[theirs].kind)

    def _block(self, theirs: str) -> tuple[int, int]:
        """Numbers and bytes of a block of a tensor."""
        from gguf import GGML_QUANT_SIZES

        return GGML_QUANT_SIZES[self._kind(theirs)]

    def _dense(self, stored: Stored, dtype: torch.dtype, part: Part) -> torch.Tensor:
        import torch
        from gguf import dequantize

        if stored.form == ROWS and len(stored.names) == 1 and len(stored.shape) == 2:
            name, kind = stored.names[0], self._kind(stored.names[0])
            found = part_shape(stored.shape, part)
            weights = torch.empty(found, dtype=dtype)
            # A matrix of one row may be stored as a vector.
            rows = self._read(stored, name, part).reshape(found[0], -1)
            for some in row_parts(found):
                weights[some] = torch.tensor(dequantize(rows[some], kind))
            return weights
        parts = [
            dequantize(self._read(stored, theirs, part), self._kind(theirs))
            for theirs in stored.names
        ]
        numbers = joined(stored.form, parts)
        if self.header.shifted and stored.names[0].endswith("norm.weight"):
            numbers = numbers - 1
        if not numbers.flags.writeable:
            numbers = numbers.copy()
        shape = stored.shape if part == WHOLE else numbers.shape
        return torch.from_numpy(numbers).reshape(shape)

    def _blocks(self, stored: Stored, kind: str, part: Part) -> BlockWeights:
        import torch

        from pipespec.engine.formats.gguf_blocks import BlockWeights

        found = in_turns([self._read(stored, theirs, part) for theirs in stored.names])
        if not found.flags.writeable:  # it is the file's
            found = found.copy()
        return BlockWeights(torch.from_numpy(found), kind)

    def _of_ggml(self, stored: Stored, kind: str, part: Part) -> GgmlWeights:
        import torch

        from pipespec.engine.formats.gguf_blocks import GgmlWeights

        order = None
        parts: tuple[np.ndarray, ...]
        if part == WHOLE and len(stored.names) == 1:
            parts = (self._data(stored, stored.names[0]),)
            order = self._order(stored.names[0], len(parts[0]))
        else:
            parts = tuple(self._read(stored, theirs, part) for theirs in stored.names)
        size, num_bytes = self._block(stored.names[0])
        out = sum(map(len, parts))
        if stored.form == ROWS:  # a matrix of one row may be stored as a vector
            out = len(range(stored.shape[-2])[part[0]])
        columns = sum(each.nbytes for each in parts) // out // num_bytes * size
        permuted = None if order is None else torch.from_numpy(order)
        return GgmlWeights(parts, kind, (out, columns), permuted)


def _reader(path: Path) -> GgufFile:
    """The metadata of the first file of a checkpoint, and the tensors of all. Raises ModelError if
    they do not belong together."""
    parts = _parts_here(path)
    first, *others = found = list(map(GgufFile, parts))
    for number, each in enumerate(found if others else ()):
        said = tuple(each.metadata(f"split.{name}") for name in ("no", "count"))
        if said != (number, len(parts)):
            raise ModelError(
                f"{parts[number]} is not what it is called, part {number + 1} of {len(parts)}; "
                "fetch it again"
            )
    for other in others:
        first.add_tensors(other)
    return first


def _read(path: Path) -> GgufHeader:
    require_tokenizer(path)
    reader = _reader(path)
    from gguf import GGMLQuantizationType

    architecture = architecture_of(path, reader)
    _require_types(path, reader)
    types = {
        name: (
            GGMLQuantizationType(each.kind).name,
            (each.stop - each.start) / max(math.prod(each.shape), 1),
        )
        for name, each in reader.tensors.items()
    }
    config = config_of(path, reader, architecture)
    names = names_of(path, reader, architecture, config)
    return GgufHeader(
        config.to_dict(),
        {name: astuple(each) for name, each in names.items()},
        types,
        gguf_tokenizer.ends(reader.metadata),
        list(architecture.permuted),
        architecture.shifted,
    )


def _require_types(path: Path, reader: GgufFile) -> None:
    """Raise ModelError for types that the package does not dequantise."""
    from gguf import GGMLQuantizationType, dequantize

    one_of_each = {each.kind: name for name, each in reader.tensors.items()}
    for number, name in one_of_each.items():
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise ModelError(
                f"{path} holds tensors of a type that gguf does not know ({number}); {FOREIGN}"
            ) from error
        try:
            dequantize(reader.data(name)[:1], kind)
        except Exception as error:
            raise ModelError(
                f"{path} holds tensors of type {kind.name}, which gguf does not dequantise; "
                f"{FOREIGN}"
            ) from error
