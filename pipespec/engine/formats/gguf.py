"""GGUF files: config, tensors and tokenizer, with the names of a safetensors checkpoint.

Tensors are read one by one, either dequantised (`gguf.dequantize`) or as the blocks of the file.
The rows of Llama's queries and keys are restored to Hugging Face's order. Above 350 lines, as a
format has one implementation of the protocol of stored files.
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
from pipespec.engine.formats.gguf_architectures import architecture_of
from pipespec.engine.formats.gguf_file import FOREIGN, GgufFile, parts_of
from pipespec.engine.formats.gguf_metadata import config_of, require_types
from pipespec.engine.formats.gguf_tensors import (
    LATENT,
    ROWS,
    SHIFTED,
    TRANSPOSED,
    Stored,
    in_turns,
    joined,
    names_of,
    partner_of,
    stored_matrix,
)
from pipespec.engine.formats.matrix_packing import WEIGHT
from pipespec.engine.formats.packing import INT4_OUT_MULTIPLE
from pipespec.engine.formats.safetensors_headers import Tensor
from pipespec.engine.formats.slice_tensors import EMBEDDING_NAME, LAYER, needed, part_of
from pipespec.engine.formats.stored import (
    STORED,
    WHOLE,
    KeptLayer,
    KeptMatrix,
    LazyTensor,
    Part,
    Storage,
    Units,
    part_shape,
    per,
    row_parts,
)
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
# The version of cached headers: increase it when `_read` changes its result.
FORM = 10
# The types that stay in their bits on every device, and those of them that become packed integers
# on a GPU in bfloat16, with two numbers for each group of 32.
INT4_KINDS = ("Q4_0", "Q4_1", "Q4_K")
KEPT_KINDS = (*INT4_KINDS, "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "MXFP4")
PLAIN_KINDS = ("F32", "F16", "BF16")
INT4_BYTES = 20 / 32


def is_int4(kind: str, out: int) -> bool:
    """Whether a matrix with so many rows of these blocks can become packed integers."""
    return kind in INT4_KINDS and out % INT4_OUT_MULTIPLE == 0


def is_gguf(path: str | Path) -> bool:
    """Whether this is the name of a GGUF file."""
    return str(path).endswith(".gguf") and not os.path.isdir(path)


@dataclass(frozen=True)
class GgufHeader:
    """What takes Transformers, or the texts of all tokens: the config, as in config.json; of each
    name of a checkpoint the fields of `gguf_tensors.Stored`; ids of the tokens that end a text."""

    settings: Mapping[str, Any]
    tensors: Mapping[str, Any]
    ends: tuple[int, ...]


class GgufFiles:
    """A GGUF file, or several, of which the path is that of the first, with the members of
    `SafetensorsFolder`."""

    kept_format = GGUF
    by_package = False
    dtype = "F16"  # of a model whose config names none

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def places(self) -> GgufFile:
        """The metadata of the first file, and where each tensor of all is. Raises ModelError if
        they do not belong together."""
        first, *others = found = list(map(GgufFile, parts := parts_of(self.path)))
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

    @cached_property
    def _header(self) -> GgufHeader:
        packages = {name: importlib.metadata.version(name) for name in ("transformers", "gguf")}
        depends = {**self._identity(), **packages, "form": FORM}
        return cached_call("gguf", GgufHeader, depends, self._read)

    def _identity(self) -> dict[str, Any]:
        """What identifies a version of the files, without reading them. Raises ModelError."""
        first, *others = parts = parts_of(self.path)
        absent = next((part.name for part in parts if not part.is_file()), None)
        if others and absent is not None:
            raise ModelError(
                f"{first} is the first of {len(parts)} files, of which {absent} is missing; put it "
                "there too"
            )
        try:
            stats = [part.stat() for part in parts]
        except OSError as error:
            why = f"{self.path} cannot be read ({error.strerror}); make it readable"
            raise ModelError(why) from error
        return {
            "file": str(self.path.absolute()),
            "parts": [(stat.st_size, stat.st_mtime_ns) for stat in stats],
        }

    def _read(self) -> GgufHeader:
        self.require_tokenizer()
        architecture = architecture_of(self.places)
        require_types(self.places)
        config = config_of(self.places, architecture)
        stored = names_of(self.places, architecture, config)
        ends = tuple(gguf_tokenizer.ends(self.places.metadata))
        return GgufHeader(config.to_dict(), {n: astuple(each) for n, each in stored.items()}, ends)

    @property
    def raw(self) -> Mapping[str, Any]:
        return self._header.settings

    @cached_property
    def _stored(self) -> dict[str, Stored]:
        """Each tensor, by its name in a checkpoint."""
        return {
            name: Stored(tuple(names), tuple(shape), *rest)
            for name, (names, shape, *rest) in self._header.tensors.items()
        }

    def least_bytes(self) -> int:
        """Bytes of the layers' weights of few bits, which a CPU holds in no fewer; it is known
        without Transformers. Raises ModelError, also for a tokenizer that is not read."""
        self.require_tokenizer()
        architecture_of(self.places)
        require_types(self.places)
        if self.places.field("nextn_predict_layers"):  # these layers are not decoded
            return 0
        return sum(
            place.stop - place.start
            for name, place in self.places.tensors.items()
            if name.startswith("blk.") and self._type(name)[0].name not in PLAIN_KINDS
        )

    def headers(self, parts: Collection[str] | None = None) -> dict[str, Tensor]:
        names = self._stored if parts is None else needed(self._stored, parts)
        return {name: Tensor.of(self._stored[name].shape, "F32") for name in names}

    def storage(self, num_layers: int) -> Storage:
        """What stays in few bits in each layer; and bytes of the embedding and of an output head of
        its own, as the file has them."""
        layers, ends = [KeptLayer()] * num_layers, [0, 0]
        kept = self._matrices(KEPT_KINDS, layers=True)
        for name, each in self._stored.items():
            layer, count = LAYER.search(name), math.prod(each.shape)
            of_file, size, num_bytes = self._type(each.names[0])
            kind = of_file.name
            if layer is None:
                if len(each.shape) == 2:
                    is_head = EMBEDDING_NAME.search(name) is None
                    ends[is_head] += int(count * (num_bytes / size if kind in GGML_TYPES else 4))
            elif kind not in PLAIN_KINDS:
                stack = each.form == TRANSPOSED
                if (f"{name}.0" if stack else name.removesuffix(WEIGHT)) in kept:
                    int4 = is_int4(kind, each.shape[-1 if stack else 0])
                    of_kept = count * (INT4_BYTES if int4 else num_bytes / size)
                    layers[int(layer[1])] += KeptLayer(count, int(of_kept))
                else:
                    layers[int(layer[1])] += KeptLayer(expanded=count)
        return Storage(None, GGUF, tuple(layers), GGUF, (ends[0], ends[1]))

    def _matrices(self, types: Collection[str], *, layers: bool) -> dict[str, str]:
        """The type of each matrix of one of these types, by its name; with `layers`, of a layer."""
        found: dict[str, str] = {}
        for name, each in self._stored.items():
            kind, *others = {self._type(theirs)[0].name for theirs in each.names}
            if others or kind not in types or (layers and not LAYER.search(name)):
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

    def units(self) -> Units:
        columns = {
            self._type(theirs)[1]
            for name, each in self._stored.items()
            if LAYER.search(name) and len(each.shape) > 1
            for theirs in each.names
        }
        kept = self._matrices(KEPT_KINDS, layers=True)
        return Units(INT4_OUT_MULTIPLE if kept else 1, math.lcm(*columns))

    def weight_files(self) -> tuple[Path, ...]:
        return parts_of(self.path)

    def names_by_file(self, parts: Collection[str]) -> dict[Path, dict[str, str]]:
        found: dict[Path, dict[str, str]] = {}
        for name in needed(self._stored, parts):
            for number, in_file in enumerate(self._stored[name].names):
                of_file = found.setdefault(self.places.tensors[in_file].file, {})
                of_file[f"{name} ({in_file})" if number else name] = in_file
        return found

    def config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(**self.raw)

    def eos(self, default: Any) -> tuple[int, ...]:
        return self._header.ends

    @property
    def has_tokenizer(self) -> bool:
        """Whether the file tells of one."""
        return self.places.metadata("tokenizer.ggml.model") is not None

    def tokenizer_state(self) -> Any:
        return self._identity()

    def tokenizer(self) -> Any:
        backend, template, special = gguf_tokenizer.load_tokenizer(self.places.metadata)
        return SimpleNamespace(
            backend_tokenizer=backend, chat_template=template, special_tokens_map=special
        )

    def require_tokenizer(self) -> None:
        """Raise ModelError if the tokenizer is of a kind that is not read."""
        field = GgufFile(parts_of(self.path)[0]).metadata
        kind, split = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")
        if kind is not None and (why := gguf_tokenizer.refusal(kind, split)) is not None:
            raise self.tokenizer_refused(why)

    def tokenizer_refused(self, reason: str) -> ModelError:
        return ModelError(f"the tokenizer in {self.path} cannot be used ({reason}); {FOREIGN}")

    def tensor(self, name: str, dtype: torch.dtype) -> LazyTensor:
        """It is dequantised when it is read, to float32; a matrix of no layer, which are the
        largest, becomes `dtype`: models may have some of a layer in float32."""
        import torch

        stored = self._stored[name]
        dtype = torch.float32 if LAYER.search(name) else dtype
        return LazyTensor(stored.shape, STORED[name_of(dtype)], partial(self._dense, stored, dtype))

    def kept(
        self, parts: Collection[str], *, with_ggml: bool, divided: bool
    ) -> dict[str, KeptMatrix]:
        """With ggml they are views of the mapped file, else copies."""
        whole = with_ggml and not divided
        found = self._matrices(GGML_TYPES if whole else KEPT_KINDS, layers=not whole)
        read = self._of_ggml if with_ggml else self._blocks
        return {
            name: KeptMatrix(kind, partial(read, stored_matrix(self._stored, name), kind))
            for name, kind in found.items()
            if part_of(f"{name}{WEIGHT}") in parts
        }

    def _rows(self, stored: Stored, theirs: str, part: Part) -> np.ndarray:
        """Rows and columns of a tensor as they are stored, the rows in Hugging Face's order."""
        data = self._data(stored, theirs)
        if part != WHOLE:
            assert stored.form in (ROWS, SHIFTED, LATENT), "no plan divides transposed stacks"
        if stored.form == LATENT:
            return data[per(part[0], stored.shape[0] // len(data))]
        rows, columns = part
        if columns != slice(None):
            _, size, num_bytes = self._type(theirs)
            blocks = per(columns, size)
            scale = num_bytes if data.dtype == "u1" else 1  # else numbers
            data = data[..., blocks.start * scale : blocks.stop * scale]
        order = stored.order(len(data))
        return data[rows] if order is None else data[order[rows]]

    def _data(self, stored: Stored, theirs: str) -> np.ndarray:
        data = self.places.data(theirs)
        return data if stored.expert is None else data[stored.expert]

    def _type(self, theirs: str) -> tuple[GGMLQuantizationType, int, int]:
        """The type of a tensor, and numbers and bytes of its blocks."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        kind = GGMLQuantizationType(self.places.tensors[theirs].kind)
        return kind, *GGML_QUANT_SIZES[kind]

    def _dense(self, stored: Stored, dtype: torch.dtype, part: Part) -> torch.Tensor:
        import torch
        from gguf import dequantize

        if stored.form == ROWS and len(stored.names) == 1 and len(stored.shape) == 2:
            name, kind = stored.names[0], self._type(stored.names[0])[0]
            found = part_shape(stored.shape, part)
            weights = torch.empty(found, dtype=dtype)
            # A matrix of one row may be stored as a vector.
            rows = self._rows(stored, name, part).reshape(found[0], -1)
            for some in row_parts(found):
                weights[some] = torch.tensor(dequantize(rows[some], kind))
            return weights
        parts = [dequantize(self._rows(stored, n, part), self._type(n)[0]) for n in stored.names]
        numbers = joined(stored.form, parts)
        if not numbers.flags.writeable:
            numbers = numbers.copy()
        return torch.from_numpy(numbers).reshape(stored.shape if part == WHOLE else numbers.shape)

    def _blocks(self, stored: Stored, kind: str, part: Part) -> BlockWeights:
        import torch

        from pipespec.engine.formats.gguf_blocks import BlockWeights

        found = in_turns([self._rows(stored, theirs, part) for theirs in stored.names])
        if not found.flags.writeable:  # it is the file's
            found = found.copy()
        return BlockWeights(torch.from_numpy(found), kind)

    def _of_ggml(self, stored: Stored, kind: str, part: Part) -> GgmlWeights:
        import torch

        from pipespec.engine.formats.gguf_blocks import GgmlWeights

        order = None
        if part == WHOLE and len(stored.names) == 1:
            parts = [self._data(stored, stored.names[0])]
            order = stored.order(len(parts[0]))
        else:
            parts = [self._rows(stored, theirs, part) for theirs in stored.names]
        _, size, num_bytes = self._type(stored.names[0])
        out = sum(map(len, parts))
        if stored.form == ROWS:  # a matrix of one row may be stored as a vector
            out = len(range(stored.shape[-2])[part[0]])
        columns = sum(each.nbytes for each in parts) // out // num_bytes * size
        permuted = None if order is None else torch.from_numpy(order)
        return GgmlWeights(tuple(parts), kind, (out, columns), permuted)
