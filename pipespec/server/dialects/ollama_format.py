"""The replies of Ollama's /api/chat and /api/generate: streams are lines of JSON."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel

from pipespec.clock import monotonic_ns
from pipespec.server.answer_blocks import Block, BlockDelta, arguments_of
from pipespec.server.api_errors import ApiError
from pipespec.server.dialects.ollama_models import rfc3339
from pipespec.server.openai_format import scored_tokens, token_logprob
from pipespec.server.request_parsing import ParsedRequest
from pipespec.server.response_schema import OMIT_NONE
from pipespec.server.response_stream import OutputDelta, ReplyFormat
from pipespec.text import Tokenizer

_ASCII = json.JSONEncoder(separators=(",", ":"))


class OllamaFunction(BaseModel):
    """The function to call."""

    name: str
    arguments: dict[str, Any]


class OllamaToolCall(BaseModel):
    """A call of a tool."""

    function: OllamaFunction


class OllamaAnswer(BaseModel):
    """An answer of the model."""

    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | None = OMIT_NONE
    tool_calls: list[OllamaToolCall] | None = OMIT_NONE


class OllamaReply(BaseModel):
    """The fields that all replies share. Durations are in nanoseconds; `load_duration` is 0, as the
    model is loaded before."""

    model: str
    created_at: str
    done: Literal[True] = True
    done_reason: Literal["stop", "length", "load"]
    total_duration: int | None = OMIT_NONE
    load_duration: int | None = OMIT_NONE
    prompt_eval_count: int | None = OMIT_NONE
    prompt_eval_duration: int | None = OMIT_NONE
    eval_count: int | None = OMIT_NONE
    eval_duration: int | None = OMIT_NONE
    logprobs: list[dict[str, Any]] | None = OMIT_NONE


class OllamaChatReply(OllamaReply):
    """The reply of POST /api/chat."""

    message: OllamaAnswer


class OllamaGenerateReply(OllamaReply):
    """The reply of POST /api/generate."""

    response: str
    thinking: str | None = OMIT_NONE


class OllamaFormat(ReplyFormat):
    """What the replies of both routes share."""

    media_type = "application/x-ndjson"
    reply: ClassVar[type[OllamaReply]]

    def __init__(self, request: ParsedRequest, tokenizer: Tokenizer, model: str):
        super().__init__(request, tokenizer, model)
        self._shared = {"model": model, "created_at": rfc3339(time.time())}
        self._logprobs: list[dict[str, Any]] = []
        self._num_sent = 0  # log-probabilities that lines have had
        self._began_ns = monotonic_ns()
        self._first_ns: int | None = None
        # Lines hold nothing but JSON, so one that adds nothing keeps a connection alive.
        self.keepalive = self._line(self.part(""))

    @abstractmethod
    def part(self, text: str, calls: Sequence[Block] = (), thought: str = "") -> dict[str, Any]:
        """What a line adds to the answer."""

    def take(self, delta: OutputDelta) -> list[BlockDelta]:
        if delta.token_ids and self._first_ns is None:
            self._first_ns = monotonic_ns()
        self._logprobs += [token_logprob(self.tokenizer, *each) for each in scored_tokens(delta)]
        return super().take(delta)

    def response(self) -> BaseModel:
        answer = self.answers[0]
        whole = self.part(answer.text_of("text"), answer.calls, answer.text_of("reasoning"))
        return self.reply.model_validate(self._shared | whole | self._end())

    def first_events(self) -> Iterator[bytes]:
        return iter(())

    def events(self, delta: OutputDelta) -> Iterator[bytes]:
        for part in self.take(delta):
            if part.begins and part.index:
                yield from self._whole_call(part.index - 1)
            if part.block.kind == "reasoning":
                yield self._line(self.part("", thought=part.text))
            elif part.block.kind == "text":
                yield self._line(self.part(part.text) | self._new_logprobs())

    def last_events(self) -> Iterator[bytes]:
        if blocks := self.answers[0].blocks:
            yield from self._whole_call(len(blocks) - 1)
        yield self._line(self.part("") | self._end())

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield _json({"error": error.message})

    def _whole_call(self, index: int) -> Iterator[bytes]:
        """The line of a call, which is sent when it is whole."""
        block = self.answers[0].blocks[index]
        if block.kind == "call":
            yield self._line(self.part("", [block]))

    def _new_logprobs(self) -> dict[str, Any]:
        """The log-probabilities that no line has had."""
        new, self._num_sent = self._logprobs[self._num_sent :], len(self._logprobs)
        return {"logprobs": new} if new else {}

    def _end(self) -> dict[str, Any]:
        """What the last line has beside the answer."""
        end_ns, (end,) = monotonic_ns(), self.ends
        first_ns = self._first_ns or end_ns
        return {
            "done": True,
            "done_reason": "stop" if end and end.finish_reason == "stop" else "length",
            "total_duration": end_ns - self._began_ns,
            "load_duration": 0,
            "prompt_eval_count": self.request.prompt_tokens,
            "prompt_eval_duration": first_ns - self._began_ns,
            "eval_count": self.num_tokens,
            "eval_duration": end_ns - first_ns,
            **self._new_logprobs(),
        }

    def _line(self, fields: dict[str, Any]) -> bytes:
        return _json({**self._shared, "done": False, **fields})


class OllamaChatFormat(OllamaFormat):
    """The replies of /api/chat."""

    reply = OllamaChatReply

    def part(self, text: str, calls: Sequence[Block] = (), thought: str = "") -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thought:
            message["thinking"] = thought
        if calls:
            made = [{"name": call.name, "arguments": arguments_of(call)} for call in calls]
            message["tool_calls"] = [{"function": function} for function in made]
        return {"message": message}


class OllamaGenerateFormat(OllamaFormat):
    """The replies of /api/generate."""

    reply = OllamaGenerateReply

    def part(self, text: str, calls: Sequence[Block] = (), thought: str = "") -> dict[str, Any]:
        return {"response": text} | ({"thinking": thought} if thought else {})


def _json(fields: dict[str, Any]) -> bytes:
    # In ASCII: the clients split lines at separators of Unicode too.
    return _ASCII.encode(fields).encode() + b"\n"
