"""Batches through a slice of layers: the KV of every sequence, and the parent rule over both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from pipespec.core import (
    DECIDED,
    GUESS,
    KIND,
    NOBODY,
    NODE,
    PARENT,
    POSITION,
    SEQUENCE,
    TOKEN,
    Batch,
    Scored,
    Verdict,
)
from pipespec.engine.attention.plan import AttentionPlan
from pipespec.engine.kv import PageTable, SlotPool
from pipespec.engine.lineage import DROPPED, TIP, Lineage, LiveNodes
from pipespec.engine.model import ModelSlice
from pipespec.sampling.decide import Walk, decide
from pipespec.sampling.verifier import Verifier

# Rows whose logits are looked at together when a prompt is told of: a long one has gigabytes.
SCORED_ROWS = 64


class SliceRunner:
    """Computes batches, applies verdicts, drops what died. Knows no rank and no transport."""

    def __init__(self, model: ModelSlice, num_slots: int):
        self.model = model
        self.slots = SlotPool(num_slots)
        self.nodes = LiveNodes()
        self.pages = PageTable()
        self.lineages: dict[int, Lineage] = {}
        self.slots_read = 0  # KV slots that the newest batch attended to, each request's once
        # How long the text is that stays of sequences which are open no more.
        self.retained: dict[int, int] = {}
        self._page_of: dict[int, int] = {}  # the row of each sequence in the page table

    def open(self, sequence: int, parent: int = NOBODY, shared: int = 0) -> None:
        """Know a sequence before its first row comes, so that verdicts about it are kept.

        It begins with the first `shared` tokens of another, which is open or was retained: they
        are computed here, and their slots have one more owner.
        """
        assert self.length(parent) >= shared, "what is to be shared is not here"
        self.lineages[sequence] = Lineage(sequence, self.nodes, shared)
        self._page_of[sequence] = page = self.pages.open()
        if shared:
            self.slots.share(self.pages.begin_as(page, self._page_of[parent], shared))

    def length(self, sequence: int) -> int:
        """How many decided tokens of the sequence are here; of one that nobody knows, none."""
        lineage = self.lineages.get(sequence)
        return self.retained.get(sequence, 0) if lineage is None else lineage.length

    def holds(self, sequence: int, node: int) -> bool:
        """Whether a node of the sequence is computed here and may still come true."""
        return self.lineages[sequence].holds(node)

    def text(self, sequence: int) -> list[int]:
        """The decided tokens of the sequence that are computed here."""
        row = self.pages.tokens[self._page_of[sequence]]
        text: list[int] = row[: self.length(sequence)].tolist()
        return text

    def has_room(self, batch: Batch) -> bool:
        """Whether every row of the batch could have a slot."""
        return len(batch) <= self.slots.num_free

    def compute(self, batch: Batch) -> Batch:
        """Run the batch's valid rows through the slice.

        Returns them with `hidden` `[rows, hidden]`; rows that are not valid (their parent died
        here while they were in flight) are dropped. Raises OutOfSlots.
        """
        batch, plan = self._admit(batch)
        if plan is None:
            self.slots_read = 0
            return replace(batch, hidden=None)
        self.slots_read = int(plan.prefix_length.sum()) + len(plan.tree)
        inputs = batch.hidden
        if inputs is None:
            # An id that only the padding of the target's embedding has is any other to the draft.
            tokens = np.minimum(batch.rows[:, TOKEN], self.model.vocab_size - 1)
            inputs = torch.from_numpy(tokens)
        positions = torch.from_numpy(plan.positions)
        return replace(batch, hidden=self.model.forward(inputs, positions, plan))

    def _admit(self, batch: Batch) -> tuple[Batch, AttentionPlan | None]:
        """Give every valid row a slot and say what it may attend to; None: there is none."""
        for sequence in dict.fromkeys(batch.rows[:, SEQUENCE].tolist()):
            if sequence not in self.lineages:
                self.open(sequence)
        local = self.nodes.admit(batch.rows, self.lineages)
        kept = local != DROPPED
        if not kept.any():
            return batch.select(kept), None
        batch, local = batch.select(kept), local[kept]
        slots = self.slots.allocate(len(local))
        node = local != TIP
        self.nodes.slot[local[node]] = slots[node]
        of_tips = batch.rows[~node]
        pages = np.array([self._page_of[sequence] for sequence in of_tips[:, SEQUENCE].tolist()])
        self.pages.write(pages, of_tips[:, POSITION], slots[~node], of_tips[:, TOKEN])
        return batch, self._plan(batch.rows, local, slots)

    def _plan(self, rows: np.ndarray, local: np.ndarray, slots: np.ndarray) -> AttentionPlan:
        """What rows may attend to that were admitted as `local`.

        All rows of a sequence see what is committed of it up to the first row of this batch. The
        keys beside that are the rows committed after it (a prompt chunk, causal) and then every
        live node.
        """
        nodes, positions = self.nodes, rows[:, POSITION].copy()
        spans = list(_spans(rows))
        prefixes, keys, keys_at, masks = [], [], [], []
        for sequence, span in spans:
            lineage, mine = self.lineages[sequence], local[span]
            live = lineage.live
            num_chunk = len(mine) - int(np.count_nonzero(mine))
            mask = nodes.mask[mine][:, live]
            if num_chunk > 1:
                chunk = slice(span.start + 1, span.start + num_chunk)
                keys.append(slots[chunk])
                keys_at.append(positions[chunk])
                mask = np.hstack((np.tri(len(mine), num_chunk - 1, -1, dtype=bool), mask))
            prefixes.append(lineage.length - max(num_chunk - 1, 0))
            keys.append(nodes.slot[live])
            keys_at.append(nodes.position[live])
            masks.append(mask)
        sizes = [mask.shape[1] for mask in masks]
        return AttentionPlan(
            write=slots,
            positions=positions,
            row_start=np.array([0, *(span.stop for _, span in spans)]),
            pages=self.pages.slots,
            page_row=np.array([self._page_of[sequence] for sequence, _ in spans]),
            prefix_length=np.array(prefixes),
            tree=np.concatenate(keys),
            tree_positions=np.concatenate(keys_at),
            tree_start=np.concatenate(([0], np.cumsum(sizes))),
            mask=np.concatenate([mask.ravel() for mask in masks]),
        )

    def apply(self, verdicts: list[Verdict], nodes: Sequence[int] | None = None) -> None:
        """Commit what the verdicts accepted and free the slots of what they ruled out.

        `nodes`: see `Lineage.apply`, of a single verdict.
        """
        committed: list[int] = []
        pages: list[int] = []
        dead: list[np.ndarray] = []
        for verdict in verdicts:
            lineage = self.lineages.get(verdict.sequence)
            if lineage is not None:
                outcome = lineage.apply(verdict, nodes)
                committed += outcome.committed
                pages += [self._page_of[verdict.sequence]] * len(outcome.committed)
                dead += outcome.dead
        if committed:
            columns = self.nodes.position, self.nodes.slot, self.nodes.token
            self.pages.write(np.array(pages), *(column[committed] for column in columns))
        if dead:
            self.slots.release(self.nodes.slot[np.concatenate(dead)])

    def discard(self, rows: np.ndarray) -> None:
        """Free the slots of guesses that were computed, rows `[k, 6]`, with each of all below it:
        nothing will follow them."""
        for sequence, span in _spans(rows):
            local = self.lineages[sequence].discard(rows[span, NODE].tolist())
            self.slots.release(self.nodes.slot[local])

    def prune(self, batch: Batch) -> Batch:
        """The rows of a computed batch that the verdicts have left alive."""
        keep = [
            kind != GUESS or self.holds(sequence, node)
            for sequence, node, kind in batch.rows[:, [SEQUENCE, NODE, KIND]].tolist()
        ]
        return batch.select(np.array(keep, bool))

    def verdicts(self, batch: Batch, verifier_of: Callable[[int], Verifier]) -> list[Verdict]:
        """What follows each request's tip, as far as this batch tells (last stage only).

        `verifier_of` gives the verifier of a sequence.
        """
        walks: dict[int, Walk] = {}
        asked: list[np.ndarray] = []  # which rows each of them is through
        for sequence, span in _spans(batch.rows):
            mine = span.start + np.flatnonzero(batch.rows[span, KIND] != DECIDED)
            nodes, parents, guesses = batch.rows[mine][:, [NODE, PARENT, TOKEN]].T.tolist()
            tip = self.lineages[sequence].tip
            if tip in nodes:
                walks[sequence] = Walk(tip, nodes, parents, guesses)
                asked.append(mine)
        if not asked:
            return []
        verifiers = [verifier_of(sequence) for sequence in walks]
        for sequence, verifier in zip(walks, verifiers, strict=True):
            if verifier.reads:
                verifier.read(self.text(sequence))
        decided = [self.lineages[sequence].decided for sequence in walks]
        assert decided == [v.length for v in verifiers], "a verifier has missed a token"
        decide(
            [*zip(verifiers, walks.values(), strict=True)],
            self._logits(batch, np.concatenate(asked)),
        )
        return [
            Verdict(sequence, base, tuple(walk.tokens), tuple(walk.reports), walk.failed)
            for (sequence, walk), base in zip(walks.items(), decided, strict=True)
        ]

    def scores(
        self, batch: Batch, verifier_of: Callable[[int], Verifier]
    ) -> list[tuple[int, Scored]]:
        """What the target thinks of the prompts in this batch, of the sequences that ask for it
        (last stage only)."""
        found = []
        for sequence, span in _spans(batch.rows):
            verifier = verifier_of(sequence)
            if not verifier.unscored:
                continue
            decided = span.start + np.flatnonzero(batch.rows[span, KIND] != GUESS)
            decided = decided[: verifier.unscored]
            for start in range(0, len(decided), SCORED_ROWS):
                mine = decided[start : start + SCORED_ROWS]
                told = verifier.score(batch.rows[mine, TOKEN].tolist(), self._logits(batch, mine))
                found.append((sequence, told))
        return found

    def _logits(self, batch: Batch, rows: np.ndarray) -> torch.Tensor:
        """Of some rows of a computed batch."""
        assert batch.hidden is not None
        wanted = torch.from_numpy(rows).to(batch.hidden.device)
        return self.model.logits(batch.hidden.index_select(0, wanted))

    def release(self, sequence: int, keep: int = 0) -> None:
        """A sequence is open no more: free what it held beside the first `keep` tokens of its text,
        which stay for others to share. Of one whose text had stayed, so many still do."""
        lineage = self.lineages.pop(sequence, None)
        if lineage is None and sequence not in self.retained:
            return
        length = self.retained.pop(sequence, 0) if lineage is None else lineage.length
        assert keep <= length, "what is to be kept is not here"
        if lineage is not None:
            self.slots.release(self.nodes.slot[lineage.release()])
        page = self._page_of[sequence]
        self.slots.release(self.pages.slots[page, keep:length])
        if keep:
            self.retained[sequence] = keep
        else:
            self.pages.close(self._page_of.pop(sequence))

    def check_integrity(self) -> None:
        """Assert that every slot has as many owners as are counted (see pipespec.engine.kv)."""
        owned = [
            self.pages.slots[page, : self.length(sequence)]
            for sequence, page in self._page_of.items()
        ]
        for lineage in self.lineages.values():
            lineage.check()
            owned.append(self.nodes.slot[lineage.live])
        owners = np.zeros(self.slots.num_slots, np.int64)
        for slots in owned:
            np.add.at(owners, slots, 1)
        assert (owners == self.slots.counts).all(), "a slot has other owners than are counted"
        free = np.sort(self.slots.free())
        assert np.array_equal(free, np.flatnonzero(owners == 0)), "a slot is lost or free twice"
        assert self._page_of.keys() == self.lineages.keys() | self.retained.keys()


def _spans(rows: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Each sequence of a batch, whose rows stand together, and where they stand."""
    if not len(rows):
        return
    sequence = rows[:, SEQUENCE]
    bounds = [0, *(np.flatnonzero(sequence[1:] != sequence[:-1]) + 1).tolist(), len(rows)]
    for start, stop in pairwise(bounds):
        yield int(sequence[start]), slice(start, stop)
