"""The records of the request log: their types, and their format in Redis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pipespec.core import GRAMMAR, NO_MEMORY, NOT_FINITE, PromptLogprobs, Request, TokenLogprobs
from pipespec.errors import ConfigError, GrammarError, NonFiniteLogits, PipespecError, RankFailed
from pipespec.system.validation import from_fields

# Why a request with an answer ends.
REASONS = ("stop", "length")
# The reason of a request that its client has cancelled.
CANCELLED = "cancelled"
# The reason of a request with which several clusters in a row have failed, and its message.
FAILED = "failed"
GIVEN_UP = (
    "The request was given up: several clusters in a row have failed while they decoded it, "
    "without a new token."
)
MEMORY_ENDED = (
    "A rank had no memory for the rows of this request, so only the request was ended (the rank's "
    "log has their number); send it again later or with a shorter prompt, or set a smaller "
    "decode.prefill_chunk or policy.width."
)
NO_GRAMMAR = (
    "The text could not be held to its grammar any further: it is too dear to follow, or a host of "
    "the cluster lacks llguidance (the worker's log says which); simplify it, or install "
    "pipespec[grammar] there."
)
# What one user's requests may occupy, and at most: an answer by itself, each of its tokens (in its
# stream and in the head's report), and each log-probability.
MAX_BYTES, ANSWER_BYTES, TOKEN_BYTES, LOGPROB_BYTES = 18 << 20, 4096, 64, 32
# The id and the fields of an entry of a Redis stream.
Entry = tuple[str, dict[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Accepted:
    """Tokens joined a request's sequence, which had `base` tokens (prompt included). `logprobs` has
    one entry per token if the request asked for them, else none."""

    base: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


# Optional fields of the last event of a request.
OPTIONAL_FIELDS = ("prefill_ns", "cached")


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended. The last event of its stream. `prefill_ns` is the time at the head from the
    start of the request to its first token; `cached` counts the prompt tokens that were in the
    prefix cache. None: not known. Two events are equal whatever these fields are."""

    reason: str
    prefill_ns: int | None = field(default=None, compare=False)
    cached: int | None = field(default=None, compare=False)


Event = PromptLogprobs | Accepted | Finished


def failure_of(reason: str) -> PipespecError | None:
    """The error that a client gets for the end of a request; None: it did not fail."""
    if reason == FAILED:
        return RankFailed(GIVEN_UP)
    if reason == NO_MEMORY:
        return RankFailed(MEMORY_ENDED)
    if reason == NOT_FINITE:
        return NonFiniteLogits()
    return GrammarError(NO_GRAMMAR) if reason == GRAMMAR else None


def check_answered(end: Finished) -> None:
    if failure := failure_of(end.reason):
        raise failure
    if end.reason not in REASONS:
        raise RankFailed(f"The request was {end.reason} by another client; send it again.")


def entries_of(found: list[Any]) -> list[Entry]:
    return [
        (entry.decode(), dict(zip(pairs[::2], pairs[1::2], strict=True))) for entry, pairs in found
    ]


def event_from(fields: dict[bytes, bytes]) -> Event:
    if b"reason" in fields:
        known = {
            name: int(fields[name.encode()]) for name in OPTIONAL_FIELDS if name.encode() in fields
        }
        return Finished(fields[b"reason"].decode(), **known)
    base = int(fields[b"base"])
    logprobs = tuple(map(unpack_logprobs, fields.get(b"logprobs", b"").decode().split()))
    if b"tokens" not in fields:
        return PromptLogprobs(base, logprobs)
    return Accepted(base, tuple(map(int, fields[b"tokens"].split())), logprobs)


def pack_logprobs(logprobs: TokenLogprobs) -> str:
    """As text without spaces: the token's log-probability, then id:log-probability of the top."""
    pairs = (f"{token}:{value!r}" for token, value in logprobs.top)
    return ",".join((repr(logprobs.logprob), *pairs))


def unpack_logprobs(text: str) -> TokenLogprobs:
    own, *pairs = text.split(",")
    split = (pair.split(":") for pair in pairs)
    return TokenLogprobs(float(own), tuple((int(token), float(value)) for token, value in split))


def pack_requests(requests: Sequence[Request]) -> tuple[str, list[str]]:
    """What requests of one user have in common, each prompt once, and what each has of its own:
    they differ in nothing but prompt, length and seed."""
    number: dict[tuple[int, ...], int] = {}
    own = [
        [
            number.setdefault(tuple(each.prompt), len(number)),
            each.max_new_tokens,
            each.sampling.seed,
        ]
        for each in requests
    ]
    shared = [asdict(replace(requests[0], prompt=())), [*number]]
    return json.dumps(shared, separators=(",", ":")), [*map(json.dumps, own)]


# A request without a prompt, and the prompts.
Shared = tuple[Request, list[tuple[int, ...]]]


def unpack_shared(packed: bytes) -> Shared:
    spec, prompts = json.loads(packed)
    return from_fields(Request, spec), [*map(tuple, prompts)]


def unpack_request(request: int, shared: Shared, own: bytes) -> Request:
    """The request of that number, from what `pack_requests` made of it."""
    common, prompts = shared
    prompt, longest, seed = json.loads(own)
    sampling = replace(common.sampling, seed=seed)
    fields = {"id": request, "prompt": prompts[prompt], "max_new_tokens": longest}
    return replace(common, sampling=sampling, **fields)


def check_size(requests: Sequence[Request], size: int, context: int) -> None:
    """Raise ConfigError if requests of one user, which share `size` bytes, may occupy more than
    `MAX_BYTES` of the log. `context`: the most tokens of a prompt and its answer."""
    answers = 0
    for each in requests:
        counts = each.sampling.logprobs, each.sampling.prompt_logprobs
        new, scored = (0 if k is None else TOKEN_BYTES + (k + 1) * LOGPROB_BYTES for k in counts)
        longest = min(each.max_new_tokens, context - len(each.prompt))
        answers += ANSWER_BYTES + longest * (TOKEN_BYTES + new) + len(each.prompt) * scored
    size += max(size, answers)  # what they share is there twice while it is written
    if size > MAX_BYTES:
        raise ConfigError(
            f"The request may take {size >> 20} MiB of the cluster's memory for {len(requests)} "
            f"answers, but may take {MAX_BYTES >> 20}; ask for fewer answers, prompts, tokens "
            "(max_tokens) or log-probabilities."
        )
