"""The replies of /v1/chat/completions to which tools were given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pydantic import BaseModel

from pipespec.server.answering import Piece
from pipespec.server.asking import Ask
from pipespec.server.chat import Chat
from pipespec.server.replies import (
    ChatMessage,
    Delta,
    FinishReason,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from pipespec.server.tools.deltas import CallDelta
from pipespec.text import Tokenizer


class ToolChat(Chat):
    """Reads the calls of tools out of the answers. All else is as in every chat."""

    def __init__(self, ask: Ask, tokenizer: Tokenizer, model: str, **options: bool):
        super().__init__(ask, tokenizer, model, **options)
        assert ask.tools is not None
        self._use = ask.tools
        self._parsers = [ask.tools.family.parser() for _ in ask.samplings]
        self._calls: list[list[ToolCall]] = [[] for _ in ask.samplings]

    def take(self, piece: Piece) -> None:
        deltas = [*self._read(piece)]
        text = "".join(delta.content or "" for delta in deltas)
        super().take(replace(piece, text=text, finish_reason=self._reason(piece)))

    def events(self, piece: Piece) -> Iterator[str]:
        for chunk in self.chunks(piece):
            yield chunk.model_dump_json()

    def chunks(self, piece: Piece) -> Iterator[BaseModel]:
        self.count(piece)
        deltas = [*self._read(piece)]
        report = self._report_of(piece)
        if piece.logprobs and not deltas:
            deltas = [Delta(content="")]
        for delta in deltas:
            yield self._chunk(piece.index, delta, report)
            report = None  # told once
        if piece.finish_reason:
            yield self._chunk(piece.index, Delta(), reason=self._reason(piece))

    def _message(self, choice: int) -> ChatMessage:
        calls = self._calls[choice]
        text = "".join(self._texts[choice])
        if calls:
            return ChatMessage(content=text or None, tool_calls=calls)
        return ChatMessage(content=text)

    def _read(self, piece: Piece) -> Iterator[Delta]:
        """What a piece adds to its message, which is kept."""
        parser, calls = self._parsers[piece.index], self._calls[piece.index]
        deltas = parser.feed(piece.text)
        if piece.finish_reason:
            deltas += parser.finish()
        for delta in deltas:
            if isinstance(delta, str):
                yield Delta(content=delta)
            elif self._use.parallel or delta.index == 0:
                yield Delta(tool_calls=[self._call(delta, calls)])

    def _call(self, delta: CallDelta, calls: list[ToolCall]) -> ToolCallDelta:
        if delta.name is None:
            calls[delta.index].function.arguments += delta.arguments
            function = FunctionDelta(arguments=delta.arguments)
            return ToolCallDelta(index=delta.index, function=function)
        call = ToolCall(
            id=self._use.family.new_id(), function=FunctionCall(name=delta.name, arguments="")
        )
        calls.append(call)
        function = FunctionDelta(name=delta.name, arguments="")
        return ToolCallDelta(index=delta.index, id=call.id, type="function", function=function)

    def _reason(self, piece: Piece) -> FinishReason | None:
        """An answer that has called tools and ended by itself waits for what they say; of a call
        that the client named OpenAI says stop."""
        if self._use.named:
            return piece.finish_reason
        if piece.finish_reason == "stop" and self._calls[piece.index]:
            return "tool_calls"
        return piece.finish_reason
