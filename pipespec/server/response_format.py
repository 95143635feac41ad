"""What answers must match: a schema, pattern, choice or grammar, or calls of tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pipespec.client.request_settings import GRAMMARS
from pipespec.engine.grammar_probe import GrammarProbe
from pipespec.engine.llguidance_backend import grammar_from_json_schema, installed
from pipespec.sampling.grammar import GrammarFailed
from pipespec.server.api_errors import invalid_field
from pipespec.server.message_schema import Function, RequestModel, Tool

ANY_OBJECT = {"type": "object"}
# Keywords that declare what an object has.
DECLARING = {
    *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
    *("required", "minProperties", "maxProperties", "propertyNames", "dependentSchemas"),
    *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const"),
}


class JsonSchema(RequestModel):
    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """OpenAI's field: any text, any JSON object, or an instance of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _fits(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("is of type 'json_schema', but has no json_schema")
        for owner, value in (("json_schema", self.json_schema), ("json_object", self.schema_)):
            if value is not None and self.type != owner:
                has = "a json_schema" if owner == "json_schema" else "a schema"
                raise ValueError(
                    f"is of type '{self.type}', but has {has}, which goes with the type '{owner}'"
                    + "; a json_schema has its own" * (owner == "json_object")
                )
        return self

    @property
    def effective_schema(self) -> dict[str, Any]:
        """The schema of the answer, if its type is not "text"."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return self.schema_ or ANY_OBJECT


class StructuredOutputs(RequestModel):
    """vLLM's field: exactly one of json, json_object, regex, choice and grammar."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str] | None, Field(min_length=1)] = None
    grammar: str | None = None
    whitespace_pattern: None = None
    structural_tag: None = None

    @model_validator(mode="after")
    def _fits(self) -> StructuredOutputs:
        if len(self.given) != 1:
            raise ValueError("must name one of json, json_object, regex, choice and grammar")
        return self

    @property
    def given(self) -> list[str]:
        names = ("json_", "regex", "choice", "grammar", "json_object")
        return [name for name in names if getattr(self, name) not in (None, False)]


@dataclass(frozen=True)
class OutputConstraint:
    """What an answer must match, as the field `param` says it. `text`, which may raise
    GrammarFailed, makes the grammar's text."""

    param: str
    text: Callable[[], str]

    def grammar(self, grammars: GrammarProbe) -> str:
        try:
            if not installed():
                raise GrammarFailed("the server lacks llguidance; install pipespec[grammar] there")
            grammars.check(text := self.text())
        except GrammarFailed as error:
            raise invalid_field(f"{self.param} cannot be followed: {error}.") from None
        return text


def output_constraint(
    response_format: ResponseFormat | None, outputs: StructuredOutputs | None
) -> OutputConstraint | None:
    """The constraint of a request that has these fields; None: any text. Raises ApiError."""
    formatted = response_format is not None and response_format.type != "text"
    if formatted and outputs is not None:
        raise invalid_field(
            "response_format and structured_outputs are given, but an answer matches one of them; "
            "leave the other out.",
            param="structured_outputs",
        )
    if outputs is not None:
        name = outputs.given[0]
        value = ANY_OBJECT if name == "json_object" else getattr(outputs, name)
        make = partial(GRAMMARS[name.partition("_")[0]], value)
        return OutputConstraint("structured_outputs", make)
    if response_format is not None and formatted:
        make = partial(GRAMMARS["json"], response_format.effective_schema)
        return OutputConstraint("response_format", make)
    return None


def tool_calls_constraint(tools: Sequence[Tool], *, several: bool) -> OutputConstraint:
    """A list of calls of these tools: one, or if `several` any number but none."""
    return OutputConstraint("tools", partial(_calls_grammar, tools, several))


def _calls_grammar(tools: Sequence[Tool], several: bool) -> str:
    """The grammar of `[{"name": ..., "arguments": {...}}, ...]`. The parameters of each function
    are a schema of their own, so that references mean their parts. Raises GrammarFailed."""
    calls, parts = [], []
    for number, function in enumerate(tool.function for tool in tools):
        (made,) = json.loads(grammar_from_json_schema(_arguments_schema(function)))["grammars"]
        parts.append({**made, "name": f"arguments_{number}"})
        begins = json.dumps(f'{{"name":"{function.name}","arguments":')
        calls.append(f'{begins} @arguments_{number} "}}"')
    more = '("," call)*' if several else ""
    lark = f'start: "[" call {more} "]"\ncall: {" | ".join(calls)}'
    return json.dumps({"grammars": [{"lark_grammar": lark}, *parts]})


def _arguments_schema(function: Function) -> dict[str, Any]:
    """The schema of an object, which is empty if no parameter is declared. Raises GrammarFailed."""
    schema = function.parameters or {}
    kind = schema.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise GrammarFailed(f"the parameters of {function.name} are of a type that is no object")
    declared = {key for key, value in schema.items() if value or key == "additionalProperties"}
    closed = {} if declared & DECLARING else {"additionalProperties": False}
    return {**schema, "type": "object", **closed}
