"""From the pieces of answers to OpenAI's replies: whole ones, and chunks of streams."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

from pydantic import BaseModel

from pipespec.core import TokenLogprobs
from pipespec.server.answering import Piece
from pipespec.server.asking import Ask
from pipespec.server.replies import (
    FinishReason,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    Usage,
)
from pipespec.text import Tokenizer, token_text

# JSON has no minus infinity; vLLM's word for it.
LEAST_LOGPROB = -9999.0
# A text that no model says, and how it looks in JSON.
MARK = "\0"
MARKED = json.dumps(MARK)


class Shape(ABC):
    """The replies to one request. What stays the same in all of them is kept here.

    Args:
        model: the name under which it was asked for.
        usage, continuous: whether a stream tells of tokens at its end, and in every chunk.
    """

    prefix: str

    def __init__(
        self,
        ask: Ask,
        tokenizer: Tokenizer,
        model: str,
        *,
        usage: bool = False,
        continuous: bool = False,
    ):
        self.ask = ask
        self.tokenizer = tokenizer
        self.model = model
        self.id = f"{self.prefix}-{secrets.token_hex(16)}"
        self.created = int(time.time())
        self._usage, self._continuous = usage, usage and continuous
        self._tokens = 0
        self._cached: int | None = None
        self._texts: list[list[str]] = [[] for _ in ask.samplings]
        self._logprobs: list[list[tuple[int, TokenLogprobs]]] = [[] for _ in ask.samplings]
        self._scored: list[list[TokenLogprobs]] = [[] for _ in ask.samplings]
        self._reasons: list[FinishReason] = ["length" for _ in ask.samplings]
        self._around: dict[int, tuple[str, str]] = {}  # a text in its chunk, by choice

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        prompt = self.ask.prompt_tokens
        cached = self._cached
        details = None if cached is None else PromptTokensDetails(cached_tokens=cached)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self._tokens,
            total_tokens=prompt + self._tokens,
            prompt_tokens_details=details,
        )

    def reported(self, choice: int) -> bool:
        """Whether log-probabilities of the answer were asked for."""
        return self.ask.samplings[choice].logprobs is not None

    def count(self, piece: Piece) -> None:
        """Add the tokens of a piece to what is told of them.

        A prompt with several answers counts once, and so does what the first one found of it.
        """
        self._tokens += len(piece.token_ids)
        if piece.cached is not None and not piece.index % self.ask.n:
            self._cached = (self._cached or 0) + piece.cached

    def take(self, piece: Piece) -> None:
        """Keep a piece for the whole reply."""
        self.count(piece)
        self._texts[piece.index].append(piece.text)
        self._scored[piece.index] += piece.scored
        if piece.logprobs:
            self._logprobs[piece.index] += zip(piece.token_ids, piece.logprobs, strict=True)
        self._reasons[piece.index] = piece.finish_reason or self._reasons[piece.index]

    def events(self, piece: Piece) -> Iterator[str]:
        """What a piece adds to a stream, as JSON.

        Chunks that hold text and nothing else, which nearly all do, differ in the text alone.
        """
        only_text = piece.text and not (piece.logprobs or piece.scored or piece.finish_reason)
        if self._continuous or not only_text:
            for chunk in self.chunks(piece):
                yield chunk.model_dump_json()
            return
        self.count(piece)
        if piece.index not in self._around:
            (example,) = self.chunks(Piece(piece.index, MARK))
            before, _, after = example.model_dump_json().partition(MARKED)
            self._around[piece.index] = before, after
        before, after = self._around[piece.index]
        yield before + json.dumps(piece.text, ensure_ascii=False) + after

    @abstractmethod
    def reply(self) -> BaseModel:
        """All that was taken."""

    @abstractmethod
    def opening(self) -> Iterator[BaseModel]:
        """What a stream begins with."""

    @abstractmethod
    def chunks(self, piece: Piece) -> Iterator[BaseModel]:
        """What a piece adds to a stream."""

    @abstractmethod
    def closing(self) -> Iterator[BaseModel]:
        """What a stream ends with."""

    def _counted(self) -> Usage | None:
        return self.usage if self._continuous else None

    def _prompt_report(self, choice: int) -> PromptLogprobs | None:
        """What was asked for with `prompt_logprobs`."""
        most = self.ask.prompt_logprobs
        if most is None:
            return None
        report: PromptLogprobs = [None]
        ids = self.ask.prompt_of(choice)[1:]
        for token, told in zip(ids, self._scored[choice], strict=True):
            ranks = {id_: rank for rank, (id_, _) in enumerate(told.top, 1)}
            shown = {token: told.logprob} | dict(told.top[:most])
            report.append(
                {
                    str(id_): PromptLogprob(
                        logprob=finite(value),
                        rank=ranks.get(id_),
                        decoded_token=token_text(self.tokenizer, id_),
                    )
                    for id_, value in shown.items()
                }
            )
        return report


def finite(logprob: float) -> float:
    """A log-probability as JSON can have it."""
    return max(logprob, LEAST_LOGPROB)
