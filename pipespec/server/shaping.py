"""From the pieces of answers to OpenAI's replies: whole ones, and chunks of streams."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from pydantic import BaseModel

from pipespec.core import TokenLogprobs
from pipespec.server.answering import Piece
from pipespec.server.asking import Ask
from pipespec.server.replies import (
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    ChunkChoice,
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    Delta,
    FinishReason,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from pipespec.text import REPLACEMENT, Tokenizer, token_bytes, token_text

# JSON has no minus infinity; vLLM's word for it.
LEAST_LOGPROB = -9999.0


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
        self._texts: list[list[str]] = [[] for _ in ask.samplings]
        self._logprobs: list[list[tuple[int, TokenLogprobs]]] = [[] for _ in ask.samplings]
        self._reasons: list[FinishReason] = ["length" for _ in ask.samplings]

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        prompt = self.ask.prompt_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self._tokens,
            total_tokens=prompt + self._tokens,
        )

    def reported(self, choice: int) -> bool:
        """Whether log-probabilities were asked for."""
        return self.ask.samplings[choice].logprobs is not None

    def take(self, piece: Piece) -> None:
        """Keep a piece for the whole reply."""
        self._tokens += len(piece.token_ids)
        self._texts[piece.index].append(piece.text)
        if piece.logprobs:
            self._logprobs[piece.index] += zip(piece.token_ids, piece.logprobs, strict=True)
        self._reasons[piece.index] = piece.finish_reason or self._reasons[piece.index]

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


class Chat(Shape):
    """Of /v1/chat/completions."""

    prefix = "chatcmpl"

    def reply(self) -> BaseModel:
        choices = [
            ChatChoice(
                index=i,
                message=ChatMessage(content="".join(texts)),
                logprobs=self._report(i, self._logprobs[i]),
                finish_reason=self._reasons[i],
            )
            for i, texts in enumerate(self._texts)
        ]
        return ChatReply(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=self.usage
        )

    def opening(self) -> Iterator[BaseModel]:
        for i in range(len(self.ask.samplings)):
            yield self._chunk(i, Delta(role="assistant", content=""))

    def chunks(self, piece: Piece) -> Iterator[BaseModel]:
        self._tokens += len(piece.token_ids)
        if piece.text or piece.logprobs:
            told = zip(piece.token_ids, piece.logprobs, strict=False)
            report = self._report(piece.index, [*told]) if piece.logprobs else None
            yield self._chunk(piece.index, Delta(content=piece.text), report)
        if piece.finish_reason:
            yield self._chunk(piece.index, Delta(), reason=piece.finish_reason)

    def closing(self) -> Iterator[BaseModel]:
        if self._usage:
            yield ChatChunk(
                id=self.id, created=self.created, model=self.model, choices=[], usage=self.usage
            )

    def _chunk(
        self,
        choice: int,
        delta: Delta,
        logprobs: ChatLogprobs | None = None,
        reason: FinishReason | None = None,
    ) -> BaseModel:
        told = ChunkChoice(index=choice, delta=delta, logprobs=logprobs, finish_reason=reason)
        return ChatChunk(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[told],
            usage=self._counted(),
        )

    def _report(
        self, choice: int, tokens: Sequence[tuple[int, TokenLogprobs]]
    ) -> ChatLogprobs | None:
        if not self.reported(choice):
            return None
        content = [
            TokenLogprob(
                **self._one(token, told.logprob).model_dump(),
                top_logprobs=[self._one(*pair) for pair in told.top],
            )
            for token, told in tokens
        ]
        return ChatLogprobs(content=content)

    def _one(self, token: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=token_text(self.tokenizer, token),
            logprob=max(logprob, LEAST_LOGPROB),
            bytes=list(token_bytes(self.tokenizer, token)),
        )


class Completion(Shape):
    """Of /v1/completions."""

    prefix = "cmpl"

    def __init__(self, ask: Ask, tokenizer: Tokenizer, model: str, **options: bool):
        super().__init__(ask, tokenizer, model, **options)
        self._offsets = [len(self._echo(i)) for i in range(len(ask.samplings))]

    def reply(self) -> BaseModel:
        choices = [
            CompletionChoice(
                index=i,
                text=self._echo(i) + "".join(texts),
                logprobs=self._report(i, self._logprobs[i]),
                finish_reason=self._reasons[i],
            )
            for i, texts in enumerate(self._texts)
        ]
        return self._reply(choices, self.usage)

    def opening(self) -> Iterator[BaseModel]:
        for i in range(len(self.ask.samplings)):
            if self._echo(i):
                yield self._chunk(i, self._echo(i))

    def chunks(self, piece: Piece) -> Iterator[BaseModel]:
        self._tokens += len(piece.token_ids)
        if piece.text or piece.logprobs or piece.finish_reason:
            told = zip(piece.token_ids, piece.logprobs, strict=False)
            report = self._report(piece.index, [*told]) if piece.logprobs else None
            yield self._chunk(piece.index, piece.text, report, piece.finish_reason)

    def closing(self) -> Iterator[BaseModel]:
        if self._usage:
            yield self._reply([], self.usage)

    def _echo(self, choice: int) -> str:
        return self.ask.texts[choice // self.ask.n] if self.ask.texts else ""

    def _chunk(
        self,
        choice: int,
        text: str,
        logprobs: CompletionLogprobs | None = None,
        reason: FinishReason | None = None,
    ) -> BaseModel:
        told = CompletionChoice(index=choice, text=text, logprobs=logprobs, finish_reason=reason)
        return self._reply([told], self._counted())

    def _reply(self, choices: list[CompletionChoice], usage: Usage | None) -> BaseModel:
        return CompletionReply(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )

    def _report(
        self, choice: int, tokens: Sequence[tuple[int, TokenLogprobs]]
    ) -> CompletionLogprobs | None:
        if not self.reported(choice):
            return None
        names = [self._name(token) for token, _ in tokens]
        offsets = []
        for token, _ in tokens:
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(token_text(self.tokenizer, token))
        top = []
        for name, (_, told) in zip(names, tokens, strict=True):
            likely = {self._name(token): max(value, LEAST_LOGPROB) for token, value in told.top}
            top.append(likely | {name: max(told.logprob, LEAST_LOGPROB)})
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[max(told.logprob, LEAST_LOGPROB) for _, told in tokens],
            tokens=names,
            top_logprobs=top,
        )

    def _name(self, token: int) -> str:
        """A token's text; of a part of a character its bytes, as OpenAI writes them."""
        text = token_text(self.tokenizer, token)
        if REPLACEMENT not in text:
            return text
        raw = token_bytes(self.tokenizer, token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
