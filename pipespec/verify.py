"""What the last stage accepts (design: losslessness).

The target alone decides every token; the tree only says which decisions were computed
early. A verifier draws one token per row of logits; `walk` follows the drawn tokens down
the rows of a batch for as long as the next one was guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pipespec.errors import ConfigError


class Verifier(Protocol):
    def draw(self, logits: torch.Tensor) -> list[int]:
        """The token that follows each row, from the target's logits `[rows, vocab]`."""
        ...


@dataclass(frozen=True)
class Greedy:
    """The arg-max: the text of `generate(do_sample=False)`."""

    temperature: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(
                f"verify.temperature is {self.temperature}, but must be 0 (greedy) or more."
            )
        if self.temperature > 0:
            raise ConfigError(
                f"verify.temperature is {self.temperature}, but verify=greedy decodes at 0 only."
            )

    def draw(self, logits: torch.Tensor) -> list[int]:
        return logits.argmax(-1).tolist()


def walk(
    tip: int,
    nodes: Sequence[int],
    parents: Sequence[int],
    tokens: Sequence[int],
    drawn: Sequence[int],
) -> list[int]:
    """The tokens that follow the tip, as far as this batch tells.

    Args:
        tip: node id of the last committed row.
        nodes, parents, tokens, drawn: the batch's rows `[rows]` and the token drawn after each.

    Returns the drawn tokens along the successor chain: empty if the tip is not in the batch,
    else one more than the number of guesses that were right.
    """
    row_of = {node: i for i, node in enumerate(nodes)}
    row_by_guess = {guess: i for i, guess in enumerate(zip(parents, tokens, strict=True))}
    accepted: list[int] = []
    row = row_of.get(tip)
    while row is not None:
        accepted.append(drawn[row])
        row = row_by_guess.get((nodes[row], drawn[row]))
    return accepted
