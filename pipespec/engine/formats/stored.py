"""What the formats of a checkpoint's files have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pipespec.engine.formats.lazy import Part


class StoredTensors(Protocol):
    """The tensors of safetensors files, by name."""

    def shape(self, name: str) -> tuple[int, ...] | None: ...
    def read(self, name: str, *index: Any) -> Any: ...


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
        ends: bytes of the embedding and of an output head of its own that a CPU computes with as
            they are in the file; None: it does not.
    """

    quantization: str | None = None
    dequantized_from: str | None = None
    kept_layers: tuple[KeptLayer, ...] = ()
    kept_format: str | None = None
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
