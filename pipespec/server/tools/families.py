"""Which parser reads a model's calls."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import ascii_letters, digits

from pipespec.server.tools.deltas import ToolParser
from pipespec.server.tools.hermes import Hermes
from pipespec.server.tools.llama3_json import Llama3Json
from pipespec.server.tools.mistral import Mistral
from pipespec.server.tools.scheme import Scheme

# The templates of Mistral take ids of so many letters and digits, and no others.
MISTRAL_ID = 9


def _openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    return "".join(secrets.choice(ascii_letters + digits) for _ in range(MISTRAL_ID))


@dataclass(frozen=True)
class Family:
    """Models that write their calls in one form.

    Attributes:
        parser: makes a parser for one answer.
        special: texts of the form that are special tokens in some vocabularies.
        new_id: makes the id of a call, which the model's template takes when it comes back.
    """

    parser: Callable[[], ToolParser]
    special: tuple[str, ...]
    new_id: Callable[[], str] = _openai_id


# By the names that `vllm serve --tool-call-parser` has for them.
FAMILIES: Mapping[str, Family] = {
    "hermes": Family(Hermes, ("<tool_call>", "</tool_call>")),
    "llama3_json": Family(Llama3Json, ("<|python_tag|>",)),
    "mistral": Family(Mistral, ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), _mistral_id),
}


def held_to_scheme(name: str | None) -> Family:
    """How calls are read that a model was made to write; its family gives the ids, if it is
    known."""
    new_id = _openai_id if name is None else FAMILIES[name].new_id
    return Family(Scheme, (), new_id)


def family_of(template: str) -> str | None:
    """The family whose form a chat template teaches; None: none that is known."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    # Later Qwen and GLM write tags where Hermes has JSON.
    if "<tool_call>" in template and not any(
        tag in template for tag in ("<function=", "<arg_key>")
    ):
        return "hermes"
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return "llama3_json"
    return None
