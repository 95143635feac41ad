"""From the pieces of answers to OpenAI's replies: whole ones, and chunks of streams."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace

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
    CompletionAnswer,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CompletionReply,
    Delta,
    FinishReason,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from pipespec.text import REPLACEMENT, Tokenizer, token_bytes, token_offsets, token_text

# JSON has no minus infinity; vLLM's word for it.
LEAST_LOGPROB = -9999.0
# A text that no model says, and how it looks in JSON.
MARK = "\0"
MARKED = json.dumps(MARK)
# A token of a completion's text and what is told of it: nothing of a prompt's first.
Told = tuple[int, TokenLogprobs | None]


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
        self._scored: list[list[TokenLogprobs]] = [[] for _ in ask.samplings]
        self._reasons: list[FinishReason] = ["length" for _ in ask.samplings]
        self._around: dict[int, tuple[str, str]] = {}  # a text in its chunk, by choice

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
        """Whether log-probabilities of the answer were asked for."""
        return self.ask.samplings[choice].logprobs is not None

    def take(self, piece: Piece) -> None:
        """Keep a piece for the whole reply."""
        self._tokens += len(piece.token_ids)
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
        self._tokens += len(piece.token_ids)
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
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self.usage,
            prompt_logprobs=self._prompt_report(0),
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
            logprob=finite(logprob),
            bytes=list(token_bytes(self.tokenizer, token)),
        )


class Completion(Shape):
    """Of /v1/completions."""

    prefix = "cmpl"

    def __init__(self, ask: Ask, tokenizer: Tokenizer, model: str, **options: bool):
        super().__init__(ask, tokenizer, model, **options)
        self._ends = [len(self._echo(i)) for i in range(len(ask.samplings))]

    def reply(self) -> BaseModel:
        choices = [
            CompletionAnswer(
                index=i,
                text=self._echo(i) + "".join(texts),
                logprobs=self._whole_report(i),
                finish_reason=self._reasons[i],
                prompt_logprobs=self._prompt_report(i),
            )
            for i, texts in enumerate(self._texts)
        ]
        return CompletionReply(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=self.usage
        )

    def opening(self) -> Iterator[BaseModel]:
        for i in range(len(self.ask.samplings)):
            yield from self._shown_prompt(i)

    def chunks(self, piece: Piece) -> Iterator[BaseModel]:
        self._tokens += len(piece.token_ids)
        if piece.scored:
            self._scored[piece.index] += piece.scored
            yield from self._shown_prompt(piece.index)
        if piece.text or piece.logprobs or piece.finish_reason:
            report = None
            if piece.logprobs:
                told = zip(piece.token_ids, piece.logprobs, strict=False)
                report = self._report(*self._columns(piece.index, [*told]))
            yield self._chunk(piece.index, piece.text, report, piece.finish_reason)

    def closing(self) -> Iterator[BaseModel]:
        if self._usage:
            yield self._stream([], self.usage)

    def _echo(self, choice: int) -> str:
        return self.ask.texts[choice // self.ask.n] if self.ask.texts else ""

    def _shown_prompt(self, choice: int) -> Iterator[BaseModel]:
        """The prompt, if it is to be shown, once it is known all that is told of it."""
        if not self.ask.texts:
            return
        if not self.reported(choice):
            yield self._chunk(choice, self._echo(choice))
        elif len(self._scored[choice]) == len(self.ask.prompt_of(choice)) - 1:
            yield self._chunk(choice, self._echo(choice), self._report(*self._prompt(choice)))

    def _chunk(
        self,
        choice: int,
        text: str,
        logprobs: CompletionLogprobs | None = None,
        reason: FinishReason | None = None,
    ) -> BaseModel:
        told = CompletionChoice(index=choice, text=text, logprobs=logprobs, finish_reason=reason)
        return self._stream([told], self._counted())

    def _stream(self, choices: list[CompletionChoice], usage: Usage | None) -> BaseModel:
        return CompletionChunk(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )

    def _whole_report(self, choice: int) -> CompletionLogprobs | None:
        if not self.reported(choice):
            return None
        offsets, told = self._columns(choice, self._logprobs[choice])
        if self.ask.texts:
            before, of_prompt = self._prompt(choice)
            offsets, told = before + offsets, of_prompt + told
        return self._report(offsets, told)

    def _columns(
        self, choice: int, tokens: Sequence[tuple[int, TokenLogprobs]]
    ) -> tuple[list[int], list[Told]]:
        """Where the answer's next tokens begin in the text, and what is told of them."""
        offsets = []
        for token, _ in tokens:
            offsets.append(self._ends[choice])
            self._ends[choice] += len(token_text(self.tokenizer, token))
        return offsets, [*tokens]

    def _prompt(self, choice: int) -> tuple[list[int], list[Told]]:
        """The same of the prompt's tokens; of the most probable ones as many as of the answer's."""
        ids, most = self.ask.prompt_of(choice), self.ask.samplings[choice].logprobs
        told = [replace(told, top=told.top[:most]) for told in self._scored[choice]]
        offsets = token_offsets(self.tokenizer, ids, self._echo(choice))
        return offsets, [*zip(ids, (None, *told), strict=True)]

    def _report(self, offsets: list[int], tokens: Sequence[Told]) -> CompletionLogprobs:
        names = [self._name(token) for token, _ in tokens]
        values = [None if told is None else finite(told.logprob) for _, told in tokens]
        top: list[dict[str, float] | None] = []
        for name, value, (_, told) in zip(names, values, tokens, strict=True):
            if told is None or value is None:
                top.append(None)
            else:
                likely = {self._name(id_): finite(other) for id_, other in told.top}
                top.append(likely | {name: value})
        return CompletionLogprobs(
            text_offset=offsets, token_logprobs=values, tokens=names, top_logprobs=top
        )

    def _name(self, token: int) -> str:
        """A token's text; of a part of a character its bytes, as OpenAI writes them."""
        text = token_text(self.tokenizer, token)
        if REPLACEMENT not in text:
            return text
        raw = token_bytes(self.tokenizer, token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
