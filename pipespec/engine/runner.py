"""Batches through a slice of layers: the KV of every sequence, and the parent rule over both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch

from pipespec.core import (
    DECIDED,
    GUESS,
    KIND,
    NODE,
    PARENT,
    POSITION,
    SEQUENCE,
    TOKEN,
    Batch,
    Verdict,
)
from pipespec.engine.attention.plan import AttentionPlan, Segment
from pipespec.engine.kv import SlotPool
from pipespec.engine.lineage import TIP, Lineage
from pipespec.engine.model import ModelSlice
from pipespec.sampling.verifier import Verifier


@dataclass(slots=True)
class SlotTable:
    """One sequence at one stage: its lineage, and a slot for every row that the lineage holds."""

    lineage: Lineage = field(default_factory=Lineage)
    committed: np.ndarray = field(default_factory=lambda: np.zeros(256, np.int64))
    slot_of: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    num_slots: int = 0  # of `committed` in use; equals lineage.length

    def commit(self, slots: np.ndarray) -> None:
        end = self.num_slots + len(slots)
        if end > len(self.committed):
            room = np.zeros(max(end, 2 * len(self.committed)), np.int64)
            room[: self.num_slots] = self.committed[: self.num_slots]
            self.committed = room
        self.committed[self.num_slots : end] = slots
        self.num_slots = end

    def place(self, local: np.ndarray, slots: np.ndarray) -> None:
        if len(self.slot_of) < len(self.lineage.live):
            room = np.zeros(len(self.lineage.live), np.int64)
            room[: len(self.slot_of)] = self.slot_of
            self.slot_of = room
        self.slot_of[local] = slots

    def held(self) -> np.ndarray:
        """Every slot this sequence owns."""
        live = np.flatnonzero(self.lineage.live)
        return np.concatenate((self.committed[: self.num_slots], self.slot_of[live]))


class SliceRunner:
    """Computes batches, applies verdicts, drops what died. Knows no rank and no transport."""

    def __init__(self, model: ModelSlice, num_slots: int):
        self.model = model
        self.slots = SlotPool(num_slots)
        self.tables: dict[int, SlotTable] = {}

    def open(self, sequence: int) -> None:
        """Know a sequence before its first row comes, so that verdicts about it are kept."""
        self.tables[sequence] = SlotTable()

    def length(self, sequence: int) -> int:
        """How many decided tokens of the sequence are computed here."""
        return self.tables[sequence].lineage.length

    def has_room(self, batch: Batch) -> bool:
        """Whether every row of the batch could have a slot."""
        return len(batch) <= self.slots.num_free

    def compute(self, batch: Batch) -> Batch:
        """Run the batch's valid rows through the slice.

        Returns them with `hidden` `[rows, hidden]`; rows that are not valid (their parent died
        here while they were in flight) are dropped. Raises OutOfSlots.
        """
        batch, plan = self._admit(batch)
        if not len(batch):
            return replace(batch, hidden=None)
        assert plan is not None
        inputs = batch.hidden
        if inputs is None:
            # An id that only the padding of the target's embedding has is any other to the draft.
            tokens = np.minimum(batch.rows[:, TOKEN], self.model.vocab_size - 1)
            inputs = torch.from_numpy(tokens)
        positions = torch.from_numpy(batch.rows[:, POSITION].copy())
        return replace(batch, hidden=self.model.forward(inputs, positions, plan))

    def _admit(self, batch: Batch) -> tuple[Batch, AttentionPlan | None]:
        """Give every valid row a slot and say what it may attend to."""
        if not len(batch):
            return batch, None
        kept = np.zeros(len(batch), bool)
        write: list[np.ndarray] = []
        segments: list[Segment] = []
        start = 0
        for sequence, span in _spans(batch.rows):
            rows = batch.rows[span]
            table = self.tables.setdefault(sequence, SlotTable())
            local = table.lineage.admit(rows).local
            kept[span] = valid = local >= 0
            if not valid.any():
                continue
            slots = self.slots.allocate(int(valid.sum()))
            segments.append(_segment(table, rows[valid], local[valid], slots, start))
            write.append(slots)
            start += len(slots)
        batch = batch.select(kept)
        if not segments:
            return batch, None
        return batch, AttentionPlan(torch.from_numpy(np.concatenate(write)), tuple(segments))

    def apply(self, verdicts: list[Verdict], nodes: Sequence[int] | None = None) -> None:
        """Commit what the verdicts accepted and free the slots of what they ruled out.

        `nodes`: see `Lineage.apply`, of a single verdict.
        """
        for verdict in verdicts:
            table = self.tables.get(verdict.sequence)
            if table is None:
                continue
            outcome = table.lineage.apply(verdict, nodes)
            if outcome.committed:
                table.commit(table.slot_of[outcome.committed])
            if len(outcome.dead):
                self.slots.release(table.slot_of[outcome.dead])

    def prune(self, batch: Batch) -> Batch:
        """The rows of a computed batch that the verdicts have left alive."""
        if not len(batch):
            return batch
        keep = batch.rows[:, KIND] != GUESS
        for sequence, span in _spans(batch.rows):
            keep[span] |= self.tables[sequence].lineage.holds(batch.rows[span, NODE].tolist())
        return batch.select(keep)

    def verdicts(self, batch: Batch, verifier_of: Callable[[int], Verifier]) -> list[Verdict]:
        """What follows each request's tip, as far as this batch tells (last stage only).

        `verifier_of` gives the verifier of a sequence.
        """
        found: list[Verdict] = []
        for sequence, span in _spans(batch.rows):
            lineage = self.tables[sequence].lineage
            mine = span.start + np.flatnonzero(batch.rows[span, KIND] != DECIDED)
            if not (batch.rows[mine, NODE] == lineage.tip).any():
                continue
            assert batch.hidden is not None
            verifier = verifier_of(sequence)
            assert verifier.length == lineage.decided, "the verifier has missed a token"
            logits = self.model.logits(batch.hidden[torch.from_numpy(mine)])
            nodes, parents, guesses = (
                batch.rows[mine, column].tolist() for column in (NODE, PARENT, TOKEN)
            )
            tokens, logprobs = verifier.decide(lineage.tip, nodes, parents, guesses, logits)
            found.append(Verdict(sequence, lineage.decided, tuple(tokens), tuple(logprobs)))
        return found

    def release(self, sequence: int) -> None:
        """Forget a sequence and free all it held."""
        table = self.tables.pop(sequence, None)
        if table is not None:
            self.slots.release(table.held())

    def check_integrity(self) -> None:
        """Assert that every slot has exactly one owner (see pipespec.engine.kv)."""
        owned = [self.slots.free()]
        for table in self.tables.values():
            table.lineage.check()
            assert table.num_slots == table.lineage.length
            owned.append(table.held())
        slots = np.concatenate(owned)
        assert len(slots) == self.slots.num_slots, "a slot is lost or owned twice"
        assert (np.sort(slots) == np.arange(self.slots.num_slots)).all()


def _spans(rows: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Each sequence of a batch, whose rows stand together, and where they stand."""
    if not len(rows):
        return
    sequence = rows[:, SEQUENCE]
    bounds = [0, *(np.flatnonzero(sequence[1:] != sequence[:-1]) + 1).tolist(), len(rows)]
    for start, stop in pairwise(bounds):
        yield int(sequence[start]), slice(start, stop)


def _segment(
    table: SlotTable, rows: np.ndarray, local: np.ndarray, slots: np.ndarray, start: int
) -> Segment:
    """One sequence's part of the plan, and its new slots entered into the books.

    The keys beside the prefix are the rows committed in this batch (a prompt chunk, causal)
    and then every live node.
    """
    lineage = table.lineage
    num_chunk = int(np.count_nonzero(local == TIP))
    prefix = table.committed[: table.num_slots].copy()
    chunk, nodes = slots[:num_chunk], local[num_chunk:]
    table.commit(chunk)
    table.place(nodes, slots[num_chunk:])
    live = np.flatnonzero(lineage.live)
    mask = np.zeros((len(rows), num_chunk + len(live)), bool)
    mask[:num_chunk, :num_chunk] = np.tri(num_chunk, dtype=bool)
    mask[num_chunk:, :num_chunk] = True
    mask[num_chunk:, num_chunk:] = lineage.mask[nodes][:, live]
    return Segment(
        rows=slice(start, start + len(rows)),
        positions=torch.from_numpy(rows[:, POSITION].copy()),
        prefix=torch.from_numpy(prefix),
        tree=torch.from_numpy(np.concatenate((chunk, table.slot_of[live]))),
        tree_positions=torch.from_numpy(
            np.concatenate((rows[:num_chunk, POSITION], lineage.position[live]))
        ),
        mask=torch.from_numpy(mask),
    )
