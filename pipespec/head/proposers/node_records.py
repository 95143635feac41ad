"""What a proposer remembers of tree nodes until the target has decided what follows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np

from pipespec.core import Verdict
from pipespec.head.proposer import Context
from pipespec.head.tree import Tree

Record = TypeVar("Record")


def drop_pruned(by_node: dict[int, Any], alive: np.ndarray) -> None:
    """Drop the entries of nodes whose ids are not in `alive`, once they are the majority."""
    if len(by_node) > 2 * len(alive):
        kept = set(alive.tolist())
        for node in [node for node in by_node if node not in kept]:
            del by_node[node]


class NodeRecords(Generic[Record]):
    """Records of the nodes of each sequence in the pipeline, by node id."""

    def __init__(self) -> None:
        self._contexts: dict[int, Context] = {}
        self._records: dict[int, dict[int, Record]] = {}

    def __len__(self) -> int:
        """How many sequences there are."""
        return len(self._contexts)

    def start_sequence(self, context: Context) -> None:
        self._contexts[context.sequence] = context
        self._records[context.sequence] = {}

    def end_sequence(self, sequence: int) -> None:
        del self._contexts[sequence], self._records[sequence]

    def update(self, sequence: int, tree: Tree, records: Iterable[tuple[int, Record]]) -> None:
        """Set the records of some nodes by their ids; those of nodes no longer in the tree go."""
        held = self._records[sequence]
        drop_pruned(held, tree.id)
        held.update(records)

    def add(self, sequence: int, node: int, record: Record) -> None:
        """Set the record of a node that has none."""
        self._records[sequence].setdefault(node, record)

    def take_decided(self, verdict: Verdict) -> Iterator[tuple[Record, int, int]]:
        """Remove the record of each node below which the verdict decided a token.

        Yields the record, the token and the token's node id, in the order of the text. Records that
        are added for that node meanwhile are yielded too.
        """
        context, held = self._contexts[verdict.sequence], self._records[verdict.sequence]
        for position in range(verdict.base, len(context.tokens)):
            record = held.pop(context.nodes[position - 1], None)
            if record is not None:
                yield record, context.tokens[position], context.nodes[position]
