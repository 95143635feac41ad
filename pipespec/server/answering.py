"""One HTTP request at the cluster: its answers as they come, and their end when nobody waits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import cast

from pipespec.client.aio import AsyncClient, AsyncFollowed
from pipespec.controller.records import Accepted, Finished, failure_of
from pipespec.core import TokenLogprobs
from pipespec.errors import PipespecError, RankFailed
from pipespec.server.asking import Ask
from pipespec.server.figures import ENDED_BY_LEAVING
from pipespec.server.metrics import Metrics, Watch
from pipespec.server.queueing import Place
from pipespec.server.replies import FinishReason
from pipespec.text import FinalText, MarkedText, Tokenizer, special_markers

# Why an answer may have ended, as far as its reader is told.
REASONS = ("stop", "length")


@dataclass(frozen=True)
class Piece:
    """What was heard of one answer: text that is final, and the tokens behind it.

    `scored` tells of the prompt's next tokens, from the second on, if that was asked for.
    `finish_reason` is None but for the last piece, and so is `cached`: how many tokens of the
    prompt were in KV, if that is known.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    scored: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    cached: int | None = None


class Answering:
    """The answers to what was asked. Whoever has one closes it.

    answering = Answering(client, ask, place, metrics)
    try:
        await answering.begin()
        async for piece in answering.pieces(heartbeat): ...
    finally:
        await answering.close()
    """

    def __init__(
        self,
        client: AsyncClient,
        ask: Ask,
        place: Place,
        metrics: Metrics,
        on_closed: Callable[[Answering], None],
    ):
        self.ask = ask
        self._on_closed = on_closed
        self._client = client
        self._place = place
        self._watches: Sequence[Watch] = metrics.asked(ask)
        self._following = AsyncExitStack()
        self._followed: AsyncFollowed | None = None
        self._choice: dict[int, int] = {}  # of each request in the log
        self._texts = _texts(client.served.tokenizer, ask)
        self._begun = [False for _ in ask.samplings]

    async def begin(self) -> None:
        """Put every answer in the cluster's queue. Raises Unreachable."""
        self._followed = await self._following.enter_async_context(self._client.follow())
        ask = self.ask
        for choice, sampling in enumerate(ask.samplings):
            request = await self._followed.submit(
                ask.prompt_of(choice),
                sampling,
                # A prompt is read up to the first token after it, also if nobody wants that.
                max_new_tokens=ask.max_tokens[choice // ask.n] or 1,
                stop=ask.stop,
                eos=ask.eos,
                priority=ask.priority,
            )
            self._choice[request] = choice

    async def pieces(self, heartbeat: float) -> AsyncIterator[Piece | None]:
        """The answers as they come; None whenever so many seconds pass without a word.

        Raises RankFailed or Unreachable if they will not come.
        """
        followed = self._followed
        assert followed is not None
        while len(followed):
            heard = await followed.next(heartbeat)
            if not heard:
                yield None
            for request, event in heard:
                choice = self._choice[request]
                if isinstance(event, Accepted):
                    yield self._accepted(choice, event)
                elif isinstance(event, Finished):
                    yield self._finished(choice, event)
                else:
                    yield Piece(choice, "", scored=event.logprobs)

    def interrupt(self, error: PipespecError) -> None:
        """Let `pieces` raise an error."""
        if self._followed is not None:
            self._followed.interrupt(error)

    async def close(self) -> None:
        """Cancel what has not finished; nobody waits any more."""
        await self._following.aclose()
        self._place.leave()
        for watch in self._watches:
            watch.ended(ENDED_BY_LEAVING)
        self._on_closed(self)

    def _accepted(self, choice: int, event: Accepted) -> Piece:
        if not self._begun[choice]:
            self._begun[choice] = True
            self._place.begun(len(self.ask.prompt_of(choice)))
        wanted = self._wanted(choice)
        self._watches[choice].heard(len(event.tokens) if wanted else 0)
        if not wanted:
            return Piece(choice, "")
        text = self._texts[choice].push(event.tokens)
        return Piece(choice, text, event.tokens, event.logprobs)

    def _finished(self, choice: int, event: Finished) -> Piece:
        reason = event.reason
        if failure := failure_of(reason):
            raise failure
        if reason not in REASONS:
            raise RankFailed(f"The request was {reason} by somebody else; ask again.")
        if not self._wanted(choice):
            reason = "length"
        self._watches[choice].ended(reason, event.prefill_ns)
        return Piece(
            choice,
            self._texts[choice].flush(),
            finish_reason=cast(FinishReason, reason),
            cached=event.cached,
        )

    def _wanted(self, choice: int) -> int:
        """How many tokens were asked for at most; of none the cluster decides one, which nobody
        is told of."""
        return self.ask.max_tokens[choice // self.ask.n]


def _texts(tokenizer: Tokenizer, ask: Ask) -> list[FinalText]:
    """The text of each answer; who reads calls out of it sees the special tokens around them."""
    markers = special_markers(tokenizer, ask.tools.family.special) if ask.tools else {}
    texts: list[FinalText] = []
    for choice, sampling in enumerate(ask.samplings):
        told = tokenizer, ask.prompt_of(choice), ask.stop, sampling.min_tokens
        texts.append(MarkedText(*told, markers) if markers else FinalText(*told))
    return texts
