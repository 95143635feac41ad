"""The replies of Ollama's /api/chat and /api/generate: streams are lines of JSON."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from pipespec.clock import monotonic_ns
from pipespec.server.answer_blocks import AnswerBlocks, Block, BlockDelta, arguments_of
from pipespec.server.api_errors import ApiError
from pipespec.server.dialects.ollama_models import rfc3339
from pipespec.server.openai_format import token_logprob
from pipespec.server.request_parsing import ParsedRequest
from pipespec.server.response_schema import OMIT_NONE
from pipespec.server.response_stream import OutputDelta, ReplyFormat
from pipespec.text import Tokenizer

# A text that no model generates, and its JSON.
MARK = "\0"
MARK_JSON = json.dumps(MARK)


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

    def __init__(self, request: ParsedRequest, tokenizer: Tokenizer, model: str):
        super().__init__(request, tokenizer, model)
        self._answer = AnswerBlocks(request.tool_use, request.reasoning)
        self._created_at = rfc3339(time.time())
        self._reason: Literal["stop", "length"] = "length"
        self._logprobs: list[dict[str, Any]] = []
        self._num_sent = 0  # log-probabilities that lines have had
        self._began_ns = monotonic_ns()
        self._first_ns: int | None = None
        before, _, after = self._line(MARK).decode().partition(MARK_JSON)
        self._frame = before, after
        # Lines hold nothing but JSON, so one that adds nothing keeps a connection alive.
        self.keepalive = f'{before}""{after}'.encode()

    @abstractmethod
    def part(self, text: str, calls: Sequence[Block] = (), thought: str = "") -> dict[str, Any]:
        """What a line adds to the answer."""

    def add(self, delta: OutputDelta) -> None:
        self._take(delta)

    def first_events(self) -> Iterator[bytes]:
        return iter(())

    def events(self, delta: OutputDelta) -> Iterator[bytes]:
        for part in self._take(delta):
            if part.begins and part.index:
                yield from self._whole_call(self._answer.blocks[part.index - 1])
            if part.block.kind == "reasoning":
                yield self._json(self.part("", thought=part.text) | {"done": False})
            elif part.block.kind == "text" and self._new_logprobs:
                yield self._line(part.text)
            elif part.block.kind == "text":
                before, after = self._frame
                yield f"{before}{json.dumps(part.text)}{after}".encode()

    def last_events(self) -> Iterator[bytes]:
        if self._answer.blocks:
            yield from self._whole_call(self._answer.blocks[-1])
        yield self._json(self.part("") | self._end() | self._take_logprobs())

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield self._json({"error": error.message})

    def end_fields(self) -> dict[str, Any]:
        """What a whole reply has beside the answer."""
        logprobs = {"logprobs": self._logprobs} if self._logprobs else {}
        return {"model": self.model, "created_at": self._created_at} | self._end() | logprobs

    def whole(self) -> dict[str, Any]:
        """The whole answer."""
        answer = self._answer
        return self.part(answer.text_of("text"), answer.calls, answer.text_of("reasoning"))

    def _take(self, delta: OutputDelta) -> list[BlockDelta]:
        self.count_tokens(delta)
        if delta.token_ids and self._first_ns is None:
            self._first_ns = monotonic_ns()
        if delta.finish_reason is not None:
            self._reason = "length" if delta.finish_reason == "length" else "stop"
        for token, logprobs in zip(delta.token_ids, delta.logprobs, strict=False):
            self._logprobs.append(token_logprob(self.tokenizer, token, logprobs).model_dump())
        return self._answer.push(delta.text, last=delta.finish_reason is not None)

    def _whole_call(self, block: Block) -> Iterator[bytes]:
        """The line of a call, which is sent when it is whole."""
        if block.kind == "call":
            yield self._json(self.part("", [block]) | {"done": False})

    def _line(self, text: str) -> bytes:
        return self._json(self.part(text) | {"done": False} | self._take_logprobs())

    def _take_logprobs(self) -> dict[str, Any]:
        """The log-probabilities that no line has had."""
        new, self._num_sent = self._logprobs[self._num_sent :], len(self._logprobs)
        return {"logprobs": new} if new else {}

    @property
    def _new_logprobs(self) -> bool:
        return len(self._logprobs) > self._num_sent

    def _end(self) -> dict[str, Any]:
        end_ns = monotonic_ns()
        first_ns = self._first_ns or end_ns
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": end_ns - self._began_ns,
            "load_duration": 0,
            "prompt_eval_count": self.request.prompt_tokens,
            "prompt_eval_duration": first_ns - self._began_ns,
            "eval_count": self.num_tokens,
            "eval_duration": end_ns - first_ns,
        }

    def _json(self, fields: dict[str, Any]) -> bytes:
        shared = {"model": self.model, "created_at": self._created_at}
        # In ASCII: the clients split lines at separators of Unicode too.
        made = json.dumps(shared | fields, separators=(",", ":"))
        return f"{made}\n".encode()


class OllamaChatFormat(OllamaFormat):
    """The replies of /api/chat."""

    def response(self) -> BaseModel:
        return OllamaChatReply.model_validate(self.end_fields() | self.whole())

    def part(self, text: str, calls: Sequence[Block] = (), thought: str = "") -> dict[str, Any]:
        made = [
            OllamaToolCall(function=OllamaFunction(name=call.name, arguments=arguments_of(call)))
            for call in calls
        ]
        answer = OllamaAnswer(content=text, thinking=thought or None, tool_calls=made or None)
        return {"message": answer.model_dump()}


class OllamaGenerateFormat(OllamaFormat):
    """The replies of /api/generate."""

    def response(self) -> BaseModel:
        return OllamaGenerateReply.model_validate(self.end_fields() | self.whole())

    def part(self, text: str, calls: Sequence[Block] = (), thought: str = "") -> dict[str, Any]:
        return {"response": text} | ({"thinking": thought} if thought else {})
