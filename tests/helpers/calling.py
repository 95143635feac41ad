"""Models that have learnt to call tools, as far as a server can tell."""

from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from pipespec.client.model_info import ModelInfo
from pipespec.engine.checkpoint.tokenizer import BackendTokenizer
from pipespec.engine.llguidance_backend import Grammars
from pipespec.sampling.grammar import unpack_mask
from pipespec.server.request_parsing import ParsedRequest

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
    backend = Tokenizer.from_str(served.tokenizer.backend)
    backend.add_special_tokens(list(special))
    tokenizer = BackendTokenizer(backend.to_str(), template, served.tokenizer.special_tokens)
    return replace(
        served, vocab_size=served.vocab_size + len(special), context=2000, tokenizer=tokenizer
    )


def fits(served: ModelInfo, request: ParsedRequest, text: str) -> bool:
    """Whether the grammar of a request lets an answer be this text."""
    grammars = Grammars(lambda: served.tokenizer, served.vocab_size, served.eos)
    matcher = grammars.compile(request.sampling_params[0].grammar)
    ids = served.tokenizer.encode(text, add_special_tokens=False)
    taken = matcher.consume(ids)
    allowed = unpack_mask(matcher.allowed(), served.vocab_size)
    return taken == len(ids) and bool(allowed[list(request.eos)].any())
