"""A request at the head: its text, its tree and its counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipespec.core import (
    DRAFT,
    KIND,
    NO_PARENT_SEQUENCE,
    NODE,
    PARENT,
    SEQUENCE,
    TOKEN,
    Batch,
    DraftTokens,
    Request,
    SequenceStart,
)
from pipespec.head.policies.policy import PipelineState
from pipespec.head.prefix_cache import NO_TEXT, TextKey
from pipespec.head.proposer import Context
from pipespec.head.structured_output import GrammarGuide
from pipespec.head.tree import ROOT, Tree
from pipespec.sampling.wire_format import pack

# Called with each token of the answer; returns whether a stop string is complete.
StopCheck = Callable[[int], bool]


# The number of a sequence that is not in the pipeline.
NOT_IN_PIPELINE = -1
# Tokens of a turn, where tenants take turns; as many that were read make it a token longer.
TURN = 16
# Of more decided tokens than these the draft has surely not proposed all.
MOST_UNREAD = 16


@dataclass(slots=True, eq=False)
class Sequence:
    """A running or waiting request: its text, its tree, its counts.

    Attributes:
        last_position: the position of the last token that it may have.
        start: goes to the stages with the next batch, unless it was sent (`start_sent`).
        replayed: tokens of the answer that an earlier epoch decided.
        key: the text that was known when it began to wait, as the prefix cache compares it.
        awaited_prefix: a sequence, and how many tokens it must have read before this one starts.
        cached: tokens of the prompt that were in the KV cache when it first started.
        prefilled: tokens that were fed before decoding, shared ones included.
        root_waits_since: the step since which there has been an unfed root.
        drafted_text: tokens of the text when the draft last proposed any below it.
        hits: decided tokens that had been fed as draft tokens.
        started_ns, admitted_ns: when it was added, and when it first entered the pipeline
            (`HeadLoop` sets it).
        token_ns: when each token of the answer was decided.
        ended: why it was over before it started.
        guide: of a request with a grammar.
    """

    request: Request
    context: Context
    tree: Tree
    stop_check: StopCheck
    last_position: int
    start: SequenceStart
    replayed: int
    key: TextKey = NO_TEXT
    awaited_prefix: tuple[int, int] = (NO_PARENT_SEQUENCE, 0)
    start_sent: bool = False
    cached: int | None = None
    prefilled: int = 0
    root_waits_since: int = 0
    drafted_text: int = 0
    hits: int = 0
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("steps", "rows", "rounds", "overruns"), 0)
    )
    started_ns: int = 0
    admitted_ns: int | None = None
    token_ns: list[int] = field(default_factory=list)
    first_token: dict[str, int] = field(default_factory=dict)
    ended: str | None = None
    guide: GrammarGuide | None = None

    @classmethod
    def create(
        cls,
        request: Request,
        stops: StopCheck,
        context_limit: int,
        now: int,
        answer: tuple[int, ...] = (),
        guide: GrammarGuide | None = None,
    ) -> Sequence:
        """A sequence that waits to enter the pipeline.

        `answer` holds the tokens that an earlier epoch decided: they are read like the prompt, and
        count as decided now.
        """
        tokens = [*request.prompt, *answer]
        context, tree = _new_context_and_tree(NOT_IN_PIPELINE, tokens, request)
        last = min(len(request.prompt) + request.max_new_tokens, context_limit) - 1
        terms = pack(request.sampling, request.eos)
        sequence = cls(
            request,
            context,
            tree,
            stops,
            last_position=last,
            start=SequenceStart(
                NOT_IN_PIPELINE, request.id, len(request.prompt), len(tokens), terms
            ),
            replayed=len(answer),
            started_ns=now,
            token_ns=[now] * len(answer),
            guide=guide,
        )
        for token in answer:
            sequence.ended = sequence.finish_reason(token)
        return sequence

    def enter_pipeline(
        self, number: int, parent: int = NO_PARENT_SEQUENCE, shared: int = 0
    ) -> None:
        """Begin to read the tokens that follow the `shared` ones of `parent`."""
        tokens = self.context.tokens
        self.start = replace(
            self.start, sequence=number, committed_len=len(tokens), parent=parent, shared_len=shared
        )
        self.start_sent = False
        self.prefilled = shared
        self.drafted_text = 0
        if self.cached is None:
            self.cached = min(shared, len(self.request.prompt))
        self.context, self.tree = _new_context_and_tree(number, tokens, self.request)
        self.context.parent, self.context.shared_len = parent, shared

    def leave_pipeline(self) -> None:
        self.start = replace(self.start, sequence=NOT_IN_PIPELINE)

    @property
    def number(self) -> int:
        return self.start.sequence

    @property
    def reads_cache(self) -> bool:
        """Whether it may share a prefix: not with prompt_logprobs, which need every row."""
        return self.request.sampling.prompt_logprobs is None

    @property
    def committed_len(self) -> int:
        """Tokens that were decided before it entered the pipeline, prompt included; they are read
        like a prompt."""
        return self.start.committed_len

    @property
    def prompt_left(self) -> int:
        """Those of them that have not been fed."""
        return self.start.committed_len - self.prefilled

    @property
    def unread(self) -> int:
        """Tokens of the text that the draft has to read before it proposes more; of no more than
        MOST_UNREAD it may have proposed some itself, and they count as none."""
        count = len(self.context.tokens) - self.drafted_text
        return count if count > MOST_UNREAD else 0

    @property
    def decoding(self) -> bool:
        """Whether a token was decided since it entered the pipeline."""
        return len(self.context.tokens) > self.committed_len

    def can_yield_to(self, other: Sequence) -> bool:
        """Whether it can leave the pipeline for a tenant that has no request there: it has decided
        enough since it entered to be worth the text that it has read; or a token, if the other has
        not started yet: a request takes no turn for its first token."""
        decided = len(self.context.tokens) - self.committed_len
        if other.cached is None:
            return decided > 0
        return decided >= max(TURN, (self.committed_len - self.start.shared_len) // TURN)

    @property
    def num_slots_held(self) -> int:
        """KV slots that a stage holds for it at most, for fed text and for draft tokens.

        A batch arrives at a stage after the verdicts that the head knew when it sent it.
        """
        if self.start.committed_len > self.prefilled:
            return self.prefilled
        return len(self.context.tokens) - 1 + self.tree.num_fed

    @property
    def fed_text(self) -> int:
        """Decided tokens that were fed: they are in the KV cache of every stage when the next batch
        arrives there."""
        if self.prompt_left:
            return self.prefilled
        return len(self.context.tokens) - 1 + bool(self.tree.fed[ROOT])

    def accept(self, tokens: Iterable[int], now: int) -> tuple[list[int], str | None]:
        """Move the root along decided tokens, up to the one that ends the request.

        Returns at which depth each was fed as a draft token (0: it must be fed now), and why the
        request ends with the last one, or None.
        """
        first, reason = len(self.context.tokens), None
        for token in tokens:
            self.context.tokens.append(token)
            if self.guide is not None:
                self.guide.accept(token)
            if reason := self.finish_reason(token):
                break
        ids, depths = self.tree.advance(self.context.tokens[first:])
        if ids and not self.first_token:
            self.first_token = dict(self.counts)
        self.context.nodes += ids
        self.hits += sum(depth > 0 for depth in depths)
        self.token_ns += [now] * len(ids)
        return depths, reason

    def finish_reason(self, token: int) -> str | None:
        """Why the request ends with this token of the answer; None: it does not."""
        if token in self.request.eos or self.stop_check(token):
            return "stop"
        return "length" if len(self.context.tokens) > self.last_position else None

    @property
    def prefill_ns(self) -> int | None:
        """From entering the pipeline to the first token; None if that was in an earlier epoch, or
        has not been decided."""
        if self.admitted_ns is None or self.replayed or not self.token_ns:
            return None
        return self.token_ns[0] - self.admitted_ns

    @property
    def _near_end(self) -> bool:
        """Whether the tree reaches the last position; its deepest node is the last one."""
        return bool(self.tree.position[-1] >= self.last_position)

    def policy_state(self, state: PipelineState) -> PipelineState:
        """The state with the end of this text, if its tree reaches that."""
        return replace(state, end=self.last_position) if self._near_end else state

    def drop_past_end(self, nodes: np.ndarray) -> np.ndarray:
        """The nodes whose logits can matter: those before the last position."""
        if not self._near_end:
            return nodes
        return nodes[self.tree.position[nodes] < self.last_position]

    def draft_tokens(self, batch: Batch) -> DraftTokens:
        """The draft tokens of this sequence in a batch, with their log-probabilities."""
        mine = (batch.rows[:, KIND] == DRAFT) & (batch.rows[:, SEQUENCE] == self.number)
        rows = batch.rows[mine]
        by_id = np.argsort(self.tree.id)
        nodes = by_id[np.searchsorted(self.tree.id, rows[:, NODE], sorter=by_id)]
        return DraftTokens(batch.step, rows[:, PARENT], rows[:, TOKEN], self.tree.logp[nodes])

    def statistics(self) -> dict[str, Any]:
        """Counts of the whole request, and those at its first token."""
        return {
            "cached_tokens": self.cached or 0,
            "replayed": self.replayed,
            "hits": self.hits,
            "started_ns": self.started_ns,
            "token_ns": self.token_ns,
            "counts": self.counts,
            "first_token": self.first_token,
        }


def _new_context_and_tree(number: int, tokens: list[int], request: Request) -> tuple[Context, Tree]:
    """Positions begin at 0; the node id of a committed row is its position."""
    root, prompt = len(tokens) - 1, len(request.prompt)
    context = Context(number, list(tokens), list(range(len(tokens))), request.sampling, prompt)
    context.salted = bool(request.cache_salt)
    return context, Tree(root, root - 1, tokens[-1], root, fed=True)
