"""Models that have learnt to call tools, as far as a server can tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from pipespec.client.model_info import ModelInfo
from pipespec.engine.checkpoint.tokenizer import BackendTokenizer

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "What the weather is in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
# Shows all that a template is given; `BEGIN` stands for how a family begins a call.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}BEGIN{{ call | tojson }}{% endfor %}"
    "{% if message.tool_call_id %} ({{ message.tool_call_id }}){% endif %}\n{% endfor %}"
)
HERMES = TEMPLATE.replace("BEGIN", "<tool_call>")
MISTRAL = TEMPLATE.replace("BEGIN", "[TOOL_CALLS]")


def calling(served: ModelInfo, template: str, *special: str) -> ModelInfo:
    """The model with another chat template, special tokens more, and a context for both."""
    assert served.backend is not None
    tokenizer = Tokenizer.from_str(served.backend.backend)
    tokenizer.add_special_tokens(list(special))
    backend = BackendTokenizer(tokenizer.to_str(), template, served.backend.special_tokens)
    return replace(
        served, vocab_size=served.vocab_size + len(special), context=2000, backend=backend
    )
