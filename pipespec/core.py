"""The nouns that travel between parts. Nothing here imports anything of ours."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # whoever only asks a cluster needs no torch
    import torch

# Columns of `Batch.rows`.
SEQUENCE, NODE, PARENT, TOKEN, POSITION, KIND = range(6)
NUM_COLUMNS = 6

# Kinds of rows. A decided row (of a prompt, or an accepted token replayed after a failure)
# extends the committed sequence instead of the tree; after the last decided one the target
# is asked what follows.
GUESS, DECIDED, LAST_DECIDED = range(3)

# Which guesses are accepted (`Sampling.acceptance`).
EXACT, RELAXED, STRICT = "exact", "relaxed", "strict"

# Why a request ended whose text could not be held to its grammar.
GRAMMAR = "grammar"

# A node id that no node has: the parent of a sequence's first row.
NO_NODE = -1

# A number that no sequence has: the parent of one that shares nothing.
NOBODY = -1

# Up to how many tokens, of prompts fed and of answers decided, a step counts as one of the same
# size; the last: any number.
STEP_TOKENS = (*(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096), math.inf)

# Bytes of all openings of one batch, at most.
MAX_OPENED_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Opening:
    """What the stages must know of a sequence beside its rows.

    A *sequence* is one life of a request in the pipeline. Its number stands on the wire and in
    verdicts, and no other sequence of the epoch has it: of a request that was put back and opened
    again, late word of the first life is no word of the second.

    Attributes:
        sequence: its number.
        request: the number of the request in the request log.
        prompt: how many tokens the prompt has.
        known: how many tokens were decided before, prompt included; they come as decided rows.
        terms: how its tokens are to be decided (`pipespec.sampling.terms`).
        parent: the sequence, open or retained, whose first tokens are its own too; or NOBODY.
        shared: how many of them: their rows do not come, their KV slots are the parent's.
    """

    sequence: int
    request: int
    prompt: int
    known: int
    terms: bytes
    parent: int = NOBODY
    shared: int = 0

    @property
    def num_bytes(self) -> int:
        """What it takes on the wire (`pipespec.transport.wire`)."""
        return 7 * 8 + -(-len(self.terms) // 8) * 8


@dataclass(slots=True)
class Batch:
    """The rows that one stage computes in one step.

    Rows are nodes of any depth, of any number of sequences, and prompt chunks; a parent
    always stands before its children, here or in an earlier batch. A sequence's rows stand
    together.

    `rows` is int64 `[rows, 6]`: sequence, node, parent, token, position, kind.
    `hidden` is `[rows, hidden]` in the model's dtype, or None where token ids enter the
    first stage. `opened` are the sequences that begin. `released` names those that have ended and
    `preempted` those that were put back into the queue: before a stage computes the batch, and
    after the new ones share what they share, it frees all that these hold. But `kept` says of
    which sequences, of these or of those that left earlier, so many tokens of text stay, and no
    more, for others to share; of one that left earlier 0 may stay. `stop` ends the worker that
    receives it, after it has passed the batch on. `sent_ns` is when it was sent, on the sender's
    clock, where a network is emulated.
    """

    step: int
    rows: np.ndarray = field(default_factory=lambda: np.empty((0, NUM_COLUMNS), np.int64))
    hidden: torch.Tensor | None = None
    opened: tuple[Opening, ...] = ()
    released: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()
    kept: tuple[tuple[int, int], ...] = ()
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
            import torch

            kept = torch.from_numpy(np.flatnonzero(keep))
            # A miss keeps nothing; and hidden[kept] takes four times as long as index_select.
            hidden = hidden.index_select(0, kept.to(hidden.device)) if len(kept) else hidden[:0]
        return replace(self, rows=self.rows[keep], hidden=hidden)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the target thought of one decided token, before penalties and temperature.

    `logprob` is the token's natural log-probability; `top` are the most probable tokens and
    theirs, the most probable first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Scored:
    """What the target thought of a part of a request's prompt, from the position `base` on, if the
    request asked for that. Before anything is accepted all of the prompt but its first token was
    told of, in order."""

    base: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the last stage decided for one sequence in one step.

    `tokens` follow the committed sequence; `base` is that sequence's length (prompt
    included) before them, so that a verdict told twice is recognised. `logprobs` has one
    entry per token if the request asked for them, else none. `failed`: what follows cannot be
    decided, as the grammar of the request cannot be followed any further.
    """

    sequence: int
    base: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    failed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Guesses:
    """Rows that the head fed in one step, as the last stage must know them ahead of their logits.

    Arrays `[rows]`: the parent's node id, the token, and its log-probability given the parent, as
    the draft stated it. Only lossy requests need them.
    """

    step: int
    parents: np.ndarray
    tokens: np.ndarray
    logps: np.ndarray


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request's tokens follow from the target's logits (`pipespec.sampling`).

    The defaults are greedy decoding of the logits as they are. `check_sampling` says which
    values are in range.

    Attributes:
        temperature: 0 takes the most probable token; more divides the logits.
        top_k: draw from so many most probable tokens; 0: from all.
        top_p: draw from the smallest set of most probable tokens with this probability.
        min_p: draw from tokens at least so probable relative to the most probable one.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens
            that stand in the prompt or the answer.
        presence_penalty: taken off the logit of every token that stands in the answer.
        frequency_penalty: the same, for each time that it stands there.
        logit_bias: token ids and what is added to their logits.
        seed: with the position, all that a draw depends on beside the distribution.
        logprobs: report the log-probabilities of the chosen and of so many most probable
            tokens; None: report none.
        prompt_logprobs: the same of the prompt's own tokens, but for the first.
        min_tokens: before the answer has so many tokens none that ends the text is chosen, and
            no stop string counts.
        grammar: what the answer must fit (`pipespec.engine.grammar`); "": anything.
        acceptance: EXACT takes what the target says; RELAXED and STRICT prefer what was guessed
            (lossy; docs/sampling.md has the rules).
    """

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
        """Whether the text may differ from what the target alone would have said."""
        return self.acceptance != EXACT

    @property
    def penalises(self) -> bool:
        """Whether the tokens so far change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def plain(self) -> bool:
        """Whether the arg-max of the logits, as they are, is the whole answer."""
        untouched = not (self.penalises or self.logit_bias or self.min_tokens or self.grammar)
        untouched &= self.logprobs is None
        return untouched and self.temperature == 0 and not self.lossy


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for: the durable part of a request, as the request log keeps it.

    `feed` names one of the cluster's ways to decode (`Config.ways`); "": its own.
    """

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    eos: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    sampling: Sampling = Sampling()
    priority: int = 0
    feed: str = ""

    @property
    def place(self) -> tuple[int, int]:
        """Where it stands among others: who has less is served earlier, and of equal priorities
        who came first. `lua/enqueue.lua` orders the queue so too."""
        return self.priority, self.id
