"""Feed policies: which nodes the draft expands and which enter the pipeline at this step.

A policy is a frozen dataclass with two pure methods over the head's tree. Everything a
decoding method is lies there; the loops, the wire and the workers know none of them. A new
method is one new file beside these and one file in `conf/feed/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pipespec.errors import ConfigError
from pipespec.tree import Tree

NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Growth:
    """What the draft does next: expand `nodes` (indices), keep the best `limit` candidates."""

    nodes: np.ndarray
    limit: int | None = None


class FeedPolicy(Protocol):
    """Attributes: `width`, rows fed per step at most; `children`, candidates per node;
    `capacity`, nodes that the tree may hold."""

    @property
    def width(self) -> int: ...
    @property
    def children(self) -> int: ...
    @property
    def capacity(self) -> int: ...

    def grow(self, tree: Tree) -> Growth:
        """The next draft round; no nodes: the tree is as large as the method wants it."""
        ...

    def feed(self, tree: Tree) -> np.ndarray:
        """Indices of the unfed nodes to feed now, parents first; none: wait.

        A node may be chosen only if its parent was fed or stands before it in the answer.
        """
        ...


def check_at_least(policy: object, **limits: int) -> None:
    """Refuse a policy whose named fields are below their limits."""
    for name, limit in limits.items():
        value = getattr(policy, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < limit:
            raise ConfigError(
                f"feed.{name} is {value}, but must be a whole number from {limit} up."
            )
