"""A stage's books: who owns which slot, after anything that can happen."""

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from pipespec.core import NODE, PARENT, Batch, SamplingParams, SequenceStart, Verdict
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.runner import SliceRunner
from pipespec.errors import OutOfSlots
from pipespec.head.proposer import Context
from pipespec.head.proposers.parallel import ParallelDraft
from pipespec.head.tree import ROOT, Tree
from pipespec.sampling.sampling_state import SamplingState
from pipespec.sampling.wire_format import pack
from tests.helpers import models
from tests.helpers.grammar import OneOf, PatientMasks, compiled

NUM_SLOTS = 1000


def rows_of(sequence: int, tokens: list[int], start: int = 0) -> np.ndarray:
    return Context(sequence, tokens, list(range(len(tokens)))).rows(start)


def alone(model: ModelSlice, rows: np.ndarray) -> torch.Tensor:
    """The hidden states of rows that are computed by themselves."""
    hidden = SliceRunner(model, NUM_SLOTS).compute(Batch(0, rows)).hidden
    assert hidden is not None
    return hidden


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ModelSlice:
    torch.set_num_threads(1)
    folder = models.build("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)
    return ModelSlice.load(folder, range(1), num_slots=NUM_SLOTS)


@pytest.mark.slow
def test_every_slot_has_one_owner_after_thousands_of_accepts_and_prunes(model):
    rng = np.random.default_rng(0)
    stage = SliceRunner(model, NUM_SLOTS)
    accepted = 0
    for request in range(12):
        prompt = rng.integers(0, 50, rng.integers(1, 30)).tolist()
        context = Context(request, prompt, list(range(len(prompt))))
        stage.compute(Batch(0, context.rows(0)))
        root = len(prompt) - 1
        tree = Tree(root, root - 1, prompt[-1], root, fed=True)
        for _ in range(90):
            unexpanded = np.flatnonzero(~tree.expanded)
            if len(unexpanded) and len(tree) < 60:
                parents = np.sort(rng.choice(unexpanded, min(3, len(unexpanded)), replace=False))
                tokens = np.stack([rng.permutation(50)[:3] for _ in parents])
                tree.add_children(parents, tokens, -rng.exponential(size=tokens.shape))
            unfed = np.flatnonzero(~tree.fed)
            chosen = [i for i in unfed.tolist() if tree.fed[tree.parent[i]] or i == ROOT][:16]
            batch = stage.compute(Batch(0, tree.rows(request, np.array(chosen, int))))
            tree.mark_fed(np.array(chosen, int))
            if rng.random() < 0.6 and tree.fed[ROOT]:
                children = np.flatnonzero(tree.parent[1:] == ROOT) + 1
                hit = len(children) and rng.random() < 0.7
                token = int(tree.token[rng.choice(children)]) if hit else 60
                stage.apply([Verdict(request, len(context.tokens), (token,))])
                tree.advance([token])
                context.tokens.append(token)
                accepted += 1
                alive = stage.prune(batch)
                # The tip's own row may still have to travel on.
                ids = {*tree.id.tolist(), stage.lineages[request].tip}
                assert all(node in ids for node in alive.rows[:, 1].tolist())
            stage.check_integrity()
        if request % 3:
            stage.release(request)
            stage.check_integrity()
    assert accepted > 300
    for request in range(0, 12, 3):
        stage.release(request)
    assert stage.slots.num_free == NUM_SLOTS


def test_sequences_that_begin_alike_share_slots_and_compute_what_each_does_alone(model):
    """One shares with an open sequence, one with what stayed of another, one with both."""
    rng = np.random.default_rng(1)
    text = rng.integers(0, 50, 40).tolist()
    stage = SliceRunner(model, NUM_SLOTS)
    stage.compute(Batch(0, rows_of(1, text)))
    texts = {2: [*text[:30], 7, 8], 3: [*text[:30], 7, 8, 9], 4: [*text[:20], 6]}
    parents = {2: (1, 30), 3: (2, 31), 4: (3, 20)}
    for sequence, tokens in texts.items():
        parent, shared = parents[sequence]
        stage.start_sequence(sequence, parent, shared)
        if sequence == 3:
            stage.release(1)
            stage.release(2, keep=31)
        stage.check_integrity()
        hidden = stage.compute(Batch(0, rows_of(sequence, tokens, shared))).hidden
        expected = alone(model, rows_of(sequence, tokens))[shared:]
        torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)
        assert stage.tokens(sequence) == tokens
    assert NUM_SLOTS - stage.slots.num_free == 31 + 2 + 1, "each slot once"
    stage.release(2, keep=25)
    stage.release(3)
    stage.check_integrity()
    assert NUM_SLOTS - stage.slots.num_free == 25 + 1
    stage.release(2)
    stage.release(4)
    stage.check_integrity()
    assert stage.slots.num_free == NUM_SLOTS


class Asker:
    """What the head feeds of one request: its prompt in two pieces, guesses and a missed root."""

    def __init__(self, request: int, length: int):
        rng = np.random.default_rng(request)
        self.request = request
        self.text = Context(request, rng.integers(0, 50, length).tolist(), list(range(length)))
        self.cut = int(rng.integers(1, length)) if length > 1 else 0
        root = length - 1
        self.tree = Tree(root, root - 1, self.text.tokens[-1], root, fed=True)
        self.tree.add_children(np.array([ROOT]), np.array([[1, 2]]), np.array([[-0.2, -0.9]]))
        self.tree.add_children(np.array([1]), np.array([[3, 4]]), np.array([[-0.2, -0.9]]))
        self.hit = Verdict(request, length, (1,))
        self.miss = Verdict(request, length + 1, (9,))
        self.missed = Tree(8000, int(self.tree.id[1]), 9, length + 1, fed=False)

    def batches(self) -> list[np.ndarray]:
        """Of each step; the verdicts `hit` and `miss` come before the last but one and the last."""
        return [
            self.text.rows(0, self.cut),
            np.concatenate((self.text.rows(self.cut), self.tree.rows(self.request, [1, 2]))),
            self.tree.rows(self.request, [3, 4]),
            self.missed.rows(self.request, [ROOT]),
        ]


def _decode(model: ModelSlice, askers: list[Asker]) -> tuple[list[torch.Tensor], SliceRunner]:
    """The hidden states of each step, with the requests of a batch in their order."""
    stage = SliceRunner(model, NUM_SLOTS)
    found = []
    for step, parts in enumerate(zip(*(asker.batches() for asker in askers), strict=True)):
        told = {2: [a.hit for a in askers], 3: [a.miss for a in askers]}.get(step, [])
        stage.apply(told)
        stage.check_integrity()
        hidden = stage.compute(Batch(step, np.concatenate(parts))).hidden
        found.append(hidden if hidden is not None else torch.zeros(0, model.hidden_size))
    stage.check_integrity()
    return found, stage


def test_requests_of_one_batch_compute_what_each_does_alone(model):
    """Prompts in pieces, guesses and roots; one text is longer than the page table at first."""
    askers = [Asker(request, length) for request, length in enumerate((3, 1, 300, 2, 17), start=1)]
    together, stage = _decode(model, askers)
    apart = [_decode(model, [asker])[0] for asker in askers]
    for step, hidden in enumerate(together):
        expected = torch.cat([each[step] for each in apart])
        torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)
    assert [len(hidden) for hidden in together[1:]] == [
        sum(len(a.text.tokens) - a.cut + 2 for a in askers), 2 * len(askers), len(askers)
    ]  # fmt: skip
    assert [stage.length(a.request) for a in askers] == [len(a.text.tokens) + 2 for a in askers]
    for asker in askers:
        stage.release(asker.request)
    stage.check_integrity()
    assert stage.slots.num_free == NUM_SLOTS


def test_one_product_with_the_head_decides_for_all_requests(model):
    stage = SliceRunner(model, NUM_SLOTS)
    askers = [Asker(request, length) for request, length in ((1, 5), (2, 9), (3, 1))]
    verifiers = {
        a.request: SamplingState(
            SequenceStart(a.request, a.request, 0, len(a.text.tokens), pack(SamplingParams(), ()))
        )
        for a in askers
    }
    parts = [a.text.rows(0) for a in askers]
    batch = stage.compute(Batch(0, np.concatenate(parts)))
    products = []
    hook = model.model.lm_head.register_forward_hook(
        lambda _, given, __: products.append(given[0].shape[-2])
    )
    found = stage.verify(batch, verifiers.__getitem__)
    hook.remove()
    assert products == [3], "a row of each request, in one product"
    assert [verdict.sequence for verdict in found] == [1, 2, 3]
    for asker, verdict in zip(askers, found, strict=True):
        hidden = alone(model, asker.text.rows(0))
        assert verdict.tokens == (int(model.logits(hidden[-1:]).argmax()),)
        assert verdict.base == len(asker.text.tokens)


class LateMasks(PatientMasks):
    """Masks that no loop receives until `there`."""

    there = False

    def wait_for(self, future: Future[Any]) -> bool:
        return self.there and super().wait_for(future)


def test_text_whose_mask_is_late_delays_no_other_and_loses_no_draft_token(model):
    """It is decided in a later step, also one without rows, by the logits of its own."""
    text, found = [3, 1, 4], {}
    for late in (False, True):
        stage, masks = SliceRunner(model, NUM_SLOTS), LateMasks()
        masks.there = not late
        verifiers = {
            number: SamplingState(
                SequenceStart(number, number, 3, 3, pack(SamplingParams(grammar=grammar), ())),
                lambda _: compiled(OneOf([[7, 9, 2]], 49)),
                masks,
            )
            for number, grammar in ((1, "form"), (2, ""))
        }
        tree = Tree(2, 1, text[-1], position=2, fed=True)
        tree.add_children(np.array([ROOT]), np.array([[7, 8]]), np.log([[0.5, 0.4]]))
        rows = np.concatenate((rows_of(1, text), tree.rows(1, np.array([1, 2])), rows_of(2, text)))
        first = stage.verify(stage.compute(Batch(0, rows)), verifiers.__getitem__)
        stage.apply(first)
        masks.there = True
        second = stage.verify(stage.compute(Batch(1)), verifiers.__getitem__)
        stage.apply(second)
        found[late] = {each.sequence: each.tokens for each in (*first, *second)}
        assert [each.sequence for each in first] == ([2] if late else [1, 2])
        stage.release(1)
        stage.release(2)
        assert stage.slots.num_free == NUM_SLOTS
    assert found[True] == found[False] and found[True][1] == (7, 9)


def test_text_that_ends_before_its_mask_is_there_leaves_nothing(model):
    stage, masks = SliceRunner(model, NUM_SLOTS), LateMasks()
    start = SequenceStart(1, 1, 3, 3, pack(SamplingParams(grammar="form"), ()))
    verifier = SamplingState(start, lambda _: compiled(OneOf([[7]], 49)), masks)
    assert stage.verify(stage.compute(Batch(0, rows_of(1, [3, 1, 4]))), lambda _: verifier) == []
    stage.release(1)
    masks.there = True
    assert stage.verify(stage.compute(Batch(1)), lambda _: verifier) == []
    assert stage.slots.num_free == NUM_SLOTS


def test_masks_see_their_node_and_one_another_and_leave_no_slot_behind(model):
    """Each computes what it would at the end of a text by itself; then nothing of it is left."""
    text, mask = [3, 1, 4, 1, 5], 60
    tree = Tree(4, 3, text[-1], position=4, fed=True)
    tree.add_children(np.array([ROOT]), np.array([[7, 9]]), np.log([[0.5, 0.4]]))
    tree.add_children(np.array([1]), np.array([[2, 6]]), np.log([[0.5, 0.4]]))
    parallel = ParallelDraft(mask, tokens=4, end_position=NUM_SLOTS)
    nodes = np.arange(len(tree))
    masks = parallel.mask_rows(tree, 1, nodes)
    stage = SliceRunner(model, NUM_SLOTS)
    rows = np.concatenate((rows_of(1, text), tree.rows(1, nodes[1:]), masks))
    hidden = stage.compute(Batch(0, rows)).hidden
    assert hidden is not None
    stage.discard(masks)
    stage.check_integrity()
    assert stage.slots.num_free == NUM_SLOTS - len(text) - (len(tree) - 1)
    assert all(not stage.holds(1, node) for node in masks[:, NODE].tolist())
    # The ids are free again, and nobody's parent.
    again = stage.compute(Batch(0, masks)).hidden
    assert again is not None
    torch.testing.assert_close(again, hidden[-len(masks) :], rtol=1e-5, atol=1e-5)
    stage.discard(masks)
    orphan = masks[:1].copy()
    orphan[:, [NODE, PARENT]] = 99, masks[0, NODE]
    assert not len(stage.compute(Batch(0, orphan)))
    stage.apply([Verdict(1, len(text), (7, 6, 8))])
    stage.release(1)
    assert stage.slots.num_free == NUM_SLOTS
    for node, found in zip(nodes.tolist(), hidden[-len(masks) :].split(3), strict=True):
        path = tree.token[tree.path(node)[1:]].tolist()
        expected = alone(model, rows_of(1, [*text, *path, *[mask] * 3]))[-3:]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_batch_without_rows_passes_through(model):
    """What a stage gets while the pipeline fills, and after a verdict ruled everything out."""
    stage = SliceRunner(model, NUM_SLOTS)
    done = stage.compute(Batch(3))
    assert len(done) == len(stage.prune(done)) == 0
    assert stage.verify(done, state_of=lambda _: pytest.fail("nobody asked")) == []


def test_a_full_pool_says_so(model):
    stage = SliceRunner(model, 4)
    with pytest.raises(OutOfSlots, match="5 KV slots are needed but 4 of 4"):
        stage.compute(Batch(0, rows_of(1, [1] * 5)))
