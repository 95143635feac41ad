"""A stage with random weights for measurements: it records the time of admission and the newest
batch's plan, and can return to an earlier state."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig

from pipespec.core import Batch
from pipespec.engine.attention.attention_plan import AttentionPlan
from pipespec.engine.slice.kv_allocator import KVSlotAllocator
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.runner import SliceRunner
from pipespec.errors import ConfigError
from pipespec.head.proposer import Context
from pipespec.head.tree import Tree
from tools.inflate import Shape

SEQUENCE = 1
CHUNK = 512  # rows of the text in one batch
SIBLINGS = 4  # at most, of a random tree


class TimedStage(SliceRunner):
    """A stage with random weights, K and V, which records the time of admission and planning."""

    admit_ms = 0.0
    plan: AttentionPlan | None = None  # of the newest batch

    def __init__(
        self, shape: Shape, of: int, layers: range, num_slots: int, where: dict[str, Any]
    ) -> None:
        """`layers` of a model of `of` layers; `where` has `dtype`, `device` and `attention`.

        Raises ConfigError if that attention cannot be used here.
        """
        self.shape = shape
        config = LlamaConfig(
            hidden_size=shape.hidden,
            num_hidden_layers=of,
            intermediate_size=shape.intermediate,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab,
            tie_word_embeddings=shape.tied,
        )
        model = ModelSlice.random(config, layers, num_slots=num_slots, **where)
        if model.refused:
            raise ConfigError(model.refused[0])
        super().__init__(model, num_slots)
        with torch.inference_mode():
            for tensor in self.pool_tensors():
                tensor.normal_()

    def pool_tensors(self) -> list[Tensor]:
        pools = [layer.pool for layer in self.model.attention_layers]
        return [kind for pool in pools for kind in (pool.keys, pool.values)]

    def hold_text(self, context: int) -> Context:
        """Hold `context` committed tokens and nothing else; K and V are what the pools hold."""
        self.release(SEQUENCE)
        self.slots = KVSlotAllocator(
            self.slots.num_slots
        )  # new, so that the text's slots are contiguous
        text = Context(SEQUENCE, [0] * context, list(range(context)))
        for start in range(0, context, CHUNK):
            super()._admit(Batch(0, text.rows(start, min(start + CHUNK, context))))
        return text

    def remember(self) -> Callable[[], None]:
        """A function that restores the present bookkeeping, so that all runs are alike."""
        names = ("slots", "nodes", "pages", "lineages", "_page_of")
        saved = copy.deepcopy({name: getattr(self, name) for name in names})

        def rewind() -> None:
            vars(self).update(copy.deepcopy(saved))

        return rewind

    def batch(self, rows: np.ndarray) -> Batch:
        hidden = torch.randn(len(rows), self.model.hidden_size, device=self.model.device)
        return Batch(0, rows, hidden.to(self.model.dtype))

    def _admit(self, batch: Batch) -> tuple[Batch, np.ndarray, np.ndarray]:
        start = time.perf_counter_ns()
        admitted = super()._admit(batch)
        self.admit_ms = (time.perf_counter_ns() - start) / 1e6
        return admitted

    def _plan(self, *admitted: Any) -> AttentionPlan:
        start = time.perf_counter_ns()
        self.plan = super()._plan(*admitted)
        self.admit_ms += (time.perf_counter_ns() - start) / 1e6
        return self.plan

    def work(self, rows: int, context: int) -> dict[str, float]:
        """The least that a step reads, in bytes, and computes, in operations."""
        shape, model = self.shape, self.model
        weights = model.num_weight_bytes
        if model.is_first and not shape.tied:  # of an embedding only the tokens' rows are read
            weights -= shape.vocab * shape.hidden * model.dtype.itemsize
        slot = model.num_kv_bytes / model.num_slots
        scores = len(model.layers) * shape.heads * shape.head_dim * rows * (context + 1)
        return {
            "weight_bytes": weights,
            "kv_bytes": slot * (context + rows),
            "operations": 2 * rows * weights / model.dtype.itemsize + 4 * scores,
        }


def random_tree(nodes: int, context: int, vocab: int) -> Tree:
    """A tree of `nodes` draft tokens: half of the time the deepest node gets children, so that the
    tree is deep, otherwise a random one, so that it is wide."""
    rng = np.random.default_rng(nodes)
    tree = Tree(context - 1, context - 2, 0, context - 1, fed=True)
    while len(tree) <= nodes:
        leaves = np.flatnonzero(~tree.expanded)
        parent = leaves[-1] if rng.random() < 0.5 else rng.choice(leaves)
        children = min(int(rng.integers(1, SIBLINGS, endpoint=True)), nodes + 1 - len(tree))
        tokens = rng.choice(vocab, (1, children), replace=False)
        tree.add_children(np.array([parent]), tokens, np.full((1, children), -np.log(children)))
    return tree


def draft_rows(tree: Tree) -> np.ndarray:
    """All nodes but the root as rows of a batch."""
    return tree.rows(SEQUENCE, np.arange(1, len(tree)))
