"""Ollama's routes: requests and replies. Streams are lines of JSON.

Above 350 lines, as a request is read with its reply.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import Field, FiniteFloat, model_validator
from pydantic_core import to_json

from pipespec.client.model_info import ModelInfo
from pipespec.extras.dialects.translation import call_of, schema_format
from pipespec.limits import MAX_COUNT
from pipespec.sampling.params import MAX_SEED, MIN_SEED
from pipespec.server.api_errors import ApiError, invalid_field
from pipespec.server.dialect import BodyRoute, Dialect, DialectBody, Translation
from pipespec.server.message_schema import RequestModel, Tools
from pipespec.server.openai_format import scored_tokens, token_logprob
from pipespec.server.openai_serving import OpenAIServing
from pipespec.server.reasoning import reasoning_use
from pipespec.server.reply_format import Block, BlockDelta, OutputDelta, ReplyFormat, arguments_of
from pipespec.server.request_schema import (
    FIXED,
    NO_MEDIA,
    LogprobCount,
    Refused,
    Texts,
    refuse_fields,
    refused,
)
from pipespec.timing.clock import monotonic_ns

# Ollama's clients look for the context under the name of the architecture, which a server does not
# know.
ARCHITECTURE = "pipespec"
LATEST = ":latest"

# What is known of a model's weights: nothing, as hosts may hold them in different formats.
DETAILS = {
    **dict.fromkeys(("parent_model", "format", "family", "parameter_size"), ""),
    "families": None,
    "quantization_level": "",
}


class OllamaBody(DialectBody):
    model: Annotated[str, Field(min_length=1)]

    def resolve_model(self, served: Sequence[str]) -> None:
        """A name without a tag is the same as with `:latest`."""
        if self.model not in served:
            names = {name.removesuffix(LATEST): name for name in served}
            self.model = names.get(self.model.removesuffix(LATEST), self.model)


class ShowRequest(OllamaBody):
    """POST /api/show."""

    passed = frozenset[str]()

    def translate(self, kept: bytes) -> Translation:
        return Translation({"model": self.model}, reply=_show_reply)


def tags_reply(names: Sequence[str], started: float, context: int) -> dict[str, Any]:
    shared = {
        "modified_at": rfc3339(started),
        "expires_at": "9999-12-31T23:59:59Z",  # it stays loaded
        "context_length": context,
        "details": DETAILS,
    }
    return {"models": [{"name": name, "model": name, **shared} for name in names]}


def _show_reply(served: ModelInfo) -> bytes:
    template = served.chat_template() or ""
    able = {
        "tools": "tools" in (served.chat_template(tools=True) or ""),
        "thinking": reasoning_use(template, "") is not None,
    }
    known = {"general.architecture": ARCHITECTURE}
    reply = {
        "template": template,
        "parameters": "",
        "details": DETAILS,
        "model_info": known | {f"{ARCHITECTURE}.context_length": served.context},
        "capabilities": ["completion", *(name for name, is_able in able.items() if is_able)],
    }
    return to_json(reply)


def rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


UNUSED = "is not supported; leave it at its default"
# Those of the model's loading and computing change no text, and are ignored.
REFUSED_OPTIONS: Refused = {
    "tfs_z": (UNUSED, (1,)),
    "typical_p": (UNUSED, (1,)),
    "mirostat": (UNUSED, (0,)),
    "penalize_newline": (UNUSED, (True,)),
    "repeat_last_n": ("is not supported: penalties are for all tokens of the answer", (-1, 64)),
}


class OllamaOptions(RequestModel):
    temperature: Annotated[FiniteFloat | None, Field(ge=0)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=MAX_COUNT)] = None
    top_p: Annotated[FiniteFloat | None, Field(ge=0, le=1)] = None
    min_p: Annotated[FiniteFloat | None, Field(ge=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=MIN_SEED, le=MAX_SEED)] = None
    num_predict: Annotated[int | None, Field(ge=-2, le=MAX_COUNT)] = None
    repeat_penalty: FiniteFloat | None = None
    presence_penalty: FiniteFloat | None = None
    frequency_penalty: FiniteFloat | None = None
    stop: Texts = Field(default_factory=list)


class OllamaFunction(RequestModel):
    name: str
    arguments: dict[str, Any]


class OllamaCall(RequestModel):
    function: OllamaFunction


class OllamaMessage(RequestModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> OllamaMessage:
        if self.images:
            raise ValueError("has images, but the model reads text alone")
        return self


# Options that have our names.
SAME_OPTIONS = ("temperature", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")
REFUSED: Refused = {
    "template": (FIXED, ()),
    "suffix": ("is not supported: the model writes what follows a prompt", ()),
    "context": ("is not supported: send the conversation to /api/chat", ()),
    **refused(NO_MEDIA, "images", "width", "height", "steps"),
}
NAMES = {
    "max_tokens": "options.num_predict",
    "response_format": "format",
    "repetition_penalty": "options.repeat_penalty",
    "reasoning_effort": "think",
    **{name: f"options.{name}" for name in (*SAME_OPTIONS, "top_p", "stop")},
}


class OllamaRequest(OllamaBody):
    refused, names = REFUSED, NAMES

    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount = None

    def shared_fields(self, *, chat: bool = True) -> dict[str, Any]:
        """The fields that both kinds of requests share, as ours. Raises ApiError."""
        options = self.options or OllamaOptions()
        try:
            refuse_fields(options.model_extra or {}, REFUSED_OPTIONS)
        except ApiError as error:
            name = f"options.{error.param}"
            raise invalid_field(f"options.{error.message}", error.code, param=name) from None
        fields: dict[str, Any] = {name: getattr(options, name) for name in SAME_OPTIONS}
        fields |= {"model": self.model, "stop": options.stop}
        fields["repetition_penalty"] = options.repeat_penalty
        # With 0 the most probable token remains.
        fields |= {"top_k": 1} if options.top_p == 0 else {"top_p": options.top_p}
        if options.num_predict is not None and options.num_predict > 0:  # others: no limit
            fields["max_tokens"] = options.num_predict
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            fields["response_format"] = schema_format(self.format)
        if chat:
            fields |= {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
            if self.think is not None:
                switched = "medium" if self.think else "none"
                fields["reasoning_effort"] = self.think if isinstance(self.think, str) else switched
        return fields


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat."""

    messages: list[OllamaMessage] | None = None
    tools: Tools = None

    def translate(self, kept: bytes) -> Translation:
        if not self.messages:
            return _load_reply(self.model, {"message": {"role": "assistant", "content": ""}})
        fields = self.shared_fields()
        fields["messages"] = translated_messages(self.messages)
        fields["tools"] = [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]
        return Translation(fields, self.stream is not False, {"chat": True}, clamps=True)


class OllamaGenerateRequest(OllamaRequest):
    """POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None

    def translate(self, kept: bytes) -> Translation:
        if not self.prompt:
            return _load_reply(self.model, {"response": ""})
        fields = self.shared_fields(chat=not self.raw)
        if not self.raw:
            system = [{"role": "system", "content": self.system}] if self.system else []
            fields |= {"messages": [*system, {"role": "user", "content": self.prompt}]}
        elif self.system:
            why = "system is given, but raw is true, so no template is used; leave one out."
            raise invalid_field(why, param="system")
        else:
            fields["prompt"] = self.prompt
            fields["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        return Translation(fields, self.stream is not False, {"chat": False}, clamps=True)


# --- translation ------------------------------------------------------------------------------


def translated_messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Messages as OpenAI has them, in which calls have ids and results name them."""
    made: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # id and name of those without a result
    numbers = itertools.count()
    for message in messages:
        translated: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            translated["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [call.function for call in message.tool_calls]
            # Nine letters and digits, which all templates accept.
            open_calls = [(f"call{next(numbers):05d}", call.name) for call in calls]
            translated["tool_calls"] = [
                call_of(id_, call.name, json.dumps(call.arguments, ensure_ascii=False))
                for (id_, _), call in zip(open_calls, calls, strict=True)
            ]
        if message.role == "tool":
            found = [each for each in open_calls if message.tool_name in (None, each[1])]
            if not found:
                raise invalid_field(
                    "messages hold a result of a tool that was not called before it."
                )
            open_calls.remove(found[0])
            translated["tool_call_id"] = found[0][0]
        made.append(translated)
    return made


def _load_reply(model: str, empty: dict[str, Any]) -> Translation:
    """The reply to a request without a prompt, with which clients have a model loaded."""
    made = {"model": model, "created_at": rfc3339(time.time()), **empty}
    reply = json.dumps(made | {"done": True, "done_reason": "load"}).encode()
    return Translation({"model": model}, reply=lambda _: reply)


# In ASCII: the clients split lines at separators of Unicode too.
_json = partial(to_json, ensure_ascii=True)


class OllamaFormat(ReplyFormat):
    media_type = "application/x-ndjson"

    def __init__(self, *answered: Any, chat: bool):
        super().__init__(*answered)
        self._chat = chat
        self._shared = {"model": self.model, "created_at": rfc3339(time.time())}
        self._logprobs: list[dict[str, Any]] = []
        self._num_sent = 0  # log-probabilities that lines have had
        self._began_ns = monotonic_ns()
        self._first_ns: int | None = None
        # Lines hold nothing but JSON, so one that adds nothing keeps a connection alive.
        self.keepalive = self._line(self.part(""))

    def part(self, text: str, calls: Sequence[Block] = (), thought: str = "") -> dict[str, Any]:
        """What a line adds to the answer."""
        thoughts = {"thinking": thought} if thought else {}
        if not self._chat:
            return {"response": text, **thoughts}
        message: dict[str, Any] = {"role": "assistant", "content": text, **thoughts}
        if calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": arguments_of(call)}} for call in calls
            ]
        return {"message": message}

    def take(self, delta: OutputDelta) -> list[BlockDelta]:
        if delta.token_ids and self._first_ns is None:
            self._first_ns = monotonic_ns()
        self._logprobs += [token_logprob(self.tokenizer, *each) for each in scored_tokens(delta)]
        return super().take(delta)

    def response(self) -> dict[str, Any]:
        answer = self.answers[0]
        whole = self.part(answer.text_of("text"), answer.calls, answer.text_of("reasoning"))
        return self._shared | whole | self._end()

    def first_events(self) -> Iterator[bytes]:
        return iter(())

    def events(self, delta: OutputDelta) -> Iterator[bytes]:
        for part in self.take(delta):
            if part.begins and part.index:
                yield from self._whole_call(part.index - 1)
            if part.block.kind == "reasoning":
                yield self._line(self.part("", (), part.text))
            elif part.block.kind == "text":
                yield self._line(self.part(part.text) | self._new_logprobs())

    def last_events(self) -> Iterator[bytes]:
        if blocks := self.answers[0].blocks:
            yield from self._whole_call(len(blocks) - 1)
        yield self._line(self.part("") | self._end())

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield _json({"error": error.message}) + b"\n"

    def _whole_call(self, index: int) -> Iterator[bytes]:
        block = self.answers[0].blocks[index]
        if block.kind == "call":
            yield self._line(self.part("", [block]))

    def _new_logprobs(self) -> dict[str, Any]:
        new, self._num_sent = self._logprobs[self._num_sent :], len(self._logprobs)
        return {"logprobs": new} if new else {}

    def _end(self) -> dict[str, Any]:
        """Durations are in nanoseconds; the model is loaded before."""
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
        return _json({**self._shared, "done": False, **fields}) + b"\n"


def mount(app: FastAPI, serving: OpenAIServing) -> None:
    @app.get("/api/ps")
    @app.get("/api/tags")
    async def tags() -> dict[str, Any]:
        """The names under which the model is served and loaded, for Ollama's clients."""
        running = serving.client.running
        return tags_reply(serving.options.names, running.started, running.served.context)

    @app.get("/api/version")
    async def version() -> dict[str, str]:
        """The version of pipespec, not of an Ollama."""
        return {"version": app.version}


DIALECT = Dialect(
    routes={
        "/api/chat": BodyRoute(OllamaChatRequest, OllamaFormat),
        "/api/generate": BodyRoute(OllamaGenerateRequest, OllamaFormat),
        "/api/show": BodyRoute(ShowRequest),
    },
    errors={"/api/": lambda error: {"error": error.message}},
    mount=mount,
)
