"""What the formats of a checkpoint's files have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipespec.engine.formats.lazy import Part
from pipespec.engine.formats.safetensors_headers import Tensor
from pipespec.engine.formats.tp_cuts import CutUnits
from pipespec.errors import ModelError

if TYPE_CHECKING:  # headers are read without them
    import torch


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """How many weights of a layer can stay in the few bits of their files, and their bytes; how
    many of few bits cannot."""

    weights: int = 0
    num_bytes: int = 0
    expanded: int = 0

    def __add__(self, other: KeptLayer) -> KeptLayer:
        return KeptLayer(
            self.weights + other.weights,
            self.num_bytes + other.num_bytes,
            self.expanded + other.expanded,
        )


@dataclass(frozen=True, slots=True)
class Storage:
    """In how many bits the files hold the weights.

    Attributes:
        quantization: the method by which the loaded weights are quantised; None: plain weights.
        dequantized_from: the method of quantised files whose weights are dequantised while they
            load; None: the files are not dequantised.
        kept_layers: what can stay in the few bits of the files, for each layer.
        kept_format: one of KEPT_FORMATS, in which it then is in memory.
        package: the package that reads such files, if pipespec does not.
        ends: bytes of the embedding and of an output head of its own that a CPU computes with as
            they are in the file; None: it does not.
    """

    quantization: str | None = None
    dequantized_from: str | None = None
    kept_layers: tuple[KeptLayer, ...] = ()
    kept_format: str | None = None
    package: str | None = None
    ends: tuple[int, int] | None = None

    def of_layers(self, count: int) -> Storage:
        """The same for so many layers, as the files may have more or fewer."""
        kept = (*self.kept_layers, *[KeptLayer()] * count)[:count] if self.kept_layers else ()
        return replace(self, kept_layers=kept)


@dataclass(frozen=True, slots=True)
class KeptMatrix:
    """A matrix that stays in few bits: the kind of its blocks (`gguf_blocks`), or FP8, and what
    reads a part of it."""

    kind: str
    read: Callable[[Part], Any]


class StoredFiles(Protocol):
    """The files of a checkpoint, in one format. Nothing is read before it is asked for; each
    method raises ModelError.

    Attributes:
        path: what the checkpoint is called by.
        kept_format: see `Storage`.
        by_package: matrices are read by a package of Transformers, as a whole.
        dtype: that of the plain numbers, as safetensors names it.
    """

    path: Path

    @property
    def kept_format(self) -> str | None: ...

    @property
    def by_package(self) -> bool: ...

    @property
    def dtype(self) -> str: ...

    @property
    def raw(self) -> Mapping[str, Any]:
        """The config of the text part, as in config.json."""
        ...

    def headers(self, parts: Collection[str] | None = None) -> Mapping[str, Tensor]:
        """The tensors by name, as those of plain weights where these can be made: of these parts
        (`slice_tensors`), which are here, or of all."""
        ...

    def storage(self) -> Storage: ...

    def units(self) -> CutUnits:
        """How many rows and columns of the matrices cannot be divided."""
        ...

    def weight_files(self) -> tuple[Path, ...]:
        """All that hold tensors, whether they are here or not."""
        ...

    def names_by_file(self, parts: Collection[str]) -> dict[Path, dict[str, str]]:
        """The tensors of these parts in each file: the names in the file by those that Transformers
        has."""
        ...

    def config(self) -> Any:
        """The config as a `PretrainedConfig` of Transformers."""
        ...

    def eos(self, default: Any) -> tuple[int, ...]:
        """The token ids that end a text, given the `eos_token_id` of the config."""
        ...

    def tensor(self, name: str, dtype: torch.dtype) -> Any:
        """A tensor of plain numbers for a model of this type, like a slice of a safetensors file:
        `[rows, columns]` reads a part of it."""
        ...

    def kept(
        self, parts: Collection[str], *, with_ggml: bool, divided: bool
    ) -> dict[str, KeptMatrix]:
        """The matrices of these parts that stay in few bits: `with_ggml` all that ggml multiplies,
        unless members divide them."""
        ...

    def tokenizer_state(self) -> Any:
        """What the tokenizer depends on, for `cached_call`. Raises Unreadable."""
        ...

    def tokenizer(self) -> Any:
        """The tokenizer, with `backend_tokenizer`, `chat_template`, `special_tokens_map`. Raises
        anything."""
        ...

    def tokenizer_refused(self, reason: str) -> ModelError: ...
