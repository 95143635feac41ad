"""The replies of /v1/chat/completions to requests with tools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pydantic import BaseModel

from pipespec.server.openai_format import ChatFormat, OutputDelta
from pipespec.server.request_parsing import ParsedRequest
from pipespec.server.response_schema import (
    ChatMessage,
    Delta,
    FinishReason,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from pipespec.server.tool_parsers.abstract_tool_parser import CallDelta
from pipespec.text import Tokenizer


class ToolCallFormat(ChatFormat):
    """As for every chat, but tool calls are parsed out of the answers."""

    def __init__(self, request: ParsedRequest, tokenizer: Tokenizer, model: str, **options: bool):
        super().__init__(request, tokenizer, model, **options)
        assert request.tool_use is not None
        self._tool_use = request.tool_use
        self._parsers = [self._tool_use.family.parser() for _ in request.sampling_params]
        self._calls: list[list[ToolCall]] = [[] for _ in request.sampling_params]

    def add(self, delta: OutputDelta) -> None:
        text = "".join(part.content or "" for part in self._parse(delta))
        super().add(replace(delta, text=text, finish_reason=self._finish_reason(delta)))

    def stream_events(self, delta: OutputDelta) -> Iterator[str]:
        for chunk in self.chunks(delta):
            yield chunk.model_dump_json()

    def chunks(self, delta: OutputDelta) -> Iterator[BaseModel]:
        self.count_tokens(delta)
        parts = [*self._parse(delta)]
        logprobs = self._delta_logprobs(delta)
        if delta.logprobs and not parts:
            parts = [Delta(content="")]
        for part in parts:
            yield self._chunk(delta.index, part, logprobs)
            logprobs = None  # only the first chunk has them
        if delta.finish_reason:
            yield self._chunk(delta.index, Delta(), reason=self._finish_reason(delta))

    def _message(self, choice: int) -> ChatMessage:
        calls, text = self._calls[choice], "".join(self._texts[choice])
        if calls:
            return ChatMessage(content=text or None, tool_calls=calls)
        return ChatMessage(content=text)

    def _parse(self, delta: OutputDelta) -> Iterator[Delta]:
        """What a delta adds to its message; calls are kept for the whole reply."""
        parser, calls = self._parsers[delta.index], self._calls[delta.index]
        parsed = parser.push(delta.text)
        if delta.finish_reason:
            parsed += parser.finish()
        for part in parsed:
            if isinstance(part, str):
                yield Delta(content=part)
            elif self._tool_use.parallel or part.index == 0:
                yield Delta(tool_calls=[self._call(part, calls)])

    def _call(self, delta: CallDelta, calls: list[ToolCall]) -> ToolCallDelta:
        if delta.name is None:
            calls[delta.index].function.arguments += delta.arguments
            function = FunctionDelta(arguments=delta.arguments)
            return ToolCallDelta(index=delta.index, function=function)
        call = ToolCall(
            id=self._tool_use.family.new_id(), function=FunctionCall(name=delta.name, arguments="")
        )
        calls.append(call)
        function = FunctionDelta(name=delta.name, arguments="")
        return ToolCallDelta(index=delta.index, id=call.id, type="function", function=function)

    def _finish_reason(self, delta: OutputDelta) -> FinishReason | None:
        """The reason of an answer with calls that ended by itself is "tool_calls", but "stop" if
        the client named the function, as with OpenAI."""
        if not self._tool_use.named and delta.finish_reason == "stop" and self._calls[delta.index]:
            return "tool_calls"
        return delta.finish_reason
