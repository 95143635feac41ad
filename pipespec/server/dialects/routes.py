"""The routes of all dialects but OpenAI's chats and completions, and how each is translated."""

from __future__ import annotations

from collections.abc import Mapping

from pipespec.server.dialects import anthropic_schema, ollama_schema, responses_schema
from pipespec.server.dialects.translation import Dialect

DIALECTS: Mapping[str, Dialect] = {
    "/v1/responses": responses_schema.RESPONSES,
    "/v1/messages": anthropic_schema.MESSAGES,
    "/v1/messages/count_tokens": anthropic_schema.COUNT_TOKENS,
    "/api/chat": ollama_schema.CHAT,
    "/api/generate": ollama_schema.GENERATE,
    "/api/show": ollama_schema.SHOW,
}
