"""`best_first` for as long as guessing makes the text come faster, `root` otherwise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipespec.head.feed.best_first import BestFirst
from pipespec.head.feed.policy import NOTHING, Expansion, PipelineState
from pipespec.head.feed.root import Root
from pipespec.head.tree import Tree
from pipespec.limits import MAX_COUNT, check_whole

PLAIN = Root()


@dataclass(frozen=True)
class Adaptive(BestFirst):
    """Guess or not, whichever has cost less time per token where this text stands.

    Both ways are measured, as neither predicts the other: guessing decides more tokens per
    step, but its steps may be longer (wider batches, a draft that is slow or shares the
    device). Every `patience` pipeline lengths the way that is not in use is tried again, as
    the text may have changed: guessing for `trial` pipeline lengths, plain decoding for one
    token.
    """

    trial: int = 4
    patience: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("feed.trial", self.trial, 2, MAX_COUNT - 1)
        check_whole("feed.patience", self.patience, self.trial + 1, MAX_COUNT)

    def grow(self, tree: Tree, state: PipelineState) -> Expansion:
        return super().grow(tree, state) if self.guesses(state) else Expansion(NOTHING)

    def feed(self, tree: Tree, state: PipelineState) -> np.ndarray:
        return super().feed(tree, state) if self.guesses(state) else PLAIN.feed(tree, state)

    def guesses(self, state: PipelineState) -> bool:
        """Whether to make guesses now."""
        lengths = state.streak / state.num_stages
        if state.made_guesses or not state.streak:
            if lengths < self.trial:
                return True
            return lengths < self.patience and self._pay(state)
        if lengths < 1:
            return False
        return lengths >= self.patience or self._pay(state)

    @staticmethod
    def _pay(state: PipelineState) -> bool:
        """Whether guesses have been worth their time; False until both ways are measured."""
        if state.guessing is None or state.plain is None:
            return False
        return state.guessing.ms_per_token <= state.plain.ms_per_token
