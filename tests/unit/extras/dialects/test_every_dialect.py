"""What holds for every dialect: its package's fields are known, and refusals name the client's."""

import json
import typing
from typing import Any

import pytest
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase
from ollama._types import ChatRequest, GenerateRequest, Options
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from pipespec.extras.dialects import ollama
from pipespec.extras.dialects.ollama import OllamaOptions
from pipespec.server.api_errors import ApiError
from pipespec.server.dialect import body_routes, error_reply
from tests.helpers import dialects

MESSAGES, RESPONSES, CHAT, GENERATE = "/v1/messages", "/v1/responses", "/api/chat", "/api/generate"
HELLO = [{"role": "user", "content": "Hello"}]
# What a request needs, in every dialect.
ASKED: dict[str, dict[str, Any]] = {
    MESSAGES: {"model": "demo", "max_tokens": 50, "messages": HELLO},
    RESPONSES: {"model": "demo", "max_output_tokens": 50, "input": "Hello"},
    CHAT: {"model": "demo", "messages": HELLO},
    GENERATE: {"model": "demo"},
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
CLAUDE = {"name": "get_weather", "input_schema": PARAMETERS}
TOOL = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}


# Fields of the packages that change no text, and are ignored.
CLAUDES = (
    "metadata service_tier cache_control inference_geo speed diagnostics user_profile_id "
    "workspace_id"
)
IGNORED = {
    MESSAGES: CLAUDES,
    f"{MESSAGES}/count_tokens": CLAUDES,
    RESPONSES: "user safety_identifier service_tier prompt_cache_key stream_options "
    "prompt_cache_retention prompt_cache_options max_tool_calls",
    CHAT: "keep_alive",
    GENERATE: "keep_alive",
    "options": "numa num_ctx num_batch num_gpu main_gpu low_vram f16_kv logits_all vocab_only "
    "use_mmap use_mlock embedding_only num_thread num_keep mirostat_tau mirostat_eta",
}


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        (MESSAGES, MessageCreateParamsBase),
        (f"{MESSAGES}/count_tokens", MessageCountTokensParams),
        (RESPONSES, ResponseCreateParamsBase),
        (CHAT, ChatRequest),
        (GENERATE, GenerateRequest),
        ("options", Options),
    ],
)
def test_every_field_of_the_package_is_in_one_table(path, sent):
    if path == "options":
        known, refused = {*OllamaOptions.model_fields}, {*ollama.REFUSED_OPTIONS}
    else:
        dialect: Any = body_routes()[path].body
        fields = dialect.model_fields.items()
        known = {*dialect.passed, *(info.alias or name for name, info in fields)}
        refused = {*dialect.refused}
    ignored = {*IGNORED[path].split()}
    found = {*typing.get_type_hints(sent, include_extras=True)} - {"model_config"}
    assert found <= known | ignored | refused
    assert not (known & ignored or known & refused or ignored & refused)


# A wrong field, the name by which it is refused, and a part of the sentence.
WRONG: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    MESSAGES: [
        ({"max_tokens": None}, "max_tokens", "valid integer"),
        ({"messages": []}, "messages", "1 or more"),
        ({"temperature": 1.5}, "temperature", "less than or equal to 1"),
        ({"container": "a"}, "container", "no such service"),
        ({"tools": [CLAUDE | {"type": "bash_20250124"}]}, "tools[0].type", "'custom'"),
        ({"tools": [CLAUDE], "tool_choice": {"type": "tool"}}, "tool_choice", "needs it"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content",
            "'image'",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}
                ]
            },
            "messages[0]",
            "goes with the role 'user'",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "output_config.format",
            "output_config.format cannot be followed",
        ),
        ({"stop_sequences": [""]}, "stop_sequences", "empty"),
    ],
    RESPONSES: [
        ({"input": 3}, "input", "valid string"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]", "should be an item of"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "max_output_tokens is 1000000"),
        ({"background": True}, "background", "no such service"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"truncation": "auto"}, "truncation", "refused"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "'allowed_tools'"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "needs it"),
        ({"include": ["file_search_call.results"]}, "include[0]", "include"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort", "effort"),
    ],
    CHAT: [
        ({"model": "other"}, "model", "not served"),
        ({"options": {"mirostat": 1}}, "options.mirostat", "options.mirostat is not"),
        ({"options": {"temperature": -1}}, "options.temperature", "greater than"),
        ({"options": {"repeat_penalty": 0.0}}, "options.repeat_penalty", "is 0.0"),
        ({"format": {"not": {}}}, "format", "format cannot be followed"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages", "not called"),
        ({"messages": [HELLO[0] | {"images": ["a"]}]}, "messages[0]", "images"),
    ],
    GENERATE: [
        ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        ({"prompt": "a", "context": [1]}, "context", "/api/chat"),
        ({"prompt": "a", "raw": True, "system": "b"}, "system", "raw is true"),
    ],
}


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [(path, *row) for path, rows in WRONG.items() for row in rows],
    ids=str,
)
def test_wrong_field_is_named_as_the_client_knows_it(preparer, path, body, param, said):
    with pytest.raises(ApiError, match=said) as refused:
        dialects.prepared(preparer, path, ASKED[path] | body)
    assert refused.value.param.startswith(param)
    reply = json.loads(bytes(error_reply(path, refused.value).body))
    if path == MESSAGES:
        assert (reply["type"], reply["error"]["type"]) == ("error", "invalid_request_error")
    elif path != RESPONSES:
        assert reply == {"error": refused.value.message}
