"""What the request log holds, as values of ours and as Redis keeps them."""

from __future__ import annotations

import json
import typing
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from pipespec.core import GRAMMAR, Request, Scored, TokenLogprobs
from pipespec.errors import GrammarError, PipespecError, RankFailed

# Why a request ended for which nobody waited any more.
CANCELLED = "cancelled"
# Why a request ended with which several clusters in a row have failed, and what to say of it.
FAILED = "failed"
GIVEN_UP = (
    "The request was given up: clusters have failed again and again while they decoded it, and "
    "nothing of its answer was decided."
)
NO_GRAMMAR = (
    "The text could not be held to its grammar any further: it is too dear to follow, or a host of "
    "the cluster lacks llguidance (the worker's log says which); simplify it, or install "
    "pipespec[grammar] there."
)
# The id and the fields of an entry of a Redis stream.
Entry = tuple[str, dict[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Accepted:
    """Tokens joined a request's sequence, which had `base` tokens (prompt included).

    `logprobs` has one entry per token if the request asked for them, else none.
    """

    base: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()

    def since(self, base: int) -> Accepted:
        """The part from the position `base` on."""
        skip = max(0, base - self.base)
        return Accepted(self.base + skip, self.tokens[skip:], self.logprobs[skip:])


# What the end of a request tells if the head that ended it knows.
KNOWN = ("prefill_ns", "cached")


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended. The last event of its stream.

    `prefill_ns` is what passed at the head from when it opened the request to its first token;
    `cached`, how many tokens of its prompt were in KV then. None: the head that ended it does not
    know. Ends are equal whatever they are.
    """

    reason: str
    prefill_ns: int | None = field(default=None, compare=False)
    cached: int | None = field(default=None, compare=False)


Event = Scored | Accepted | Finished


def failure_of(reason: str) -> PipespecError | None:
    """What the end of a request means for who asked, if it failed."""
    if reason == FAILED:
        return RankFailed(GIVEN_UP)
    return GrammarError(NO_GRAMMAR) if reason == GRAMMAR else None


def entries_of(found: list[Any]) -> list[Entry]:
    """The entries of a stream, from what Redis replies."""
    return [
        (entry.decode(), dict(zip(pairs[::2], pairs[1::2], strict=True))) for entry, pairs in found
    ]


def event_from(fields: dict[bytes, bytes]) -> Event:
    """The event that an entry of a request's stream tells."""
    if b"reason" in fields:
        known = {name: int(fields[name.encode()]) for name in KNOWN if name.encode() in fields}
        return Finished(fields[b"reason"].decode(), **known)
    base = int(fields[b"base"])
    logprobs = tuple(map(unpack_logprobs, fields.get(b"notes", b"").decode().split()))
    if b"tokens" not in fields:
        return Scored(base, logprobs)
    return Accepted(base, tuple(map(int, fields[b"tokens"].split())), logprobs)


def pack_logprobs(logprobs: TokenLogprobs) -> str:
    """As one word: the token's log-probability, then id:log-probability of the top ones."""
    pairs = (f"{token}:{value!r}" for token, value in logprobs.top)
    return ",".join((repr(logprobs.logprob), *pairs))


def unpack_logprobs(word: str) -> TokenLogprobs:
    """The inverse of `pack_logprobs`."""
    own, *pairs = word.split(",")
    split = (pair.split(":") for pair in pairs)
    return TokenLogprobs(float(own), tuple((int(token), float(value)) for token, value in split))


def pack_request(request: Request) -> str:
    """All of a request but its number, as JSON."""
    spec = asdict(request)
    del spec["id"]
    return json.dumps(spec)


def unpack_request(request: int, asked: bytes) -> Request:
    """The request of that number, from what `pack_request` made of it."""
    return _build(Request, {**json.loads(asked), "id": request})


def _build(kind: Any, values: dict[str, Any]) -> Any:
    """A dataclass of `kind` from what JSON made of it: lists to tuples, dicts to dataclasses."""
    hints = typing.get_type_hints(kind)

    def revive(hint: Any, value: Any) -> Any:
        if isinstance(value, list):
            return tuple(revive(None, item) for item in value)
        if isinstance(value, dict):
            # The annotation may be `Sampling | None`.
            for option in (hint, *typing.get_args(hint)):
                if is_dataclass(option):
                    return _build(option, value)
        return value

    return kind(**{name: revive(hints[name], value) for name, value in values.items()})
