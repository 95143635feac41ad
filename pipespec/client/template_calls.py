"""How a chat template wants earlier tool calls: the forms differ between families of models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# An argument of the probe, which the text must have.
MARK = "probe-of-tool-calls"
# Mistral's templates accept ids of nine letters and digits alone.
PROBE_ID = "probe0000"


@dataclass(frozen=True)
class CallForm:
    """The form of messages with tool calls. `as_json`: arguments are a JSON text instead of an
    object, as DeepSeek V3's template joins them with other texts. `no_content`: a message without
    text has None as its content, as DeepSeek R1's distilled models leave the calls out beside an
    empty text."""

    as_json: bool = False
    no_content: bool = False

    def adapted(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as the template wants it, from one as Transformers has it: arguments are
        objects and the content is a text."""
        calls = message.get("tool_calls")
        if not calls:
            return dict(message)
        changed = dict(message)
        if self.no_content and not message["content"]:
            changed["content"] = None
        if self.as_json:
            changed["tool_calls"] = [_with_json(call) for call in calls]
        return changed


FORMS = tuple(
    CallForm(*form) for form in ((False, False), (False, True), (True, False), (True, True))
)


def find_call_form(render: Callable[[list[dict[str, Any]]], str]) -> CallForm:
    """The first form with which a template shows the arguments of a call; the usual one if there is
    none. `render` applies the template to a conversation; it may raise any exception."""
    for form in FORMS:
        try:
            text = render([form.adapted(message) for message in _probe()])
        except Exception:  # noqa: BLE001 - a template may fail in any way
            continue
        if MARK in text:
            return form
    return FORMS[0]


def _probe() -> list[dict[str, Any]]:
    call = {
        "id": PROBE_ID,
        "type": "function",
        "function": {"name": "probe", "arguments": {"text": MARK}},
    }
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "probe", "tool_call_id": PROBE_ID, "content": "b"},
    ]


def _with_json(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
