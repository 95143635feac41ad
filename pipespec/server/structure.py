"""The form of an answer: what a schema, pattern, choice or grammar describes, or calls of tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pipespec.engine import grammar
from pipespec.engine.grammar import Grammars
from pipespec.sampling.grammar import GrammarFailed
from pipespec.server.errors import refused
from pipespec.server.messages import Fields, Tool

ANY_OBJECT = {"type": "object"}
# The parts of a schema that others of its parts refer to.
DEFINITIONS = ("$defs", "definitions")


class JsonSchema(Fields):
    """The schema of a response_format."""

    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Fields):
    """What OpenAI's clients ask: any text, any JSON object, or what a schema describes."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _fits(self) -> ResponseFormat:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError("has a json_schema exactly if its type is 'json_schema'")
        return self


class StructuredOutputs(Fields):
    """The same and more, as vLLM's clients ask it: one of these."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str] | None, Field(min_length=1)] = None
    grammar: str | None = None
    whitespace_pattern: None = None
    structural_tag: None = None

    @model_validator(mode="after")
    def _fits(self) -> StructuredOutputs:
        if len(self.asked) != 1:
            raise ValueError("must name one of json, json_object, regex, choice and grammar")
        return self

    @property
    def asked(self) -> list[str]:
        """What is named of them."""
        names = ("json_", "regex", "choice", "grammar")
        found = [name for name in names if getattr(self, name) is not None]
        return [*found, *(["json_object"] if self.json_object else [])]


# Makes a grammar's text. It may raise GrammarFailed.
Form = Callable[[], str]


def form_of(
    response_format: ResponseFormat | None, outputs: StructuredOutputs | None
) -> tuple[str, Form] | None:
    """The field that says what an answer must fit, and how that becomes a grammar; None: neither
    does. Raises ApiError."""
    asked = None if response_format is None or response_format.type == "text" else response_format
    if asked is not None and outputs is not None:
        raise refused(
            "structured_outputs",
            "response_format and structured_outputs are both given, but an answer fits one form; "
            "leave one out.",
        )
    if asked is not None:
        schema = asked.json_schema.schema_ if asked.json_schema else ANY_OBJECT
        return "response_format", lambda: grammar.of_json_schema(schema)
    if outputs is None:
        return None
    makers: dict[str, Form] = {
        "json_": lambda: grammar.of_json_schema(outputs.json_),
        "json_object": lambda: grammar.of_json_schema(ANY_OBJECT),
        "regex": lambda: grammar.of_regex(outputs.regex or ""),
        "choice": lambda: grammar.of_choice(outputs.choice or ()),
        "grammar": lambda: grammar.of_grammar(outputs.grammar or ""),
    }
    return "structured_outputs", makers[outputs.asked[0]]


def calls_of(tools: Sequence[Tool], most: int | None) -> Form:
    """The form of a list of calls, one at least and `most` at most (None: any number)."""

    def make() -> str:
        return grammar.of_json_schema(calls_schema(tools, most))

    return make


def calls_schema(tools: Sequence[Tool], most: int | None) -> dict[str, Any]:
    """The schema of `[{"name": ..., "arguments": {...}}, ...]`. Raises GrammarFailed."""
    shared: dict[str, dict[str, Any]] = {}
    calls = []
    for tool in tools:
        parameters = dict(tool.function.parameters or ANY_OBJECT)
        for place in DEFINITIONS:  # where references in the parameters look for them
            defined = parameters.pop(place, None) or {}
            if not isinstance(defined, dict):
                raise GrammarFailed(f"the {place} of {tool.function.name} are no JSON object")
            for name, schema in defined.items():
                if shared.setdefault(place, {}).setdefault(name, schema) != schema:
                    raise GrammarFailed(f"two tools define {place}/{name} in different ways")
        properties = {"name": {"const": tool.function.name}, "arguments": parameters}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": [*properties],
                "additionalProperties": False,
            }
        )
    several = {} if most is None else {"maxItems": most}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **several, **shared}


async def checked(grammars: Grammars, param: str, form: Form) -> str:
    """A form as a grammar that can be followed, found out in a thread. Raises ApiError."""

    def check() -> str:
        if not grammar.installed():
            raise GrammarFailed("the server lacks llguidance; install pipespec[grammar] there")
        made = form()
        grammars.check(made)
        return made

    try:
        return await asyncio.to_thread(check)
    except GrammarFailed as error:
        raise refused(param, f"{param} cannot be followed: {error}.") from None
