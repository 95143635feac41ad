"""The bodies of replies, as OpenAI and vLLM define them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length", "tool_calls"]
# The default of a field that is left out of a reply if it is None.
OMIT_NONE: Any = Field(default=None, exclude_if=lambda value: value is None)


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    """Token counts; cached tokens are known when an answer has ended."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = OMIT_NONE
    completion_tokens_details: CompletionTokensDetails | None = OMIT_NONE


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(BaseModel):
    """The log-probability of a token at its position in a prompt, as in vLLM; `rank` is known for
    the most probable ones that the request asks for."""

    logprob: float
    rank: int | None
    decoded_token: str


# By token id, for each token of a prompt: itself and the most probable ones; None for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class FunctionCall(BaseModel):
    """The function to call, and its arguments: JSON as the model wrote it."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """An answer of the model; content is null if it consists of tool calls alone."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = OMIT_NONE
    tool_calls: list[ToolCall] | None = OMIT_NONE


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = OMIT_NONE


class ChatReply(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = OMIT_NONE
    prompt_logprobs: PromptLogprobs | None = OMIT_NONE
    prompt_token_ids: list[int] | None = OMIT_NONE


class CompletionLogprobs(BaseModel):
    """The tokens of a text and their log-probabilities, as columns of equal length. A prompt's
    first token has no log-probability."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    prompt_token_ids: list[int] | None = OMIT_NONE
    token_ids: list[int] | None = OMIT_NONE
    prompt_logprobs: PromptLogprobs | None = OMIT_NONE


class CompletionReply(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str | None = OMIT_NONE


class ModelCard(BaseModel):
    """A model that is served; `max_model_len` counts tokens of prompt and answer."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    parent: None = None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(BaseModel):
    """The reply of POST /detokenize: the text, under vLLM's name and llama.cpp's."""

    prompt: str
    content: str


class TokenizerInfo(BaseModel):
    vocab_size: int
    model_max_length: int
    eos_token_ids: list[int]
    eos_tokens: list[str]
    chat_template: str | None
    special_tokens: dict[str, str]


class CancelReply(BaseModel):
    """The reply of POST /requests/{request}/cancel: the request ends once the head is notified."""

    cancelled: int
