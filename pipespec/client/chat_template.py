"""In which form a chat template takes messages, and whether it shows them: both are found by
rendering marks with the template itself."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

# A text and an argument of probes, which the prompt must have.
MARK, ARGUMENT = "probe-of-texts", "probe-of-arguments"
# How Python writes a part, which no model has learnt.
WRITTEN_PART = f"'text': '{MARK}'"
# Mistral's templates accept ids of nine letters and digits alone.
PROBE_ID = "probe0000"
PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "a", "parameters": {"type": "object"}},
}
# The roles of texts that are looked for: templates leave out some of the model's on purpose.
SHOWN = ("user", "system", "tool")
# The names that templates have for what a model has thought.
REASONING = ("reasoning_content", "thinking")

Messages = list[dict[str, Any]]
Render = Callable[[Messages], str]  # may raise any exception


class TemplateFailed(Exception):
    """Why a chat template made no text, as a clause."""


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def text_of(content: Any) -> str:
    """The text of a message's content, whose parts are joined as in vLLM."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if _is_text(part))
    return content or ""


def with_end(message: dict[str, Any], end: str) -> dict[str, Any]:
    """A message with more at the end of its text, or of its reasoning if it has no text."""
    content = message["content"]
    if not text_of(content):
        return message | {name: message[name] + end for name in REASONING if name in message}
    if isinstance(content, str):
        return message | {"content": content + end}
    return message | {"content": [*content[:-1], text_part(content[-1]["text"] + end)]}


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


@dataclass(frozen=True)
class MessageForm:
    """The form of messages. `parts`: the roles whose content is a list of parts, over which
    templates of multimodal models loop, instead of a text. `as_json`: arguments of calls are a JSON
    text instead of an object, as DeepSeek V3's template joins them with other texts. `no_content`:
    a message of calls without text has None as its content, as DeepSeek R1's distilled models leave
    the calls out beside an empty text."""

    parts: frozenset[str] = frozenset()
    as_json: bool = False
    no_content: bool = False

    def adapted(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as the template wants it, from one whose arguments are objects and whose
        content is a text, or parts."""
        changed, content = dict(message), message.get("content")
        if message["role"] in self.parts:
            if isinstance(content, str):
                changed["content"] = [text_part(content)]
        elif isinstance(content, list) and all(map(_is_text, content)):
            changed["content"] = text_of(content)
        calls = message.get("tool_calls")
        if calls and self.no_content and not text_of(content):
            changed["content"] = None
        if calls and self.as_json:
            changed["tool_calls"] = [_with_json(call) for call in calls]
        return changed


def find_form(render: Render) -> MessageForm:
    """The form with which a template shows most of the texts and arguments of probes; the usual one
    if it makes no difference."""
    form = MessageForm()
    for role, before, after in (("user", "", ""), ("system", "", "a"), ("assistant", "a", "a")):
        texts = (("user", before), (role, MARK), ("user", after))
        probe = [{"role": of, "content": text} for of, text in texts if text]
        form = _most_shown(render, (form, _with_parts(form, role)), probe)
    options = product((form, _with_parts(form, "tool")), (False, True), (False, True))
    forms = [replace(of, as_json=json_, no_content=none) for of, json_, none in options]
    return _most_shown(render, forms, _probe_of_calls())


def _with_parts(form: MessageForm, role: str) -> MessageForm:
    return replace(form, parts=form.parts | {role})


def _most_shown(render: Render, forms: Sequence[MessageForm], probe: Messages) -> MessageForm:
    def shown(form: MessageForm) -> int:
        try:
            text = render([form.adapted(message) for message in probe]).lower()
        except Exception:  # noqa: BLE001 - a template may fail in any way
            return 0
        return (ARGUMENT in text) + (MARK in text and WRITTEN_PART not in text)

    return max(forms, key=shown)


def _probe_of_calls() -> Messages:
    function = {"name": "probe", "arguments": {"note": ARGUMENT}}
    call = {"id": PROBE_ID, "type": "function", "function": function}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "probe", "tool_call_id": PROBE_ID, "content": MARK},
    ]


def _with_json(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def left_out(
    render: Render, conversation: Sequence[Mapping[str, Any]], prompt: str
) -> Iterator[int]:
    """The messages of a user, a system or a tool of which a prompt lacks a text: another prompt is
    made with marks in place of the texts, as templates change texts."""
    marks: list[tuple[int, str, str]] = []  # of which message, in place of which text

    def marked(number: int, text: str) -> str:
        if not text.strip():
            return text
        marks.append((number, secrets.token_hex(8), text))
        return marks[-1][1]

    messages = []
    for number, message in enumerate(conversation):
        changed, content = dict(message), message.get("content")
        if message["role"] in SHOWN and isinstance(content, str):
            changed["content"] = marked(number, content)
        elif message["role"] in SHOWN and isinstance(content, list):
            changed["content"] = [
                {**part, "text": marked(number, part["text"])} if _is_text(part) else part
                for part in content
            ]
        messages.append(changed)
    try:
        other = render(messages)
    except Exception:  # noqa: BLE001 - it reads the texts that the marks replace
        # Words stay as they are where a text is escaped or divided.
        words = ((number, re.findall(r"\w+", text) or [text.strip()]) for number, _, text in marks)
        marks = [(number, max(found, key=len).lower(), "") for number, found in words]
        other = prompt
    other = other.lower()
    return (number for number, mark, _ in marks if mark not in other)
