"""What the packings of matrices have in common, whatever their format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from pipespec.engine.checkpoint.formats.lazy import WHOLE, Part
from pipespec.engine.tp_cuts import CutUnits

if TYPE_CHECKING:
    from pipespec.engine.checkpoint.safetensors_headers import Tensor

WEIGHT = ".weight"


class Load(Protocol):
    """The tensors of the files."""

    def __call__(self, name: str, *index: slice) -> Any:
        """A tensor, or a part of it; None: there is none."""
        ...

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor; None: there is none."""
        ...


class MatrixPacking(ABC):
    """The matrices of a checkpoint folder that are not plain.

    Attributes:
        dense_suffix: the end of the name of a plain matrix.
    """

    __slots__ = ()
    dense_suffix = WEIGHT
    # The end of the name of the tensor with the codes of a matrix.
    suffix: str

    def matrices(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """The names of the matrices."""
        return [name.removesuffix(self.suffix) for name in tensors if name.endswith(self.suffix)]

    @property
    @abstractmethod
    def units(self) -> CutUnits:
        """How many rows and columns of the matrices cannot be divided."""

    @abstractmethod
    def keeps(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a matrix can stay as it is."""

    @abstractmethod
    def read(self, name: str, load: Load, part: Part = WHOLE) -> Any:
        """Read a matrix or a part of it, of whole `units`; its `dense()` are the weights. Nothing
        else is read."""

    def readers(
        self, name: str, shape: tuple[int, ...], load: Load
    ) -> dict[str, Callable[[Part], Any]]:
        """Read parts of what can stay as it is: the matrix, or each of several that are stored
        together."""
        return {name: partial(self.read, name, load)} if self.keeps(name, shape) else {}
