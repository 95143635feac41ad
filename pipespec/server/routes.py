"""The routes that take a body: their requests and replies, in every dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from pipespec.server.dialects.anthropic import (
    AnthropicFormat,
    AnthropicReply,
    CountTokensRequest,
    MessagesRequest,
    TokenCount,
)
from pipespec.server.dialects.ollama import (
    OllamaChatFormat,
    OllamaChatReply,
    OllamaChatRequest,
    OllamaGenerateFormat,
    OllamaGenerateReply,
    OllamaGenerateRequest,
    ShowReply,
    ShowRequest,
)
from pipespec.server.dialects.responses import ResponsesFormat, ResponsesReply, ResponsesRequest
from pipespec.server.openai_format import ChatFormat, CompletionFormat
from pipespec.server.request_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    RequestBody,
    TokenizeRequest,
)
from pipespec.server.response_schema import (
    ChatReply,
    CompletionReply,
    DetokenizeReply,
    TokenizeReply,
)
from pipespec.server.response_stream import ReplyFormat

SSE, LINES = "text/event-stream", "application/x-ndjson"


@dataclass(frozen=True)
class BodyRoute:
    """A route for POST.

    Attributes:
        body, reply: the models of a request and of a whole reply.
        format: makes the replies, if text is generated; `stream` is the media type of streams.
    """

    body: type[RequestBody]
    reply: type[BaseModel]
    format: Callable[..., ReplyFormat] | None = None
    stream: str = ""


ROUTES: Mapping[str, BodyRoute] = {
    "/v1/chat/completions": BodyRoute(ChatRequest, ChatReply, ChatFormat, SSE),
    "/v1/completions": BodyRoute(CompletionRequest, CompletionReply, CompletionFormat, SSE),
    "/v1/responses": BodyRoute(ResponsesRequest, ResponsesReply, ResponsesFormat, SSE),
    "/v1/messages": BodyRoute(MessagesRequest, AnthropicReply, AnthropicFormat, SSE),
    "/v1/messages/count_tokens": BodyRoute(CountTokensRequest, TokenCount),
    "/api/chat": BodyRoute(OllamaChatRequest, OllamaChatReply, OllamaChatFormat, LINES),
    "/api/generate": BodyRoute(
        OllamaGenerateRequest, OllamaGenerateReply, OllamaGenerateFormat, LINES
    ),
    "/api/show": BodyRoute(ShowRequest, ShowReply),
    "/tokenize": BodyRoute(TokenizeRequest, TokenizeReply),
    "/detokenize": BodyRoute(DetokenizeRequest, DetokenizeReply),
}
