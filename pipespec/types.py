"""The nouns that travel between parts. Nothing here imports anything of ours."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

# Columns of `Batch.rows`.
REQUEST, NODE, PARENT, TOKEN, POSITION, KIND = range(6)
NUM_COLUMNS = 6

# Kinds of rows. A decided row (of a prompt, or an accepted token replayed after a failure)
# extends the committed sequence instead of the tree; after the last decided one the target
# is asked what follows.
GUESS, DECIDED, LAST_DECIDED = range(3)

# A node id that no node has: the parent of a request's first row.
NO_NODE = -1


@dataclass(slots=True)
class Batch:
    """The rows that one stage computes in one step.

    Rows are nodes of any depth, of any number of requests, and prompt chunks; a parent
    always stands before its children, here or in an earlier batch.

    `rows` is int64 `[rows, 6]`: request, node, parent, token, position, kind.
    `hidden` is `[rows, hidden]` in the model's dtype, or None where token ids enter the
    first stage. `released` names requests that end here: a stage frees all they hold.
    `stop` ends the worker that receives it, after it has passed the batch on.
    """

    step: int
    rows: np.ndarray = field(default_factory=lambda: np.empty((0, NUM_COLUMNS), np.int64))
    hidden: torch.Tensor | None = None
    released: tuple[int, ...] = ()
    stop: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, keep: np.ndarray) -> Batch:
        """The batch without the rows whose `keep` (bool `[rows]`) is False, order kept."""
        if keep.all():
            return self
        hidden = self.hidden
        if hidden is not None:
            hidden = hidden[torch.from_numpy(np.flatnonzero(keep)).to(hidden.device)]
        return replace(self, rows=self.rows[keep], hidden=hidden)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the last stage decided for one request in one step.

    `tokens` follow the committed sequence; `base` is that sequence's length (prompt
    included) before them, so that a verdict told twice is recognised.
    """

    request: int
    base: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for: the durable part of a request, as the request log keeps it.

    `seed` and the sampling parameters belong to the verifier; greedy ignores them.
    """

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    eos: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
