"""OpenAI's /v1/responses: requests and replies.

Above 350 lines, as a request is read with its reply.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import Discriminator, Field, FiniteFloat, Tag, model_validator
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from pipespec.client.chat_template import text_of
from pipespec.extras.dialects.translation import (
    PARTS,
    TEXT,
    TEXT_OR_PARTS,
    add_turn,
    call_of,
    named_function,
    schema_format,
    tool_of,
)
from pipespec.limits import MAX_COUNT
from pipespec.server.api_errors import ApiError, invalid_field
from pipespec.server.dialect import OWN_FIELDS, BodyRoute, Dialect, DialectBody, Translation
from pipespec.server.message_schema import (
    MAX_TOOLS,
    Function,
    FunctionName,
    OfFunction,
    RequestModel,
    TextOrParts,
    accepts,
    contents,
)
from pipespec.server.openai_format import scored_tokens, token_logprob
from pipespec.server.openai_serving import JSON, OpenAIServing
from pipespec.server.reply_format import (
    AnswerBlocks,
    Block,
    BlockDelta,
    OutputDelta,
    ReplyFormat,
    arguments_of,
    sse,
)
from pipespec.server.request_schema import (
    LATER,
    NO_MEDIA,
    LogprobCount,
    ReasoningEffort,
    Refused,
    refused,
)

NO_SERVICE = "is not supported: this server has no such service"
LOGPROBS = "message.output_text.logprobs"
# What else replies of this server could include: nothing of it is there, so nothing is left out.
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
MAX_ID = 128
MAX_METADATA = 16

# --- input ------------------------------------------------------------------------------------


class InputText(RequestModel):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


Contents = Annotated[TextOrParts, contents(str | list[InputText], "'input_text' and the like")]


class InputMessage(RequestModel):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Contents

    def message(self) -> dict[str, Any]:
        """The item as a message of OpenAI's chats; one of the model may be only a part of one."""
        return {"role": self.role, "content": self.content}


class FunctionCallItem(RequestModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def message(self) -> dict[str, Any]:
        call = call_of(self.call_id, self.name, self.arguments)
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class FunctionOutputItem(RequestModel):
    type: Literal["function_call_output"]
    call_id: str
    output: Contents

    def message(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": self.output}


class ReasoningItem(RequestModel):
    type: Literal["reasoning"]
    content: Annotated[TextOrParts | None, contents(list[InputText] | None, "'reasoning_text'")] = (
        None
    )

    def message(self) -> dict[str, Any]:
        return {"role": "assistant", "content": "", "reasoning_content": text_of(self.content)}


def _kind_of_item(item: Any) -> str | None:
    if isinstance(item, dict):
        kind = item.get("type") or "message"
        return kind if isinstance(kind, str) else None
    return getattr(item, "type", None) or "message"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind_of_item,
        custom_error_type="kind_of_item",
        custom_error_message=(
            "should be an item of type message, function_call, function_call_output or reasoning"
        ),
    ),
]

# --- requests ---------------------------------------------------------------------------------


class FunctionTool(Function, OfFunction):
    """A function that the model may call. `parameters` is a JSON schema."""


class TextFormat(RequestModel):
    """What the answer must match: nothing, any JSON object, or a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError(
                f"is of type '{self.type}', but the type 'json_schema' alone has a schema, and "
                "needs it"
            )
        return self

    def translated(self) -> dict[str, Any]:
        if self.type == "json_schema":
            return schema_format(self.schema_, self.name or "output")
        return {"type": self.type}


class TextConfig(RequestModel):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(RequestModel):
    effort: ReasoningEffort | None = None


class NamedFunction(FunctionName, OfFunction):
    def translated(self) -> dict[str, Any]:
        return named_function(self.name)


class AllowedFunctions(RequestModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1)]

    def translated(self) -> dict[str, Any]:
        tools = [tool.translated() for tool in self.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": tools}}


_AnyChoice = Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None
ToolChoice = Annotated[
    _AnyChoice,
    accepts(
        _AnyChoice,
        "'none', 'auto', 'required', {'type': 'function', 'name': ...} or "
        "{'type': 'allowed_tools', 'mode': 'auto' or 'required', 'tools': [...]}",
    ),
]

REFUSED: Refused = {
    **refused(NO_SERVICE, "background", "background_options", "prompt"),
    **refused(NO_SERVICE, "moderation", "access_programs"),
    **refused(LATER, "conversation", "context_management"),
    "image": (NO_MEDIA, ()),
    "truncation": ("is not supported: a prompt that is too long is refused", ("disabled",)),
}
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "include",
    "reasoning_effort": "reasoning.effort",
}


class ResponsesRequest(DialectBody):
    """POST /v1/responses."""

    passed = OWN_FIELDS | {"top_k", "stop"}
    refused, names = REFUSED, NAMES

    input: Annotated[Annotated[str, TEXT] | Annotated[list[Item], PARTS], TEXT_OR_PARTS]
    instructions: str | None = None
    previous_response_id: Annotated[str | None, Field(min_length=1, max_length=MAX_ID)] = None
    store: bool | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1, le=MAX_COUNT)] = None
    temperature: Annotated[FiniteFloat | None, Field(ge=0, le=2)] = None
    top_p: Annotated[FiniteFloat | None, Field(gt=0, le=1)] = None
    top_logprobs: LogprobCount = None
    include: list[Literal[INCLUDABLE]] | None = None  # type: ignore[valid-type]
    tools: Annotated[list[FunctionTool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[str, str] | None, Field(max_length=MAX_METADATA)] = None
    stream: bool | None = None

    @property
    def continues(self) -> str | None:
        return self.previous_response_id

    def translate(self, kept: bytes) -> Translation:
        conversation: list[dict[str, Any]] = json.loads(kept.partition(b"\n")[2] or b"[]")
        if self.previous_response_id is not None and not kept:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"{missing(self.previous_response_id)}; send the conversation as input.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        items = self.input
        if isinstance(items, str):
            items = [InputMessage(role="user", content=items)]
        for item in items:
            add_turn(conversation, item.message())
        # Those of the response that is continued are not carried over.
        rules = [{"role": "system", "content": self.instructions}] if self.instructions else []
        wanted = LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        choice, form = self.tool_choice, self.text.format if self.text else None
        names = ("model", "temperature", "top_p", "parallel_tool_calls")
        fields: dict[str, Any] = {name: getattr(self, name) for name in names} | {
            "messages": [*rules, *conversation],
            "max_completion_tokens": self.max_output_tokens,
            "tools": [tool_of(t.name, t.parameters, t.description) for t in self.tools or ()],
            "tool_choice": choice.translated() if isinstance(choice, RequestModel) else choice,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "response_format": form.translated() if form else None,
            "logprobs": wanted,
            "top_logprobs": self.top_logprobs if wanted else None,
        }
        # The messages to which the answer is added for a later request.
        stored = None if self.store is False else to_json(conversation)
        options = {"echo": self.echoed(), "conversation": stored}
        return Translation(fields, bool(self.stream), options)

    def echoed(self) -> dict[str, Any]:
        """The fields that the reply repeats."""
        tools = [
            {"type": "function", "strict": None, "parameters": None}
            | tool.model_dump(exclude_unset=True)
            for tool in self.tools or ()
        ]
        text = self.text or TextConfig(format=TextFormat(type="text"))
        choice = self.tool_choice or "auto"
        names = ("instructions", "max_output_tokens", "previous_response_id", "top_logprobs")
        return {name: getattr(self, name) for name in names} | {
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None},
            "text": text.model_dump(exclude_none=True, by_alias=True),
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": tools,
        }


# --- replies ----------------------------------------------------------------------------------

# Of the ids of items, by the kinds of their blocks.
PREFIXES = {"call": "fc", "text": "msg", "reasoning": "rs"}
# The events of their texts, without what has happened to them.
EVENTS = {
    "call": "response.function_call_arguments",
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
}
Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponsesFormat(ReplyFormat):
    """The replies of /v1/responses.

    Args:
        echo: `ResponsesRequest.echoed`.
        conversation: the messages before the answer, as a JSON list; None: a later request does not
            continue this one.
    """

    def __init__(self, *answered: Any, echo: Mapping[str, Any], conversation: bytes | None):
        super().__init__(*answered)
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
        answer = json.dumps(message_of_answer(self.answers[0]), ensure_ascii=False).encode()
        earlier = self._conversation.removesuffix(b"]")
        messages = earlier + (b"" if earlier == b"[" else b", ") + answer + b"]"
        # Neither has line breaks.
        return self.id, to_json(self.response()) + b"\n" + messages

    def response(self) -> dict[str, Any]:
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
        failure = {"code": code, "message": error.message}
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

    def _reply(self, status: Status, failure: dict[str, str] | None = None) -> dict[str, Any]:
        blocks = self.answers[0].blocks
        statuses: list[Status] = ["completed" for _ in blocks]
        if blocks and status == "incomplete":
            statuses[-1] = status
        sampling = self.request.sampling_params[0]
        ended = status in ("completed", "incomplete")
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": self._completed_at if status == "completed" else None,
            "status": status,
            "background": False,
            "error": failure,
            "incomplete_details": cut,
            "model": self.model,
            "output": [self._item(i, blocks[i], statuses[i]) for i in range(len(blocks))],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
            **self._echo,
        }

    def _usage(self) -> dict[str, Any]:
        prompt = self.request.prompt_tokens
        cached = {"cached_tokens": self.num_cached or 0, "cache_write_tokens": 0}
        return {
            "input_tokens": prompt,
            "input_tokens_details": cached,
            "output_tokens": self.num_tokens,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning},
            "total_tokens": prompt + self.num_tokens,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number - 1, **fields}, kind)


def message_of_answer(answer: AnswerBlocks) -> dict[str, Any]:
    """An answer as a message of a later chat."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text_of("text")}
    if thought := answer.text_of("reasoning"):
        message["reasoning_content"] = thought
    if answer.calls:
        message["tool_calls"] = [
            call_of(call.id, call.name, json.dumps(arguments_of(call), ensure_ascii=False))
            for call in answer.calls
        ]
    return message


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


# --- responses that are kept ------------------------------------------------------------------


def missing(response: str) -> str:
    return f"There is no response {response[:100]!r}, or it is not kept any more"


def mount(app: FastAPI, serving: OpenAIServing) -> None:
    path = "/v1/responses/{response}"

    @app.get(path, response_model=None)
    async def retrieve_response(request: Request, response: str, stream: bool = False) -> Response:
        """A response that was made before, for as long as it can be continued."""
        if stream:
            why = "stream is true, but a response that is kept is whole; leave stream out."
            raise invalid_field(why, param="stream")
        found = await serving.kept(request, response)
        if found is None:
            raise ApiError(HTTPStatus.NOT_FOUND, f"{missing(response)}.")
        return Response(found.partition(b"\n")[0], media_type=JSON)

    @app.delete(path)
    async def delete_response(request: Request, response: str) -> dict[str, Any]:
        """Keep a response no longer: it cannot be fetched or continued."""
        if not await serving.kept(request, response, forget=True):
            raise ApiError(HTTPStatus.NOT_FOUND, f"{missing(response)}.")
        return {"id": response, "object": "response", "deleted": True}


DIALECT = Dialect(
    routes={"/v1/responses": BodyRoute(ResponsesRequest, ResponsesFormat)},
    mount=mount,
)
