"""What is answered, in OpenAI's words."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length", "tool_calls"]
# Of a field that is left out of a reply where there is nothing to say.
OrNothing: Any = Field(default=None, exclude_if=lambda value: value is None)


class PromptTokensDetails(BaseModel):
    """Of the tokens of prompts, those that were in KV already."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of prompts and answers; what was in KV is known when an answer has ended."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = OrNothing


class TopLogprob(BaseModel):
    """A token that might have been chosen."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token that was chosen, and the most probable ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of each token of a message."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(BaseModel):
    """What the model thinks of a token at its place in a prompt, as vLLM writes it; `rank` is known
    of the most probable ones that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


# By token id, for each token of a prompt: itself and the most probable ones; nothing of the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class FunctionCall(BaseModel):
    """The function that is to be called, and its arguments: JSON as the model wrote it."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """What the model says; content is null if it has called tools and said nothing else."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = OrNothing


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatReply(BaseModel):
    """Of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = OrNothing


class FunctionDelta(BaseModel):
    """What a chunk adds to a call: its name at first, then text of its arguments."""

    name: str | None = OrNothing
    arguments: str


class ToolCallDelta(BaseModel):
    """The same, and whose it is; `id` and `type` come with the name."""

    index: int
    id: str | None = OrNothing
    type: Literal["function"] | None = OrNothing
    function: FunctionDelta


class Delta(BaseModel):
    """What a chunk adds to a message; what it adds nothing to is left out."""

    role: Literal["assistant"] | None = OrNothing
    content: str | None = OrNothing
    tool_calls: list[ToolCallDelta] | None = OrNothing


class ChunkChoice(BaseModel):
    """What a chunk says of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(BaseModel):
    """A piece of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(BaseModel):
    """Of each token of a text: columns of equal length. Of a prompt's first token nothing is
    known but its name."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    """What a piece of a stream adds to an answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionAnswer(CompletionChoice):
    """One answer."""

    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobs | None = OrNothing


class CompletionChunk(BaseModel):
    """A piece of a completion's stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class CompletionReply(BaseModel):
    """Of POST /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionAnswer]
    usage: Usage


class ModelCard(BaseModel):
    """A model that is served; `max_model_len` are tokens of prompt and answer."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    parent: None = None
    max_model_len: int


class ModelList(BaseModel):
    """Of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeReply(BaseModel):
    """Of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(BaseModel):
    """Of POST /detokenize: the text, under vLLM's name and llama.cpp's."""

    prompt: str
    content: str


class TokenizerInfo(BaseModel):
    """Of GET /tokenizer_info."""

    vocab_size: int
    model_max_length: int
    eos_token_ids: list[int]
    eos_tokens: list[str]
    chat_template: str | None
    special_tokens: dict[str, str]


class CancelReply(BaseModel):
    """Of POST /requests/{request}/cancel: it has ended, or ends as soon as the head hears of it."""

    cancelled: int
