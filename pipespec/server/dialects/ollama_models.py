"""What Ollama's /api/tags and /api/show say of the model."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, Field

from pipespec.client.model_info import ModelInfo
from pipespec.server.dialects.translation import DialectBody, Messages, Translation
from pipespec.server.reasoning.reasoning_use import reasoning_use

# Ollama's clients look for the context under the name of the architecture, which a server does not
# know.
ARCHITECTURE = "pipespec"


class ModelDetails(BaseModel):
    """What is known of a model's weights: nothing, as hosts may hold them in different formats."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] | None = None
    parameter_size: str = ""
    quantization_level: str = ""


class ListedModel(BaseModel):
    """A served name."""

    name: str
    model: str
    modified_at: str
    details: ModelDetails


class TagsReply(BaseModel):
    """The reply of GET /api/tags."""

    models: list[ListedModel]


class ShowReply(BaseModel):
    """The reply of POST /api/show."""

    template: str
    parameters: str = ""
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]


class ShowRequest(DialectBody):
    """POST /api/show."""

    passed, ignored = frozenset[str](), frozenset(("verbose",))

    model: Annotated[str, Field(min_length=1)]

    def translate(self, earlier: Messages) -> Translation:
        return Translation({"model": self.model}, reply=_show_reply)


def tags_reply(names: Sequence[str], started: float) -> TagsReply:
    """The served names; the cluster has started at this time."""
    modified = rfc3339(started)
    return TagsReply(
        models=[
            ListedModel(name=name, model=name, modified_at=modified, details=ModelDetails())
            for name in names
        ]
    )


def _show_reply(served: ModelInfo) -> bytes:
    template = served.tokenizer.chat_template or ""
    able = {"tools": "tools" in template, "thinking": reasoning_use(template, "") is not None}
    reply = ShowReply(
        template=template,
        details=ModelDetails(),
        model_info={
            "general.architecture": ARCHITECTURE,
            f"{ARCHITECTURE}.context_length": served.context,
        },
        capabilities=["completion", *(name for name, is_able in able.items() if is_able)],
    )
    return reply.model_dump_json().encode()


def rfc3339(seconds: float) -> str:
    """A time since 1970 as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
