"""A request at the head: its text, its tree, what has been counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipespec.core import (
    GUESS,
    KIND,
    NOBODY,
    NODE,
    PARENT,
    SEQUENCE,
    TOKEN,
    Batch,
    Guesses,
    Opening,
    Request,
)
from pipespec.head.feed.policy import PipelineState
from pipespec.head.guide import Guide
from pipespec.head.source.protocol import Context
from pipespec.head.tree import ROOT, Tree
from pipespec.sampling.terms import pack

# Says whether the text so far ends the request: given one more token, True if a stop string
# is complete.
StopCheck = Callable[[int], bool]


# The number of a sequence that is not in the pipeline.
NOT_OPEN = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """One request that is being decoded, or waits for it: its text, its tree, its counts.

    `opening` is what the stages are told of it with the next batch, and `told` whether they were.
    `key` is the text that was known when it began to wait, as the prefix cache compares it; until
    it is opened it `awaits` that a sequence has read so many tokens. `cached` tokens of the prompt
    were in KV when it was opened first. `replayed` tokens of the answer were decided in an earlier
    epoch. `opened_ns` is when it was opened first, which whoever holds a clock says.
    """

    request: Request
    context: Context
    tree: Tree
    stops: StopCheck
    last_position: int
    opening: Opening
    replayed: int
    key: bytes = b""
    awaits: tuple[int, int] = (NOBODY, 0)
    told: bool = False
    cached: int | None = None
    prefilled: int = 0
    waits_since: int = 0  # the step in which the root became one that was not fed
    generated: int = 0
    hits: int = 0
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("steps", "rows", "rounds", "overruns"), 0)
    )
    started_ns: int = 0
    opened_ns: int | None = None
    token_ns: list[int] = field(default_factory=list)
    first_token: dict[str, int] = field(default_factory=dict)
    ended: str | None = None  # why the request was over before this sequence was opened
    guide: Guide | None = None  # if its text must have a form

    @classmethod
    def open(
        cls,
        request: Request,
        stops: StopCheck,
        context_limit: int,
        now: int,
        answer: tuple[int, ...] = (),
        guide: Guide | None = None,
    ) -> Sequence:
        """What waits until it is opened (`begin`).

        `answer` is what an earlier epoch decided: it is read like the prompt, and counts as
        decided now.
        """
        tokens = [*request.prompt, *answer]
        context, tree = _planted(NOT_OPEN, tokens, request)
        last = min(len(request.prompt) + request.max_new_tokens, context_limit) - 1
        terms = pack(request.sampling, request.eos)
        sequence = cls(
            request,
            context,
            tree,
            stops,
            last_position=last,
            opening=Opening(NOT_OPEN, request.id, len(request.prompt), len(tokens), terms),
            replayed=len(answer),
            generated=len(answer),
            started_ns=now,
            token_ns=[now] * len(answer),
            guide=guide,
        )
        for token in answer:
            sequence.ended = sequence.ending(token)
        return sequence

    def begin(self, number: int, parent: int = NOBODY, shared: int = 0) -> None:
        """Enter the pipeline; what was decided is to be read there, from what it shares on."""
        tokens = self.context.tokens
        self.opening = replace(
            self.opening, sequence=number, known=len(tokens), parent=parent, shared=shared
        )
        self.told = False
        self.prefilled = shared
        if self.cached is None:
            self.cached = min(shared, len(self.request.prompt))
        self.context, self.tree = _planted(number, tokens, self.request)
        self.context.parent, self.context.shared = parent, shared

    def leave(self) -> None:
        """Be in the pipeline no more: the number is nobody's now."""
        self.opening = replace(self.opening, sequence=NOT_OPEN)

    @property
    def number(self) -> int:
        """Of the sequence in the pipeline, or NOT_OPEN."""
        return self.opening.sequence

    @property
    def reads_cache(self) -> bool:
        """Whether it may share text: not if its prompt is to be told of, which takes every row."""
        return self.request.sampling.prompt_logprobs is None

    @property
    def known(self) -> int:
        """How many tokens were decided before it was opened, prompt included; they are read as a
        prompt is."""
        return self.opening.known

    @property
    def prompt_left(self) -> int:
        """Tokens that were decided before and have not entered the pipeline."""
        return self.opening.known - self.prefilled

    @property
    def decoding(self) -> bool:
        """Whether a token was decided since this sequence was opened."""
        return len(self.context.tokens) > self.known

    @property
    def held(self) -> int:
        """KV slots that a stage holds for it at most: of the text that was fed, and of guesses.

        A batch comes to a stage after the verdicts that the head knew when it fed it.
        """
        if self.opening.known > self.prefilled:
            return self.prefilled
        return len(self.context.tokens) - 1 + self.tree.num_fed

    @property
    def fed_text(self) -> int:
        """Tokens that are decided and were fed: they are in the KV of every stage when the next
        batch comes there."""
        if self.prompt_left:
            return self.prefilled
        return len(self.context.tokens) - 1 + bool(self.tree.fed[ROOT])

    def accept(self, token: int, now: int) -> str | None:
        """One decided token moves the root; the reason if it is the last one."""
        if not self.first_token:
            self.first_token = dict(self.counts)
        self.tree.advance(token)
        if self.guide is not None:
            self.guide.accept(token)
        # A hit had entered the pipeline before it was decided; a miss must be fed now.
        self.hits += bool(self.tree.fed[ROOT])
        self.context.tokens.append(token)
        self.context.nodes.append(int(self.tree.id[ROOT]))
        self.generated += 1
        self.token_ns.append(now)
        return self.ending(token)

    def ending(self, token: int) -> str | None:
        """Why the newest token of the answer is the last one; None: it is not."""
        if token in self.request.eos or self.stops(token):
            return "stop"
        return "length" if self.context_full else None

    @property
    def prefill_ns(self) -> int | None:
        """From when it was opened to its first token; None if that was in an earlier epoch, or
        has not come."""
        if self.opened_ns is None or self.replayed or not self.token_ns:
            return None
        return self.token_ns[0] - self.opened_ns

    @property
    def misses_per_step(self) -> float:
        """Tokens that had to be fed after they were decided."""
        return (self.generated - self.replayed - self.hits) / max(self.counts["steps"], 1)

    @property
    def guesses_in_flight(self) -> bool:
        return bool(self.tree.fed[1:].any())

    @property
    def context_full(self) -> bool:
        return len(self.context.tokens) > self.last_position

    @property
    def _near_end(self) -> bool:
        """Whether the tree reaches the last token; its deepest node stands last."""
        return bool(self.tree.position[-1] >= self.last_position)

    def own(self, state: PipelineState) -> PipelineState:
        """What a policy may know, with the end of this text, if its tree comes so far."""
        return replace(state, end=self.last_position) if self._near_end else state

    def useful(self, nodes: np.ndarray) -> np.ndarray:
        """Those of the nodes whose logits can still matter: not the last token, nor beyond."""
        if not self._near_end:
            return nodes
        return nodes[self.tree.position[nodes] < self.last_position]

    def guesses(self, batch: Batch) -> Guesses:
        """Which rows of a batch are guesses of this sequence, and how likely its source found
        them."""
        mine = (batch.rows[:, KIND] == GUESS) & (batch.rows[:, SEQUENCE] == self.number)
        rows = batch.rows[mine]
        by_id = np.argsort(self.tree.id)
        nodes = by_id[np.searchsorted(self.tree.id, rows[:, NODE], sorter=by_id)]
        return Guesses(batch.step, rows[:, PARENT], rows[:, TOKEN], self.tree.logp[nodes])

    def statistics(self) -> dict[str, Any]:
        """Counts of the whole request, and those when its first token came."""
        return {
            "prompt_tokens": len(self.request.prompt),
            "completion_tokens": self.generated,
            "cached_tokens": self.cached or 0,
            "replayed": self.replayed,
            "hits": self.hits,
            "started_ns": self.started_ns,
            "token_ns": self.token_ns,
            "counts": self.counts,
            "first_token": self.first_token,
        }


def _planted(number: int, tokens: list[int], request: Request) -> tuple[Context, Tree]:
    """Positions are numbered from 0; a decided row's node id is its position."""
    root, prompt = len(tokens) - 1, len(request.prompt)
    context = Context(number, list(tokens), list(range(len(tokens))), request.sampling, prompt)
    return context, Tree(root, root - 1, tokens[-1], root, fed=True)
