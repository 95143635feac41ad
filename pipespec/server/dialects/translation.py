"""What the schemas of all dialects share: which fields a request may have, and what it becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

from pydantic import Discriminator, Tag

from pipespec.client.model_info import ModelInfo
from pipespec.server.api_errors import ApiError
from pipespec.server.request_schema import Refused, RequestBody

# Messages of a conversation, as OpenAI's chats have them.
Messages: TypeAlias = Sequence[dict[str, Any]]
# Fields of ours that no dialect but OpenAI's has, and that mean the same in every one.
OWN_FIELDS = frozenset(
    (
        *("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
        *("seed", "min_tokens", "ignore_eos", "stop_token_ids", "priority", "cache_salt"),
        *("chat_template_kwargs", "structured_outputs"),
    )
)


@dataclass(frozen=True)
class Translation:
    """A request of another dialect in OpenAI's words.

    Attributes:
        fields: those of a `ChatRequest`, or of a `CompletionRequest` if `prompt` is among them,
            before validation.
        stream: whether the reply is a stream.
        options: what the format of the reply takes beside the request.
        reply: makes the whole reply, as JSON, to a request for which nothing is generated, of what
            is known of the model.
        clamps: whether a limit of tokens beyond the context is lowered instead of refused.
        counts: makes the reply to a request for the number of its prompt's tokens.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    reply: Callable[[ModelInfo], bytes] | None = None
    clamps: bool = False
    counts: Callable[[int], bytes] | None = None


class DialectBody(RequestBody):
    """A request of another dialect.

    Declared fields and `passed` ones are honoured, except for `ignored` ones, which change no
    text, and `refused` ones (as in `UNSUPPORTED_FIELDS`). All others are unknown, and ignored.
    `names` are the names here, by ours, of fields that have another one in error messages.
    """

    passed: ClassVar[frozenset[str]] = OWN_FIELDS
    ignored: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Refused] = {}
    names: ClassVar[Mapping[str, str]] = {}

    @property
    def continues(self) -> str | None:
        """The id of the response that it continues."""
        return None

    def translate(self, earlier: Messages) -> Translation:
        """The request without `passed` fields, which continues these messages."""
        raise NotImplementedError

    def translated(self, earlier: Messages = ()) -> Translation:
        """The request in OpenAI's words. Raises ApiError."""
        extra = self.model_extra or {}
        made = self.translate(earlier)
        passed = {name: extra[name] for name in self.passed if name in extra}
        translated = {name: value for name, value in made.fields.items() if value is not None}
        return replace(made, fields=passed | translated)

    def explained(self, error: ApiError) -> ApiError:
        """An error of ours with the names that its fields have here."""
        param = error.param or ""
        for ours, theirs in self.names.items():
            if param == ours or param.startswith((f"{ours}.", f"{ours}[")):
                renamed = theirs + param[len(ours) :]
                message = error.message.replace(param, renamed, 1)
                return ApiError(error.status, message, renamed, error.code)
        return error


def call_of(id_: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in a message of the model, whose arguments are JSON."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_of(name: str, parameters: dict[str, Any] | None, description: str | None) -> Any:
    given = {"name": name, "parameters": parameters, "description": description}
    function = {field: value for field, value in given.items() if value is not None}
    return {"type": "function", "function": function}


def named_function(name: str | None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def schema_format(schema: dict[str, Any] | None, name: str = "output") -> dict[str, Any]:
    """What an answer of this schema must match, as OpenAI's chats have it."""
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def add_turn(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add a message to a conversation, as part of the last one if that is of the same user or
    model: templates may demand that they take turns."""
    last = messages[-1] if messages else {}
    if last.get("role") != message["role"] or message["role"] not in ("user", "assistant"):
        messages.append(message)
        return
    for name in ("content", "reasoning_content"):
        if parts := [part for part in (last.get(name), message.get(name)) if part]:
            last[name] = "\n".join(parts)
    if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
        last["tool_calls"] = calls


# For fields that hold a text or a list of parts, so that an error is about what is there.
TEXT, PARTS = Tag("text"), Tag("parts")
TEXT_OR_PARTS = Discriminator(lambda value: "parts" if isinstance(value, list) else "text")
