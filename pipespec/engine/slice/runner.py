"""Runs batches through a slice of layers, with the KV cache and the parent rule of every
sequence. Above 350 lines, as the books change with what is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from pipespec.core import (
    COMMITTED,
    DRAFT,
    KIND,
    NO_MEMORY,
    NO_PARENT_SEQUENCE,
    NODE,
    PARENT,
    POSITION,
    SEQUENCE,
    TOKEN,
    Batch,
    PromptLogprobs,
    Verdict,
)
from pipespec.engine.attention.attention_plan import AttentionPlan, Segment
from pipespec.engine.slice.kv_allocator import KVSlotAllocator, PageTable
from pipespec.engine.slice.memory_failures import MemoryFailures
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.parent_rule import DROPPED, TIP, Lineage, LiveNodes
from pipespec.sampling.sampling_state import SamplingState
from pipespec.sampling.verifier import AcceptedPath, verify_batch, verify_plain_greedy
from pipespec.system.device_copy import to_device

# Prompt rows whose logits are computed together, as those of a long prompt take gigabytes.
SCORED_ROWS = 64


class SliceRunner:
    """Computes batches, applies verdicts, and frees the KV slots of rows that they ruled out.

    It knows neither ranks nor transports: stages and drafts use it alike.

    Attributes:
        slots_read: KV slots that the newest batch attended to, those of each sequence once.
        cached: retained sequences, and how many of their tokens are retained.
        memory: the sequences for whose rows there was none.
    """

    def __init__(self, model: ModelSlice, num_slots: int):
        self.model = model
        self.slots = KVSlotAllocator(num_slots)
        self.nodes = LiveNodes()
        self.pages = PageTable()
        self.lineages: dict[int, Lineage] = {}
        self.slots_read = 0
        self.cached: dict[int, int] = {}
        self.memory = MemoryFailures(contained=model.parallel.size == 1 and not model.recurrent)
        self._page_of: dict[int, int] = {}  # the row of each sequence in the page table
        self._undecided: Batch | None = None  # rows at or below tips that wait for a mask

    def start_sequence(
        self,
        sequence: int,
        parent: int = NO_PARENT_SEQUENCE,
        shared: int = 0,
        prompt_len: int = 0,
        tip: int | None = None,
    ) -> None:
        """Add a sequence with a prompt of so many tokens, so that verdicts on it are applied even
        before its first row arrives. It shares the first `shared` tokens of `parent`, a running or
        retained sequence; `tip`: see `Lineage`."""
        assert self.length(parent) >= shared, "the prefix to share is not here"
        self.lineages[sequence] = Lineage(sequence, self.nodes, shared, prompt_len, tip)
        self._page_of[sequence] = page = self.pages.allocate_row()
        if shared:
            slots = self.pages.share_prefix(page, self._page_of[parent], shared)
            self.slots.share(slots)
            self.model.recurrent.start_from(page, slots)

    def compute(self, batch: Batch) -> Batch:
        """Run the batch's valid rows through the slice and return them with `hidden`
        `[rows, columns]`: hidden states, and behind them the features that earlier slices and this
        one deliver; others, whose parent was ruled out meanwhile, are dropped. The `hidden` of
        sequences for which there was no memory is NaN; the batch names those that are new. Raises
        OutOfSlots."""
        self.memory.failed.update(batch.failed)
        self.slots_read = 0
        batch, local, slots = self._admit(batch)

        def forward(kept: np.ndarray) -> torch.Tensor:
            part = batch if kept.all() else batch.select(kept)
            plan = self._plan(part, local[kept], slots[kept])
            self.slots_read = sum(len(each.prefix) + len(each.tree) for each in plan.segments)
            inputs = part.hidden
            if inputs is None:
                # Ids beyond the draft's embedding are padding of the target's, so any id will do.
                tokens = np.minimum(part.rows[:, TOKEN], self.model.vocab_size - 1)
                inputs, before = torch.from_numpy(tokens), None
            else:
                inputs, before = inputs.tensor_split([self.model.input_size], 1)
            found = self.model.forward(inputs, torch.from_numpy(plan.positions), plan)
            if before is None or not before.shape[1]:
                return found
            hidden, tapped = found.tensor_split([self.model.hidden_size], 1)
            return torch.cat((hidden, before, tapped), 1)

        kept, hidden = self.memory.compute(batch.rows[:, SEQUENCE], forward)
        if not kept.all():
            model = self.model
            columns = model.hidden_size * (1 + len(model.taps))
            if batch.hidden is not None:
                columns += batch.hidden.shape[1] - model.input_size
            shape = len(batch), columns
            whole = torch.full(shape, torch.nan, dtype=model.dtype, device=model.device)
            if hidden is not None:
                whole[to_device(np.flatnonzero(kept), whole.device)] = hidden
            hidden = whole
        return replace(batch, hidden=hidden, failed=self.memory.take_new())

    def _admit(self, batch: Batch) -> tuple[Batch, np.ndarray, np.ndarray]:
        """The valid rows, their local indices, and a slot for each, `[rows]`."""
        for sequence in dict.fromkeys(batch.rows[:, SEQUENCE].tolist()):
            if sequence not in self.lineages:
                self.start_sequence(sequence)
        local = self.nodes.admit(batch.rows, self.lineages)
        kept = local != DROPPED
        batch, local = batch.select(kept), local[kept]
        if not len(local):
            return batch, local, local
        node = local != TIP
        of_tips = batch.rows[~node]
        pages = np.array([self._page_of[sequence] for sequence in of_tips[:, SEQUENCE].tolist()])
        after = -1
        if self.model.reads_in_place and not node.any():
            after = self._order_slots(pages, of_tips[:, POSITION])
        slots = self.slots.allocate(len(local), after)
        self.nodes.slot[local[node]] = slots[node]
        self.pages.write(pages, of_tips[:, POSITION], slots[~node], of_tips[:, TOKEN])
        return batch, local, slots

    def _order_slots(self, pages: np.ndarray, positions: np.ndarray) -> int:
        """Let the slots of the texts before rows at these pages and positions rise with positions,
        by moving K and V behind the first that is above a later one. Returns the last of them.

        As twice as many slots must be free, as many lie behind what was moved; so a token is moved
        once on average, and texts of which others share a part stay as they are.
        """
        last = -1
        for row in [0, *(np.flatnonzero(pages[1:] != pages[:-1]) + 1).tolist()]:
            slots = self.pages.slots[pages[row], : positions[row]]
            if not (slots[1:] > slots[:-1]).all():
                above = slots[:-1] > np.minimum.accumulate(slots[:0:-1])[::-1]
                kept, moved = np.split(slots, [above.argmax()])
                alone = (self.slots.counts[moved] == 1).all()
                if alone and self.slots.num_free >= 2 * len(moved):
                    new = self.slots.allocate(len(moved), kept.max(initial=-1))
                    self.model.move_kv(moved, new)
                    self.slots.release(moved)
                    moved[:] = new  # in the page table
            last = max(last, int(slots.max(initial=-1)))
        return last

    def _plan(self, batch: Batch, local: np.ndarray, slots: np.ndarray) -> AttentionPlan:
        """The attention plan of a batch whose rows have these local indices. All rows of a sequence
        see its committed tokens up to the first row of this batch. The tree keys are the rows that
        are committed after that (a prompt chunk, causal) and every live node."""
        nodes, positions = self.nodes, batch.rows[:, POSITION].copy()
        states = {sequence: state for sequence, *state in batch.kept_states}
        segments = []
        for sequence, span in _spans(batch.rows):
            lineage, page, mine = self.lineages[sequence], self._page_of[sequence], local[span]
            live = lineage.live
            num_chunk = len(mine) - int(np.count_nonzero(mine))
            mask = nodes.mask.take(mine, 0).take(live, 1)  # several times as fast as indexing
            tree, tree_positions = nodes.slot[live], nodes.position[live]
            if num_chunk > 1:
                chunk = slice(span.start + 1, span.start + num_chunk)
                tree = np.concatenate((slots[chunk], tree))
                tree_positions = np.concatenate((positions[chunk], tree_positions))
                mask = np.hstack((np.tri(len(mine), num_chunk - 1, -1, dtype=bool), mask))
            of_prompt = lineage.prompt_len - int(positions[span.start])
            keeps_state, state_number = states.get(sequence, (0, 0))
            segments.append(
                Segment(
                    rows=span,
                    positions=positions[span],
                    prefix=self.pages.slots[page, : lineage.length - max(num_chunk - 1, 0)],
                    tree=tree,
                    tree_positions=tree_positions,
                    mask=mask,
                    page=page,
                    num_prompt=min(max(of_prompt, 0), num_chunk),
                    num_committed=num_chunk,
                    keeps_state=keeps_state,
                    state_number=state_number,
                )
            )
        return AttentionPlan(slots, segments)

    def apply(self, verdicts: list[Verdict], nodes: Sequence[int] | None = None) -> None:
        """Commit the nodes that the verdicts accepted and free the slots of those that they ruled
        out. `nodes`: the `ids` of `Lineage.apply`, if there is a single verdict."""
        committed: list[int] = []
        pages: list[int] = []
        dead: list[np.ndarray] = []
        for verdict in verdicts:
            lineage = self.lineages.get(verdict.sequence)
            if lineage is not None and verdict.tokens:  # its prompt may still be on its way
                followed, died = lineage.apply(verdict, nodes)
                committed += followed
                pages += [self._page_of[verdict.sequence]] * len(followed)
                dead += died
        if committed:
            columns = self.nodes.position, self.nodes.slot, self.nodes.token
            self.pages.write(np.array(pages), *(column[committed] for column in columns))
        if dead:
            self.slots.release(self.nodes.slot[np.concatenate(dead)])

    def prune(self, batch: Batch) -> Batch:
        """The rows of a computed batch without those that verdicts have ruled out since."""
        keep = [
            kind != DRAFT or self.holds(sequence, node)
            for sequence, node, kind in batch.rows[:, [SEQUENCE, NODE, KIND]].tolist()
        ]
        return batch.select(np.array(keep, bool))

    def verify(self, batch: Batch, state_of: Callable[[int], SamplingState]) -> list[Verdict]:
        """Decide the tokens after the tip of each sequence whose tip is in this batch, or in an
        earlier one if a mask was not known then (last stage only), with the sampling states of
        `state_of`."""
        batch = self._with_undecided(batch)
        paths: dict[int, AcceptedPath] = {}
        rows_of: dict[int, np.ndarray] = {}  # the rows of each path
        for sequence, span in _spans(batch.rows):
            mine = span.start + np.flatnonzero(batch.rows[span, KIND] != COMMITTED)
            nodes, parents, tokens = batch.rows[mine][:, [NODE, PARENT, TOKEN]].T.tolist()
            tip = self.lineages[sequence].tip
            if tip in nodes and sequence not in self.memory.failed:
                paths[sequence] = AcceptedPath(tip, nodes, parents, tokens)
                rows_of[sequence] = mine
        plain = all(state_of(sequence).sampling.is_plain_greedy for sequence in paths)
        rows = np.concatenate([*rows_of.values(), np.empty(0, np.int64)])
        score = self.model.best_tokens if plain else self.model.logits
        scores = self._scores(batch, rows, score)
        failed = (*batch.failed, *self.memory.take_new())
        ended = [Verdict(each, state_of(each).length, (), (), NO_MEMORY) for each in failed]
        if scores is None:
            return ended
        paths = {each: path for each, path in paths.items() if each not in self.memory.failed}
        states = [state_of(sequence) for sequence in paths]
        for sequence, state in zip(paths, states, strict=True):
            if state.needs_text:
                state.set_text(self.tokens(sequence))
        decided = [self.lineages[sequence].decided for sequence in paths]
        assert decided == [each.length for each in states], "a sampling state has missed a token"
        parts = [*zip(states, paths.values(), strict=True)]
        if plain:
            verify_plain_greedy(parts, *scores)
        else:
            verify_batch(parts, scores)
        if waiting := [rows_of[each] for each, path in paths.items() if path.row is not None]:
            left = np.concatenate(waiting)
            self._undecided = Batch(batch.step, batch.rows[left], self._hidden(batch, left))
        return ended + [
            Verdict(sequence, base, tuple(path.tokens), tuple(path.logprobs), path.failure)
            for (sequence, path), base in zip(paths.items(), decided, strict=True)
            if path.tokens or path.failure
        ]

    def _with_undecided(self, batch: Batch) -> Batch:
        """A computed batch and the rows that were left before it."""
        left, self._undecided = self._undecided, None
        if left is None:
            return batch
        rows = np.concatenate((left.rows, batch.rows))
        order = np.argsort(rows[:, SEQUENCE], kind="stable")
        size = self.model.hidden_size
        hidden = [each.hidden[:, :size] for each in (left, batch) if each.hidden is not None]
        joined = Batch(batch.step, rows, torch.cat(hidden))
        return replace(joined, rows=rows[order], hidden=self._hidden(joined, order))

    def score_prompts(
        self, batch: Batch, state_of: Callable[[int], SamplingState]
    ) -> list[tuple[int, PromptLogprobs]]:
        """The log-probabilities of the prompt rows in this batch, for the sequences that request
        them (last stage only)."""
        found = []
        for sequence, span in _spans(batch.rows):
            state = state_of(sequence)
            if not state.num_unscored or sequence in self.memory.failed:
                continue
            decided = span.start + np.flatnonzero(batch.rows[span, KIND] != DRAFT)
            decided = decided[: state.num_unscored]
            for start in range(0, len(decided), SCORED_ROWS):
                mine = decided[start : start + SCORED_ROWS]
                logits = self._scores(batch, mine, self.model.logits)
                if logits is None:
                    break
                logprobs = state.score_prompt(batch.rows[mine, TOKEN].tolist(), logits)
                if not state.prompt_failed:
                    found.append((sequence, logprobs))
        return found

    def committed_rows(self, batch: Batch) -> np.ndarray:
        """Which rows of a computed batch are decided text, now that its verdicts were applied; bool
        `[rows]`."""
        kept = np.zeros(len(batch), bool)
        for sequence, span in _spans(batch.rows):
            node = self.lineages[sequence].tip
            for row in reversed(range(span.start, span.stop)):  # children before their parents
                if batch.rows[row, NODE] == node:
                    kept[row], node = True, int(batch.rows[row, PARENT])
        return kept

    def _scores(self, batch: Batch, rows: np.ndarray, score: Callable[[torch.Tensor], Any]) -> Any:
        """What `score` returns for the hidden states of some rows that have not failed."""

        def score_kept(kept: np.ndarray) -> Any:
            return score(self._hidden(batch, rows[kept]))

        return self.memory.compute(batch.rows[rows, SEQUENCE], score_kept)[1]

    def _hidden(self, batch: Batch, rows: np.ndarray) -> torch.Tensor:
        """The hidden states of some rows, without the features behind them."""
        assert batch.hidden is not None
        hidden = batch.hidden[:, : self.model.hidden_size]
        return hidden.index_select(0, to_device(rows, hidden.device))

    def discard(self, rows: np.ndarray) -> None:
        """Remove computed nodes, rows `[k, 6]`, given with all nodes below them."""
        for sequence, span in _spans(rows):
            local = self.lineages[sequence].discard(rows[span, NODE].tolist())
            self.slots.release(self.nodes.slot[local])

    def release(self, sequence: int, keep: int = 0) -> None:
        """Remove a running sequence and retain the first `keep` tokens of it for others to share,
        or shorten a retained one to `keep` tokens; free all other slots."""
        lineage = self.lineages.pop(sequence, None)
        if lineage is None and sequence not in self.cached:
            return
        if self._undecided is not None:
            self._undecided = self._undecided.select(self._undecided.rows[:, SEQUENCE] != sequence)
        length = self.cached.pop(sequence, 0) if lineage is None else lineage.length
        assert keep <= length, "the prefix to retain is not here"
        if lineage is not None:
            self.slots.release(self.nodes.slot[lineage.release()])
        page = self._page_of[sequence]
        self.model.recurrent.end_sequence(page)
        self.slots.release(self.pages.slots[page, keep:length])
        if keep:
            self.cached[sequence] = keep
        else:
            self.pages.free_row(self._page_of.pop(sequence))
            self.memory.forget(sequence)

    def length(self, sequence: int) -> int:
        """The number of the sequence's committed tokens here; 0 if it is unknown."""
        lineage = self.lineages.get(sequence)
        return self.cached.get(sequence, 0) if lineage is None else lineage.length

    def holds(self, sequence: int, node: int) -> bool:
        """Whether a node of the sequence is computed here and not ruled out."""
        return self.lineages[sequence].holds(node)

    def tokens(self, sequence: int) -> list[int]:
        row = self.pages.tokens[self._page_of[sequence]]
        text: list[int] = row[: self.length(sequence)].tolist()
        return text

    def check_integrity(self) -> None:
        """Assert that every slot has as many owners as `KVSlotAllocator` counts."""
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
        assert self.slots.num_free == np.count_nonzero(owners == 0), "a slot is lost"
        assert self._page_of.keys() == self.lineages.keys() | self.cached.keys()


def _spans(rows: np.ndarray) -> Iterator[tuple[int, slice]]:
    """The sequences of a batch, whose rows are contiguous, with the range of their rows."""
    if not len(rows):
        return
    sequence = rows[:, SEQUENCE]
    bounds = [0, *(np.flatnonzero(sequence[1:] != sequence[:-1]) + 1).tolist(), len(rows)]
    for start, stop in pairwise(bounds):
        yield int(sequence[start]), slice(start, stop)
