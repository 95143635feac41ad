"""What the dialects share: parts of a chat in OpenAI's words."""

from __future__ import annotations

from typing import Any

from pydantic import Discriminator, Tag

from pipespec.client.chat_template import text_part
from pipespec.server.message_schema import TextOrParts


def call_of(id_: str, name: str, arguments: str) -> dict[str, Any]:
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
    if parts := [*_parts(last["content"]), *_parts(message["content"])]:
        last["content"] = parts
    name = "reasoning_content"
    if thoughts := [each[name] for each in (last, message) if each.get(name)]:
        last[name] = "\n".join(thoughts)
    if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
        last["tool_calls"] = calls


def _parts(content: TextOrParts) -> list[dict[str, str]]:
    return content if isinstance(content, list) else [text_part(content)] if content else []


# For fields that hold a text or a list of parts, so that an error is about what is there.
TEXT, PARTS = Tag("text"), Tag("parts")
TEXT_OR_PARTS = Discriminator(lambda value: "parts" if isinstance(value, list) else "text")
