"""The data types that all parts share; of pipespec they need `device_copy` alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from pipespec.system.device_copy import to_device

if TYPE_CHECKING:  # a client needs no torch
    import torch

# Columns of `Batch.rows`.
SEQUENCE, NODE, PARENT, TOKEN, POSITION, KIND = range(6)
NUM_COLUMNS = 6

# Kinds of rows. A committed row (of a prompt, or of an accepted token that is read again after a
# failure) extends the committed sequence instead of the tree; the target samples after the last
# one.
DRAFT, COMMITTED, LAST_COMMITTED = range(3)

# Which draft tokens are accepted (`SamplingParams.acceptance`).
EXACT, RELAXED, STRICT = "exact", "relaxed", "strict"

# Reasons why a request ended: its text could not follow its grammar, the target's logits were NaN,
# infinite, or -inf for every token, and a stage had no memory for its rows.
GRAMMAR, NOT_FINITE, NO_MEMORY = "grammar", "not_finite", "no_memory"

# The parents of a sequence's first row, and of a sequence that shares no prefix.
NO_PARENT_NODE, NO_PARENT_SEQUENCE = -1, -1

# Upper bounds of the histogram of steps by tokens, of prompts fed and of answers decided together.
STEP_TOKENS = (*(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096), math.inf)

# Bytes of all sequence starts of one batch, at most.
MAX_STARTED_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """The start of a sequence, which the head sends to the stages with its first rows.

    A *sequence* is one stay of a request in the pipeline. Batches and verdicts name it by its
    number, which is unique within the epoch: so a late verdict on a request that was preempted
    and started again does not apply to its new sequence. `request` is its id in the request log.
    `committed_len` tokens were decided before, prompt included, and arrive as committed rows.
    `params`: how its tokens are sampled (`pipespec.sampling.wire_format`). `parent` is the
    sequence, running or retained, that begins with the same `shared_len` tokens, whose rows do not
    arrive and whose KV slots are the parent's; or NO_PARENT_SEQUENCE.
    """

    sequence: int
    request: int
    prompt_len: int
    committed_len: int
    params: bytes
    parent: int = NO_PARENT_SEQUENCE
    shared_len: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire (`pipespec.transport.wire`)."""
        return 7 * 8 + -(-len(self.params) // 8) * 8


@dataclass(slots=True)
class Batch:
    """The rows that one stage computes in one step.

    Rows are nodes of any depth, of any number of sequences, and prompt chunks. A parent is always
    before its children, here or in an earlier batch. The rows of a sequence are contiguous.

    Attributes:
        rows: int64 `[rows, 6]`: sequence, node, parent, token, position, kind.
        hidden: `[rows, hidden]` in the model's dtype, or None where token ids enter the first
            stage.
        started: sequences that begin; a stage lets them share prefixes before it frees any.
        finished: sequences that have ended; a stage frees their KV slots before it computes.
        preempted: sequences that were put back into the queue; the same.
        retained_prefixes: (sequence, tokens) of sequences that have left, now or earlier: how many
            of their tokens stay in the KV cache for others to share.
        kept_states: (sequence, tokens, number): layers with a running state keep that behind so
            many committed tokens of a sequence, in place of the state with this number.
        failed: sequences whose rows no stage computes any more, as one had no memory for them.
        beside: whether other batches were in the pipeline when the head sent it, so that stages
            compute at once.
        stop: ends the stage that receives it, after it has sent the batch on.
        sent_ns: when it was sent, on the sender's clock; only set where links add a delay.
    """

    step: int
    rows: np.ndarray = field(default_factory=lambda: np.empty((0, NUM_COLUMNS), np.int64))
    hidden: torch.Tensor | None = None
    started: tuple[SequenceStart, ...] = ()
    finished: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()
    retained_prefixes: tuple[tuple[int, int], ...] = ()
    kept_states: tuple[tuple[int, int, int], ...] = ()
    failed: tuple[int, ...] = ()
    beside: bool = False
    stop: bool = False
    sent_ns: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, keep: np.ndarray) -> Batch:
        """The batch without the rows whose `keep` (bool `[rows]`) is False, order kept."""
        if keep.all():
            return self
        hidden = self.hidden
        if hidden is not None:
            kept = np.flatnonzero(keep)
            # A miss keeps no row; and hidden[kept] takes four times as long as index_select.
            hidden = (
                hidden.index_select(0, to_device(kept, hidden.device)) if len(kept) else hidden[:0]
            )
        return replace(self, rows=self.rows[keep], hidden=hidden)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one decided token, before penalties and temperature. `logprob` is the
    token's natural log-probability; `top` are the most probable tokens and theirs, the most
    probable first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a part of a request's prompt, from the position `base` on. The parts of
    a prompt arrive in order, before the first accepted token. Its first token has none."""

    base: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the last stage decided for one sequence in one step. `tokens` follow the committed
    sequence; `base` is that sequence's length (prompt included) before them, so that a repeated
    verdict is recognised. `logprobs` has one entry per token if the request wants them, else none.
    `failed` is why no further token can be decided: GRAMMAR if the text cannot follow the request's
    grammar, NOT_FINITE or NO_MEMORY."""

    sequence: int
    base: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    failed: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DraftTokens:
    """Draft tokens that the head fed in one step, sent ahead of their logits to the last stage.
    Arrays `[rows]`: the parent's node id, the token, and its log-probability given the parent, as
    the draft stated it. Only lossy requests need them."""

    step: int
    parents: np.ndarray
    tokens: np.ndarray
    logps: np.ndarray


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens follow from the target's logits (`pipespec.sampling`). By default they
    are decoded greedily, as they are; `check_sampling` says which values are in range.

    Fields mean what those of `pipespec.SamplingParams` mean. `logit_bias` has token ids and what is
    added to their logits. `seed`, with the position and the distribution, determines what is drawn.
    `grammar` is what the answer must fit (`pipespec.engine.llguidance_backend`); "": anything.
    `acceptance`: EXACT samples from the target; RELAXED and STRICT prefer draft tokens (lossy;
    docs/sampling.md has the rules)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    grammar: str = ""
    acceptance: str = EXACT

    @property
    def lossy(self) -> bool:
        """Whether the text may differ from what the target alone would have generated."""
        return self.acceptance != EXACT

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the arg-max of the logits, as they are, is the whole answer."""
        untouched = not (self.has_penalties or self.logit_bias or self.min_tokens or self.grammar)
        untouched &= self.logprobs is None
        return untouched and self.temperature == 0 and not self.lossy


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the request log stores it. `policy` names one of the cluster's policies
    (`Config.policies`); "" is its default. Requests share prefix-cache entries only with requests
    of the same `cache_salt`. Those of one `tenant`, such as an API key, share what it gets
    (`pipespec.head.admission`)."""

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    eos: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    policy: str = ""
    cache_salt: str = ""
    tenant: str = ""

    @property
    def queue_key(self) -> tuple[int, int]:
        """The order of a tenant's requests: lower priority values first, then the first to arrive.
        `lua/enqueue.lua` orders the queue the same way."""
        return self.priority, self.id
