"""The replies of /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pydantic import BaseModel

from pipespec.core import TokenLogprobs
from pipespec.server.answering import Piece
from pipespec.server.asking import Ask
from pipespec.server.replies import (
    CompletionAnswer,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CompletionReply,
    FinishReason,
    Usage,
)
from pipespec.server.shaping import Shape, finite
from pipespec.text import REPLACEMENT, Tokenizer, token_bytes, token_offsets, token_text

# A token of a completion's text and what is told of it: nothing of a prompt's first.
Told = tuple[int, TokenLogprobs | None]


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
        self.count(piece)
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
