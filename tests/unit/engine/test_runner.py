"""A stage's books: who owns which slot, after anything that can happen."""

import numpy as np
import pytest
import torch

from pipespec.core import Batch, Verdict
from pipespec.engine.model import ModelSlice
from pipespec.engine.runner import SliceRunner
from pipespec.errors import OutOfSlots
from pipespec.head.source.protocol import Context
from pipespec.head.tree import ROOT, Tree
from tests.helpers import models

NUM_SLOTS = 1000


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ModelSlice:
    torch.set_num_threads(1)
    folder = models.build("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)
    return ModelSlice.load(folder, range(1), num_slots=NUM_SLOTS)


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
                tree.append(parents, tokens, -rng.exponential(size=tokens.shape))
            unfed = np.flatnonzero(~tree.fed)
            chosen = [i for i in unfed.tolist() if tree.fed[tree.parent[i]] or i == ROOT][:16]
            batch = stage.compute(Batch(0, tree.rows(request, np.array(chosen, int))))
            tree.fed[chosen] = True
            if rng.random() < 0.6 and tree.fed[ROOT]:
                children = np.flatnonzero(tree.parent[1:] == ROOT) + 1
                hit = len(children) and rng.random() < 0.7
                token = int(tree.token[rng.choice(children)]) if hit else 60
                stage.apply([Verdict(request, len(context.tokens), (token,))])
                tree.advance(token)
                context.tokens.append(token)
                accepted += 1
                alive = stage.prune(batch)
                # The tip's own row may still have to travel on.
                ids = {*tree.id.tolist(), stage.tables[request].lineage.tip}
                assert all(node in ids for node in alive.rows[:, 1].tolist())
            stage.check_integrity()
        if request % 3:
            stage.release(request)
            stage.check_integrity()
    assert accepted > 300
    for request in range(0, 12, 3):
        stage.release(request)
    assert stage.slots.num_free == NUM_SLOTS


def test_two_requests_in_one_batch_do_not_see_each_other(model):
    alone, together = [], SliceRunner(model, NUM_SLOTS)
    rows = []
    for request, prompt in ((1, [3, 9, 4]), (2, [7, 2])):
        context = Context(request, prompt, list(range(len(prompt))))
        rows.append(context.rows(0))
        alone.append(SliceRunner(model, NUM_SLOTS).compute(Batch(0, rows[-1])).hidden)
    hidden = together.compute(Batch(0, np.concatenate(rows))).hidden
    assert torch.allclose(hidden, torch.cat(alone), atol=1e-5)
    together.check_integrity()


def test_a_batch_without_rows_passes_through(model):
    """What a stage gets while the pipeline fills, and after a verdict ruled everything out."""
    stage = SliceRunner(model, NUM_SLOTS)
    done = stage.compute(Batch(3))
    assert len(done) == len(stage.prune(done)) == 0
    assert stage.verdicts(done, verifier_of=lambda _: pytest.fail("nobody asked")) == []


def test_a_full_pool_says_so(model):
    stage = SliceRunner(model, 4)
    context = Context(1, [1] * 5, list(range(5)))
    with pytest.raises(OutOfSlots, match="5 KV slots are needed but 4 of 4"):
        stage.compute(Batch(0, context.rows(0)))
