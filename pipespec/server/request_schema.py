"""The fields of requests: OpenAI's requests, with what vLLM adds to them.

A field that would change the text is honoured, or refused by name (`UNSUPPORTED_FIELDS`); unknown
fields are ignored. docs/http-api.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, FiniteFloat, NonNegativeInt, WithJsonSchema, model_validator

from pipespec.limits import MAX_COUNT, MAX_PRIORITY
from pipespec.sampling.params import (
    MAX_BIAS,
    MAX_BIASED,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION,
    MAX_SEED,
    MIN_REPETITION,
    MIN_SEED,
)
from pipespec.server.api_errors import invalid_field
from pipespec.server.message_schema import Message, RequestModel, ToolChoice, Tools, accepts
from pipespec.server.response_format import ResponseFormat, StructuredOutputs

MAX_CHOICES = 128  # of one prompt
MAX_PROMPTS = 256  # of one request
MAX_ANSWERS = 1024  # to one request
MAX_STOPS, MAX_STOP = 64, 256  # and characters of each
MAX_SALT = 1024  # characters; it is kept with the request
MAX_TEMPERATURE = 1e6
GUIDED = ("json", "regex", "choice", "grammar")  # after "guided_"

LATER = "is not supported yet"
OLD_TOOLS = "is not supported: OpenAI has replaced it by tools and tool_choice"
OLD_STRUCTURED = "is not supported: use response_format or structured_outputs"
NO_MEDIA = "is not supported: the model reads and writes text alone"
FIXED = "cannot be chosen by a request"
IN_TEMPLATE = "is not supported in chats: the template writes the special tokens"
# Fields that are not supported: why, and the values without effect. These are accepted, as are
# null, false and empty ones.
Refused: TypeAlias = Mapping[str, tuple[str, tuple[Any, ...]]]


def refused(why: str, *names: str) -> Refused:
    """Such fields for one reason, whose values all have an effect."""
    return dict.fromkeys(names, (why, ()))


UNSUPPORTED_FIELDS: Refused = {
    "functions": (OLD_TOOLS, ()),
    "function_call": (OLD_TOOLS, ("none", "auto")),
    **refused(OLD_STRUCTURED, "guided_whitespace_pattern", "grammar", "json_schema", "regex"),
    "audio": (NO_MEDIA, ()),
    "modalities": (NO_MEDIA, (["text"],)),
    "suffix": ("is not supported: the model writes what follows a prompt", ()),
    "use_beam_search": ("is not supported: tokens are sampled, not searched for", ()),
    "length_penalty": ("is not supported: tokens are sampled, not searched for", (1,)),
    **refused(LATER, "prompt_embeds", "bad_words", "allowed_token_ids", "logits_processors"),
    **refused(LATER, "include_stop_str_in_output", "truncate_prompt_tokens"),
    "skip_special_tokens": (LATER, (True,)),
    "chat_template": (FIXED, ()),
    "add_special_tokens": (IN_TEMPLATE, ()),
    "echo": ("is not supported in chats", ()),
    **refused(LATER, "documents", "reasoning", "web_search_options", "moderation"),
    "verbosity": (LATER, ("medium",)),
    "xtc_probability": (LATER, (0,)),
    "typical_p": (LATER, (1,)),
    "mirostat": (LATER, (0,)),
}


def refuse_fields(given: Mapping[str, Any], refused: Refused) -> None:
    """Raise ApiError for a field of a table such as `UNSUPPORTED_FIELDS`, unless its value has no
    effect."""
    for name, (why, neutral) in refused.items():
        value = given.get(name)
        off = value is False and True not in neutral
        # An empty schema is a constraint: any JSON matches it.
        empty = value is None or off or value in ("", []) or (value == {} and name != "json_schema")
        if not empty and value not in neutral:
            raise invalid_field(f"{name} {why}; leave it out.", "unsupported_field")


_Text = Annotated[str, Field(min_length=1)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP)]
_Stops = Annotated[list[_Stop], Field(max_length=MAX_STOPS)]
Texts = Annotated[
    list[str],
    accepts(
        _Stop | _Stops | None,
        f"a text or a list of up to {MAX_STOPS} texts of up to {MAX_STOP} characters, none empty",
        lambda value: [value] if isinstance(value, str) else value or [],
    ),
]
_Prompt = Annotated[list[NonNegativeInt], Field(min_length=1, fail_fast=True)]
_Prompts = Annotated[
    list[_Text | _Prompt], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
]
Prompts = Annotated[
    list[str | list[int]],
    accepts(
        _Text | _Prompt | _Prompts,
        f"a text, a list of token ids, or a list of up to {MAX_PROMPTS} of either, none of them "
        "empty",
        lambda value: [value] if isinstance(value, str) or type(value[0]) is int else value,
    ),
]
_TokenId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
_Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
# Pydantic would describe the keys by patternProperties, which admits others.
_BIASES = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
    "maxProperties": MAX_BIASED,
}
Biases = Annotated[
    tuple[tuple[int, float], ...],
    accepts(
        Annotated[dict[_TokenId, _Bias], Field(max_length=MAX_BIASED)] | None,
        f"an object of up to {MAX_BIASED} token ids and biases from {-MAX_BIAS:g} to {MAX_BIAS:g}",
        lambda value: tuple({int(token): bias for token, bias in (value or {}).items()}.items()),
    ),
    WithJsonSchema({"anyOf": [_BIASES, {"type": "null"}]}),
]
Penalty = Annotated[FiniteFloat | None, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Length = Annotated[int | None, Field(ge=1, le=MAX_COUNT)]
LogprobCount = Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_COUNT)]], Field(max_length=MAX_BIASED)]


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestBody(RequestModel):
    """A whole request."""

    refused: ClassVar[Refused] = UNSUPPORTED_FIELDS

    model: str | None = None

    @model_validator(mode="after")
    def _is_supported(self) -> Self:
        refuse_fields(self.model_extra or {}, self.refused)
        return self


class GenerationRequest(RequestBody):
    """The fields that requests for chats and for completions share. null is the same as none."""

    temperature: Annotated[FiniteFloat | None, Field(ge=0, le=MAX_TEMPERATURE)] = None
    top_p: Annotated[FiniteFloat | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=MAX_COUNT)] = None
    min_p: Annotated[FiniteFloat | None, Field(ge=0, le=1)] = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    repetition_penalty: Annotated[
        FiniteFloat | None, Field(ge=MIN_REPETITION, le=MAX_REPETITION)
    ] = None
    logit_bias: Biases = ()
    seed: Annotated[int | None, Field(ge=MIN_SEED, le=MAX_SEED)] = None
    max_tokens: Length = None
    min_tokens: Annotated[int | None, Field(ge=0, le=MAX_COUNT)] = None
    stop: Texts = Field(default_factory=list)
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    priority: Annotated[int | None, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = None
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=MAX_SALT)] = None
    prompt_logprobs: LogprobCount = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def num_prompts(self) -> int:
        return 1

    @model_validator(mode="before")
    @classmethod
    def _rename_guided(cls, fields: Any) -> Any:
        """vLLM's older names of what is in structured_outputs."""
        if not isinstance(fields, dict):
            return fields
        named = {kind: fields.get(f"guided_{kind}") for kind in GUIDED}
        older = {kind: value for kind, value in named.items() if value is not None}
        newer = fields.get("structured_outputs") or {}
        if not older or not isinstance(newer, dict):
            return fields
        return fields | {"structured_outputs": newer | older}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid_field("stream_options is given, but stream is not true.")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid_field(
                f"prompt_logprobs is {self.prompt_logprobs}, but a stream does not report on "
                "its prompt; leave it or stream out."
            )
        n = self.n or 1
        if n * self.num_prompts > MAX_ANSWERS:
            raise invalid_field(
                f"n={n} answers to {self.num_prompts} prompts are asked for, but may be "
                f"{MAX_ANSWERS} in all.",
                param="n",
            )
        return self


class TemplateFields(RequestModel):
    tools: Tools = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None


class ChatRequest(GenerationRequest, TemplateFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Length = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _chat_fits(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid_field("top_logprobs is given, but logprobs is not true.")
        newer = self.max_completion_tokens
        if newer and self.max_tokens not in (None, newer):
            raise invalid_field(
                f"max_tokens is {self.max_tokens}, but max_completion_tokens is {newer}; leave one "
                "out."
            )
        return self


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Prompts
    max_tokens: Annotated[int | None, Field(ge=0, le=MAX_COUNT)] = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    logprobs: LogprobCount = None
    best_of: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None

    @property
    def num_prompts(self) -> int:
        return len(self.prompt)

    @model_validator(mode="after")
    def _best_fits(self) -> Self:
        n = self.n or 1
        if (self.best_of or n) > n:
            raise invalid_field(
                f"best_of is {self.best_of}, but may not be above n={n}: all answers are given."
            )
        if self.max_tokens == 0 and not self.echo:
            raise invalid_field(
                "max_tokens is 0, but must be 1 at least unless echo asks for the prompt."
            )
        return self


class TokenizeRequest(RequestBody, TemplateFields):
    """POST /tokenize: one of prompt, content and messages."""

    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[Message] | None, Field(min_length=1)] = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        given = (self.prompt, self.content, self.messages)
        if sum(each is not None for each in given) != 1:
            raise invalid_field("prompt, content or messages must be given, one of them.")
        return self


class DetokenizeRequest(RequestBody):
    """POST /detokenize."""

    refused: ClassVar[Refused] = {}

    tokens: Annotated[list[Annotated[int, Field(ge=0, le=MAX_COUNT)]], Field(max_length=MAX_COUNT)]
