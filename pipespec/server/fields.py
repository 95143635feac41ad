"""What clients may ask for, field by field: OpenAI's requests, with what vLLM adds to them.

A field that would change the text is honoured, or refused by name (`REFUSED`); others that we do
not know are ignored. docs/serving.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, FiniteFloat, WithJsonSchema

from pipespec.limits import MAX_COUNT, MAX_PRIORITY
from pipespec.sampling.spec import (
    MAX_BIAS,
    MAX_BIASED,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION,
    MAX_SEED,
    MIN_REPETITION,
)
from pipespec.server.messages import Fields, Message, ToolChoice, Tools
from pipespec.server.structure import ResponseFormat, StructuredOutputs
from pipespec.system.reading import is_whole, shown

MAX_CHOICES = 128  # of one prompt
MAX_PROMPTS = 256  # of one request
MAX_STOPS = 64
MAX_TEMPERATURE = 1e6

LATER = "is not supported yet"
OLD_TOOLS = "is not supported: OpenAI has replaced it by tools and tool_choice"
OLD_FORM = "is not supported: ask for a form with response_format or structured_outputs"
NO_MEDIA = "is not supported: the model reads and writes text alone"
FIXED = "cannot be chosen by a request"
# Fields that would change the text and that nothing here honours, why, and the values that ask for
# nothing; null, false and what is empty ask for nothing either.
REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "functions": (OLD_TOOLS, ()),
    "function_call": (OLD_TOOLS, ("none", "auto")),
    "guided_json": (OLD_FORM, ()),
    "guided_regex": (OLD_FORM, ()),
    "guided_choice": (OLD_FORM, ()),
    "guided_grammar": (OLD_FORM, ()),
    "grammar": (OLD_FORM, ()),
    "json_schema": (OLD_FORM, ()),
    "regex": (OLD_FORM, ()),
    "audio": (NO_MEDIA, ()),
    "modalities": (NO_MEDIA, (["text"],)),
    "suffix": ("is not supported: the model writes what follows a prompt", ()),
    "use_beam_search": ("is not supported: tokens are drawn, not searched for", ()),
    "length_penalty": ("is not supported: tokens are drawn, not searched for", (1,)),
    "prompt_embeds": (LATER, ()),
    "bad_words": (LATER, ()),
    "allowed_token_ids": (LATER, ()),
    "logits_processors": (LATER, ()),
    "include_stop_str_in_output": (LATER, ()),
    "skip_special_tokens": (LATER, (True,)),
    "truncate_prompt_tokens": (LATER, ()),
    "add_generation_prompt": (LATER, (True,)),
    "continue_final_message": (LATER, ()),
    "chat_template": (FIXED, ()),
    "chat_template_kwargs": (FIXED, ()),
    "documents": (LATER, ()),
    "reasoning_effort": (LATER, ("none",)),
    "reasoning": (LATER, ()),
    "verbosity": (LATER, ("medium",)),
    "web_search_options": (LATER, ()),
    "moderation": (LATER, ()),
    "xtc_probability": (LATER, (0,)),
    "typical_p": (LATER, (1,)),
    "mirostat": (LATER, (0,)),
}


def _texts(value: Any) -> Any:
    """One text, or a list of some, as a list."""
    if value is None:
        return []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"is {shown(value)}, but must be a text or a list of texts")
    if len(texts) > MAX_STOPS:
        raise ValueError(f"holds {len(texts)} texts, but may hold {MAX_STOPS}")
    if "" in texts:
        raise ValueError("holds an empty text, which would end every answer")
    if not all(map(is_whole, texts)):
        raise ValueError("holds half a character (a lone surrogate)")
    return texts


def _prompts(value: Any) -> Any:
    """A text, token ids, or a list of either, as a list of prompts."""
    wrong = ValueError(
        f"is {shown(value)}, but must be a text, a list of token ids, or a list of either"
    )
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise wrong
    if value and all(_is_token(item) for item in value):
        value = [value]
    for prompt in value:
        whole = isinstance(prompt, str) or (
            isinstance(prompt, list) and all(map(_is_token, prompt))
        )
        if not whole:
            raise wrong
        if not prompt:
            raise ValueError("is empty, but must have a token at least")
        if isinstance(prompt, str) and not is_whole(prompt):
            raise ValueError("holds half a character (a lone surrogate)")
    if not value:
        raise ValueError("is empty, but must have a token at least")
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"holds {len(value)} prompts, but may hold {MAX_PROMPTS}")
    return value


def _is_token(value: Any) -> bool:
    return type(value) is int


def _biases(value: Any) -> Any:
    """Token ids and what is added to their logits, as pairs."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ValueError(f"is {shown(value)}, but must be an object of token ids and biases")
    if len(value) > MAX_BIASED:
        raise ValueError(f"names {len(value)} tokens, but may name {MAX_BIASED}")
    pairs = {}
    for token, bias in value.items():
        if not (isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 10):
            raise ValueError(f"names {shown(token)}, which is no token id")
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(
                f"has {shown(bias)} for {token}, but a bias is from {-MAX_BIAS:g} to {MAX_BIAS:g}"
            )
        pairs[int(token)] = float(bias)
    return tuple(pairs.items())


_TEXT_SCHEMA: dict[str, Any] = {"type": "string", "minLength": 1}
_TOKENS_SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0},
    "minItems": 1,
}
Texts = Annotated[
    list[str],
    BeforeValidator(_texts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT_SCHEMA,
                {"type": "array", "items": _TEXT_SCHEMA, "maxItems": MAX_STOPS},
                {"type": "null"},
            ]
        }
    ),
]
Prompts = Annotated[
    list[str | list[int]],
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT_SCHEMA,
                _TOKENS_SCHEMA,
                {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
                {"type": "array", "items": _TOKENS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]
Biases = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_biases),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                    "additionalProperties": {
                        "type": "number",
                        "minimum": -MAX_BIAS,
                        "maximum": MAX_BIAS,
                    },
                    "maxProperties": MAX_BIASED,
                },
                {"type": "null"},
            ]
        }
    ),
]
Penalty = Annotated[FiniteFloat | None, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Length = Annotated[int | None, Field(ge=1, le=MAX_COUNT)]
LogprobCount = Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_COUNT)]], Field(max_length=MAX_BIASED)]


class StreamOptions(Fields):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Fields):
    """What both ways to ask for text have in common. null is as if it were left out."""

    model: str | None = None
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
    seed: Annotated[int | None, Field(ge=0, le=MAX_SEED)] = None
    max_tokens: Length = None
    min_tokens: Annotated[int | None, Field(ge=0, le=MAX_COUNT)] = None
    stop: Texts = Field(default_factory=list)
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    priority: Annotated[int | None, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = None
    prompt_logprobs: LogprobCount = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def unsupported(self) -> tuple[str, str] | None:
        """A field that is refused, and why."""
        given = self.model_extra or {}
        for name, (why, neutral) in REFUSED.items():
            value = given.get(name)
            off = value is False and True not in neutral
            nothing = value is None or off or value in ("", [], {})
            if not nothing and value not in neutral:
                return name, why
        return None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Length = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Prompts
    max_tokens: Annotated[int | None, Field(ge=0, le=MAX_COUNT)] = None
    echo: bool | None = None
    logprobs: LogprobCount = None
    best_of: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None


class TokenizeRequest(Fields):
    """POST /tokenize: one of prompt, content and messages."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[Message] | None, Field(min_length=1)] = None
    tools: Tools = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Fields):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=MAX_COUNT)]], Field(max_length=MAX_COUNT)]
