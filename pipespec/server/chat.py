"""The replies of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import BaseModel

from pipespec.core import TokenLogprobs
from pipespec.server.answering import Piece
from pipespec.server.replies import (
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    ChunkChoice,
    Delta,
    FinishReason,
    TokenLogprob,
    TopLogprob,
)
from pipespec.server.shaping import Shape, finite
from pipespec.text import token_bytes, token_text


class Chat(Shape):
    """Of /v1/chat/completions."""

    prefix = "chatcmpl"

    def reply(self) -> BaseModel:
        choices = [
            ChatChoice(
                index=i,
                message=self._message(i),
                logprobs=self._report(i, self._logprobs[i]),
                finish_reason=self._reasons[i],
            )
            for i in range(len(self.ask.samplings))
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

    def _message(self, choice: int) -> ChatMessage:
        return ChatMessage(content="".join(self._texts[choice]))

    def chunks(self, piece: Piece) -> Iterator[BaseModel]:
        self.count(piece)
        if piece.text or piece.logprobs:
            yield self._chunk(piece.index, Delta(content=piece.text), self._report_of(piece))
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

    def _report_of(self, piece: Piece) -> ChatLogprobs | None:
        """Of a piece's tokens."""
        told = zip(piece.token_ids, piece.logprobs, strict=False)
        return self._report(piece.index, [*told]) if piece.logprobs else None

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
