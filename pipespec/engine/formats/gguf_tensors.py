"""How tensors of a GGUF file make the tensors of a checkpoint. Pure, but for numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipespec.engine.formats.matrix_packing import WEIGHT

if TYPE_CHECKING:  # headers are read without it
    import numpy as np

# A tensor of the file as it is.
ROWS = "rows"
# A stack `[experts, out, in]`, or the rows of two in turns, transposed to `[experts, in, out]`.
TRANSPOSED = "transposed"
# The numbers of one or two in turns, `[..., out]`.
NUMBERS = "numbers"
# The two parts of the matrix that expands the latent vectors of K and V: for each head the one for
# K, transposed, and the one for V.
LATENT = "latent"


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint.

    Attributes:
        names: of the tensors in the file that it is made of.
        shape: in the checkpoint.
        expert: which of the experts that are stored together it is of; None: of none.
        form: ROWS, TRANSPOSED, NUMBERS or LATENT.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    expert: int | None = None
    form: str = ROWS


def stored_matrix(stored: Mapping[str, Stored], name: str) -> Stored:
    """A matrix that can stay in few bits: a tensor, or of a transposed stack the expert whose
    number ends the name."""
    if (found := stored.get(name + WEIGHT)) is not None:
        return found
    stack, _, expert = name.rpartition(".")
    return replace(stored[stack], expert=int(expert))


def in_turns(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Matrices `[..., rows, columns]`, one or the rows of two in turns."""
    import numpy as np

    if len(parts) == 1:
        return parts[0]
    *outer, rows, columns = parts[0].shape
    return np.stack(parts, -2).reshape(*outer, 2 * rows, columns)


def joined(form: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The weights of a tensor, given those of its parts."""
    import numpy as np

    if form == LATENT:
        keys, values = parts  # [heads, latent, of K], [heads, of V, latent]
        both = np.concatenate((keys.swapaxes(1, 2), values), 1)
        return both.reshape(-1, both.shape[-1])
    if form == NUMBERS:
        return np.stack(parts, -1).reshape(*parts[0].shape[:-1], -1)
    whole = in_turns(parts)
    return whole.swapaxes(-1, -2) if form == TRANSPOSED else whole
