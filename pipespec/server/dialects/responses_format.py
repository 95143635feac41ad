"""The replies of OpenAI's /v1/responses."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import to_json

from pipespec.server.answer_blocks import Block, BlockDelta
from pipespec.server.api_errors import ApiError
from pipespec.server.dialects.conversations import KeptResponse
from pipespec.server.openai_format import scored_tokens, token_logprob
from pipespec.server.request_parsing import ParsedRequest
from pipespec.server.response_stream import OutputDelta, ReplyFormat, sse
from pipespec.text import Tokenizer

# Of the ids of items, by the kinds of their blocks.
PREFIXES = {"call": "fc", "text": "msg", "reasoning": "rs"}
# The events of their texts, without what has happened to them.
EVENTS = {
    "call": "response.function_call_arguments",
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
}
Status = Literal["in_progress", "completed", "incomplete", "failed"]


class InputTokensDetails(BaseModel):
    """How many tokens of the prompt were in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """How many tokens of the answer are reasoning."""

    reasoning_tokens: int


class ResponsesUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(BaseModel):
    """Why a response failed."""

    code: str
    message: str


class ResponsesReply(BaseModel):
    """The reply of POST /v1/responses. `output` are items of type reasoning, message and
    function_call."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: Status
    background: Literal[False] = False
    error: ResponseFailure | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int | None
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None


class ResponsesFormat(ReplyFormat):
    """The replies of /v1/responses.

    Args:
        echo: the fields of the request that the reply repeats.
        conversation: the messages before the answer, as a JSON list; None: a later request does not
            continue this one.
    """

    def __init__(
        self,
        request: ParsedRequest,
        tokenizer: Tokenizer,
        model: str,
        *,
        echo: Mapping[str, Any],
        conversation: bytes | None,
    ):
        super().__init__(request, tokenizer, model)
        self.id = f"resp_{secrets.token_hex(24)}"
        self._echo = echo
        self._conversation = conversation
        self._completed_at: int | None = None
        self._number = 0  # of the next event
        self._ids: list[str] = []  # of the items, each of which is a block
        self._logprobs: list[list[dict[str, Any]]] = []  # of each item's tokens
        self._waiting: list[dict[str, Any]] = []  # of tokens whose text has not come
        self._num_sent = 0  # log-probabilities of the open item that were sent

    @property
    def kept(self) -> tuple[str, bytes] | None:
        if self._conversation is None:
            return None
        answer = json.dumps(self.answers[0].message(), ensure_ascii=False).encode()
        earlier = self._conversation.removesuffix(b"]")
        messages = earlier + (b"" if earlier == b"[" else b", ") + answer + b"]"
        return self.id, KeptResponse(to_json(self.response()), messages).packed()

    def response(self) -> BaseModel:
        return self._reply(self._end_status)

    # --- streams ------------------------------------------------------------------------------

    def first_events(self) -> Iterator[bytes]:
        reply = self._reply("in_progress")
        yield self._event("response.created", response=reply)
        yield self._event("response.in_progress", response=reply)

    def events(self, delta: OutputDelta) -> Iterator[bytes]:
        for part in self.take(delta):
            if part.begins:
                if part.index:
                    yield from self._close(part.index - 1, "completed")
                yield from self._begin(part)
            if part.text:
                yield self._delta_event(part)

    def last_events(self) -> Iterator[bytes]:
        status = self._end_status
        if blocks := self.answers[0].blocks:
            yield from self._close(len(blocks) - 1, status)
        yield self._event(f"response.{status}", response=self._reply(status))

    def failed(self, error: ApiError) -> Iterator[bytes]:
        code = "server_error"
        if error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            code = "invalid_prompt"
        failure = ResponseFailure(code=code, message=error.message)
        yield self._event("response.failed", response=self._reply("failed", failure))

    # --- items --------------------------------------------------------------------------------

    def take(self, delta: OutputDelta) -> list[BlockDelta]:
        if delta.finish_reason is not None:
            self._completed_at = int(time.time())
        self._waiting += [token_logprob(self.tokenizer, *each) for each in scored_tokens(delta)]
        parts = super().take(delta)
        for part in parts:
            if part.begins:
                self._ids.append(f"{PREFIXES[part.block.kind]}_{secrets.token_hex(24)}")
                self._logprobs.append([])
            if part.block.kind == "text":
                self._logprobs[part.index] += self._waiting
            self._waiting = []
        return parts

    def _place(self, index: int, block: Block) -> dict[str, Any]:
        """The fields by which events name an item."""
        place = {"item_id": self._ids[index], "output_index": index}
        return place if block.kind == "call" else place | {"content_index": 0}

    def _begin(self, part: BlockDelta) -> Iterator[bytes]:
        block, self._num_sent = part.block, 0
        empty = Block(block.kind, block.number, block.id, block.name)
        item = self._item(part.index, empty, "in_progress")
        if block.kind != "call":
            item["content"] = []
        yield self._event("response.output_item.added", output_index=part.index, item=item)
        if block.kind != "call":
            place, content = self._place(part.index, block), _content(empty, [])
            yield self._event("response.content_part.added", **place, part=content)

    def _delta_event(self, part: BlockDelta) -> bytes:
        fields = {**self._place(part.index, part.block), "delta": part.text}
        if part.block.kind == "text":
            new = self._logprobs[part.index][self._num_sent :]
            self._num_sent += len(new)
            fields["logprobs"] = [*map(_event_logprob, new)]
        return self._event(f"{EVENTS[part.block.kind]}.delta", **fields)

    def _close(self, index: int, status: Status) -> Iterator[bytes]:
        block = self.answers[0].blocks[index]
        place = self._place(index, block)
        whole: dict[str, Any] = {"arguments" if block.kind == "call" else "text": block.text}
        if block.kind == "text":
            whole["logprobs"] = [*map(_event_logprob, self._logprobs[index])]
        yield self._event(f"{EVENTS[block.kind]}.done", **place, **whole)
        if block.kind != "call":
            content = _content(block, self._logprobs[index])
            yield self._event("response.content_part.done", **place, part=content)
        item = self._item(index, block, status)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _item(self, index: int, block: Block, status: Status) -> dict[str, Any]:
        item = {"id": self._ids[index], "status": status}
        if block.kind == "call":
            call = {"call_id": block.id, "name": block.name, "arguments": block.text}
            return {"type": "function_call", **item, **call}
        content = [_content(block, self._logprobs[index])]
        if block.kind == "reasoning":
            return {"type": "reasoning", **item, "summary": [], "content": content}
        return {"type": "message", **item, "role": "assistant", "content": content}

    # --- the response -------------------------------------------------------------------------

    @property
    def _end_status(self) -> Status:
        (end,) = self.ends
        return "incomplete" if end and end.finish_reason == "length" else "completed"

    def _reply(self, status: Status, failure: ResponseFailure | None = None) -> ResponsesReply:
        blocks = self.answers[0].blocks
        statuses: list[Status] = ["completed" for _ in blocks]
        if blocks and status == "incomplete":
            statuses[-1] = status
        sampling = self.request.sampling_params[0]
        ended = status in ("completed", "incomplete")
        return ResponsesReply(
            id=self.id,
            created_at=self.created,
            completed_at=self._completed_at if status == "completed" else None,
            status=status,
            error=failure,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            model=self.model,
            output=[self._item(i, blocks[i], statuses[i]) for i in range(len(blocks))],
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            usage=self._usage() if ended else None,
            **self._echo,
        )

    def _usage(self) -> ResponsesUsage:
        prompt = self.request.prompt_tokens
        return ResponsesUsage(
            input_tokens=prompt,
            input_tokens_details=InputTokensDetails(cached_tokens=self.num_cached or 0),
            output_tokens=self.num_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self.num_reasoning),
            total_tokens=prompt + self.num_tokens,
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number - 1, **fields}, kind)


def _content(block: Block, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}


def _event_logprob(reported: Mapping[str, Any]) -> dict[str, Any]:
    """A token's log-probabilities as events have them: without bytes."""
    top = [
        {"token": each["token"], "logprob": each["logprob"]} for each in reported["top_logprobs"]
    ]
    return {"token": reported["token"], "logprob": reported["logprob"], "top_logprobs": top}
