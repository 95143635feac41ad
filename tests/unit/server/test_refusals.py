"""What is refused over HTTP, before any cluster is asked."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from httpx2 import Response
from starlette.testclient import TestClient

from pipespec.client.async_client import AsyncClient
from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import RunningCluster
from pipespec.server.app import make_app
from pipespec.server.openai_serving import OpenAIServing
from pipespec.server.options import ServerOptions
from pipespec.server.preparation import PreparationPool
from tests.helpers import dialects
from tests.helpers.calling import TEMPLATE, WEATHER, calling

CONTEXT = 512
HELLO = [{"role": "user", "content": "Tell me a story"}]
NO_REDIS = "redis://127.0.0.1:1"


@pytest.fixture(scope="module")
def running(demo: ModelInfo) -> RunningCluster:
    """The entry of a cluster that does not answer."""
    return replace(dialects.entry_of(replace(demo, context=CONTEXT)), url=NO_REDIS)


@contextmanager
def client_of(running: RunningCluster, **options: Any) -> Iterator[TestClient]:
    pool = PreparationPool(most=1, limit_s=60.0)
    chosen = ServerOptions(("demo",), **options)
    service = OpenAIServing(AsyncClient(running, patience=0.0), chosen, pool)
    app = make_app(service)
    asking = TestClient(app, "http://localhost", raise_server_exceptions=False)
    with closing(pool), asking as http:
        yield http


@pytest.fixture(scope="module")
def http(running: RunningCluster) -> Iterator[TestClient]:
    with client_of(running) as client:
        yield client


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def called(arguments: Any, role: str = "assistant") -> dict[str, Any]:
    """A conversation in which a tool was called."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [*HELLO, {"role": role, "content": None, "tool_calls": [call]}]}


def part(kind: str) -> dict[str, Any]:
    """A message with one part."""
    return {"messages": [{"role": "user", "content": [{"type": kind}]}]}


def tool(**fields: Any) -> dict[str, Any]:
    """A tool with fields of its own."""
    return {"tools": [{"type": "function", "function": {"name": "f"} | fields}]}


def named(name: str) -> dict[str, Any]:
    """The choice of one function."""
    return {"type": "function", "function": {"name": name}}


def allowed(*names: str) -> dict[str, Any]:
    """The choice among some functions."""
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}


def schema(of: dict[str, Any]) -> dict[str, Any]:
    """An answer that a schema describes."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": of}}}


OF_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "valid list"),
    ({"messages": [{"role": "poet", "content": "a"}]}, "messages[0].role", "'poet'"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]", "no tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": "a"}]}, "messages[0]", "no content"),
    (part("image_url"), "messages[0].content", "reads parts of type 'text' alone"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "must be a text"),
    (called("[1]"), "messages[1].tool_calls[0].function.arguments", "must be a JSON object"),
    (called("{"), "messages[1].tool_calls[0].function.arguments", "it is not JSON"),
    (called("{}", role="user"), "messages[1]", "only 'assistant' calls tools"),
    ({"tools": [WEATHER]}, "tools", "forms that are known: hermes, llama3_json, mistral"),
    ({"tools": [WEATHER] * 129}, "tools", "128 items at most"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type", "'custom'"),
    (tool(name="a b"), "tools[0].function.name", "'a b', but should match"),
    (tool(parameters=[]), "tools[0].function.parameters", "is []"),
    ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", "'any', but must be 'none'"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice", "but must be"),
    (
        tool(parameters={"not": {}}) | {"tool_choice": "required"},
        "tools",
        'tools cannot be followed: Unimplemented keys: ["not"]',
    ),
    (
        tool(parameters={"type": "string"}) | {"tool_choice": "required"},
        "tools",
        "are of a type that is no object",
    ),
    ({"tools": [WEATHER], "tool_choice": named("dig")}, "tool_choice", "'dig', which is not in"),
    ({"tool_choice": "required"}, "tool_choice", "tools holds none"),
    ({"functions": [{"name": "a"}]}, "functions", "replaced it by tools"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "but has no json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.name",
        "is missing",
    ),
    (
        {"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}},
        "response_format",
        "goes with the type 'json_schema'",
    ),
    (
        {"response_format": {"type": "text", "schema": {}}},
        "response_format",
        "goes with the type 'json_object'",
    ),
    (schema({"type": "string"}) | {"ignore_eos": True}, "ignore_eos", "ends by itself"),
    (
        schema({}) | {"structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "an answer matches one",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "must name one of json"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "must name one"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
    (
        {"guided_regex": "a", "structured_outputs": {"json": {}}},
        "structured_outputs",
        "must name one",
    ),
    ({"guided_whitespace_pattern": "a"}, "guided_whitespace_pattern", "structured_outputs"),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": "b"}},
        "structured_outputs.whitespace_pattern",
        "is not supported; leave it out",
    ),
    ({"tools": [WEATHER], "tool_choice": allowed()}, "tool_choice", "'allowed_tools'"),
    ({"json_schema": {}}, "json_schema", "structured_outputs"),
    ({"chat_template": "a"}, "chat_template", "cannot be chosen"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "not supported yet"),
    ({"priority": 2**40}, "priority", "less than or equal"),
    ({"modalities": ["text", "audio"]}, "modalities", "text alone"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs is not true"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream is not true"),
    ({"stream": True, "stream_options": 3}, "stream_options", "is 3, but should be an object"),
    ({"stop_token_ids": [1] * 2000}, "stop_token_ids", "should have 1024 items at most"),
    ({"max_tokens": 10**9}, "max_tokens", f"the context holds {CONTEXT}"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "leave one out"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 1"),
    ({"temperature": "hot"}, "temperature", "is 'hot', but should be a valid number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_k": -2}, "top_k", "is -2"),
    ({"min_p": -0.5}, "min_p", "is -0.5"),
    ({"repetition_penalty": 5e-324}, "repetition_penalty", "greater than or equal to 0.01"),
    ({"presence_penalty": 3}, "presence_penalty", "less than"),
    ({"n": 1000}, "n", "128"),
    ({"seed": 2**63}, "seed", "less than or equal"),
    ({"stop": ["x"] * 1000}, "stop", "up to 64 texts"),
    ({"stop": "x" * 257}, "stop", "of up to 256 characters"),
    ({"stop": [""]}, "stop", "empty"),
    ({"stop": 3}, "stop", "is 3, but must be a text"),
    ({"stop_token_ids": [9999]}, "stop_token_ids", "0 to 2047"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "101"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "ends at 2047"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "3 at most"),
]
OF_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": [-1]}, "prompt", "token ids"),
    ({"prompt": [5000]}, "prompt", "0 to 2047"),
    ({"prompt": ["a", 1]}, "prompt", "must be a text"),
    ({"prompt": ["a"] * 2000}, "prompt", "up to 256"),
    ({"prompt": ["a"] * 20, "n": 100}, "n", "may be 1024 in all"),
    ({"prompt": [1] * 600}, "prompt", f"has 600 tokens, but the context holds {CONTEXT}"),
    ({"suffix": "b"}, "suffix", "not supported"),
    ({"best_of": 3}, "best_of", "n=1"),
    ({"logprobs": 21}, "logprobs", "20"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "a stream does not report"),
    ({"max_tokens": 0}, "max_tokens", "unless echo asks for the prompt"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
]
ELSEWHERE: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    (CHAT, {}, 400, "messages", "messages is missing"),
    (COMPLETIONS, {}, 400, "prompt", "prompt is missing"),
    (CHAT, {"messages": HELLO, "model": "gpt-9"}, 404, "model", "'gpt-9' is not served"),
    ("/detokenize", {"tokens": [5000]}, 400, "tokens", "0 to 2047"),
    ("/tokenize", {}, 400, "prompt", "one of them"),
    ("/tokenize", {"messages": HELLO, "chat_template": "x"}, 400, "chat_template", "chosen"),
    (CHAT, {"messages": HELLO, "echo": True}, 400, "echo", "in chats"),
    (CHAT, {"messages": HELLO, "add_special_tokens": True}, 400, "add_special_tokens", "template"),
    ("/v1/embeddings", {}, 404, None, "no such route"),
    ("/v1/models", {}, 405, None, "another method"),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "said"),
    [
        *((CHAT, {"messages": HELLO} | body, 400, param, said) for body, param, said in OF_CHATS),
        *(
            (COMPLETIONS, {"prompt": "a"} | body, 400, param, said)
            for body, param, said in OF_COMPLETIONS
        ),
        *ELSEWHERE,
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value)[:40],
)
def test_invalid_field_is_named_in_one_sentence(http, path, body, status, param, said):
    reply = http.post(path, json=body)
    assert reply.status_code == status, reply.text
    check_error(reply, param, said)


@pytest.mark.parametrize(
    ("path", "methods"), [("/v1/responses/0", "DELETE, GET"), (CHAT, "POST"), ("/health", "GET")]
)
def test_reply_to_another_method_lists_those_of_the_path(http, path, methods):
    reply = http.options(path)
    assert (reply.status_code, reply.headers["Allow"]) == (405, methods)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "JSON object"),
        (b"{", "The body is no JSON"),
        (b"[]", "object"),
        (b'{"messages": "\xff"}', "no JSON in UTF-8"),
        (b'{"prompt": "\\ud800"}', "hex escape"),
        (b'{"a": [{"\\udfff\\ud800": 1}]}', "lone leading surrogate"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "no JSON"),
        (b'{"prompt": ' + b"[" * 10_000, "no JSON"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_invalid_body_is_one_sentence(http, content, said):
    reply = http.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400, reply.text
    check_error(reply, None, said, any_param=True)


HALF = "a\ud800"


def test_lone_surrogate_in_json_within_a_text_is_400(http):
    escaped = json.dumps({"a": HALF})
    for body in (
        called(escaped),
        {"messages": HELLO, "structured_outputs": {"json": json.dumps({"const": HALF})}},
    ):
        reply = http.post(CHAT, json=body)
        assert reply.status_code == 400, reply.text


# `curl -d` sends a form.
@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded", ""])
def test_json_is_read_whatever_its_content_type_and_surrogate_pairs_are_accepted(http, kind):
    content = json.dumps({"prompt": "a \U0001f600"}).encode()
    assert b"\\ud83d\\ude00" in content  # as a pair of escapes
    headers = {"Content-Type": kind}
    assert http.post("/tokenize", content=content, headers=headers).status_code == 200
    assert http.post("/tokenize", content=b"prompt=a", headers=headers).status_code == 400


@pytest.mark.parametrize("content", [b"a" * 2**21, (b"a" * 2**20 for _ in range(2))])
def test_body_beyond_the_limit_is_413(http, content):
    reply = http.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 413
    check_error(reply, None, f"more than {2**20 + 64 * CONTEXT} bytes")


def check_error(reply: Response, param: str | None, said: str, *, any_param: bool = False) -> None:
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert said in error["message"]
    assert any_param or error["param"] == param
    assert len(error["message"]) <= 1000
    assert "\n" not in error["message"]
    assert error["message"].endswith(".")


def test_unknown_tool_format_names_the_option(running):
    unknown = replace(running, served=calling(running.served, TEMPLATE))
    asked = {"messages": HELLO, "tools": [WEATHER]}
    with client_of(unknown) as http:
        reply = http.post(CHAT, json=asked)
        assert reply.status_code == 400
        check_error(reply, "tools", "forms that are known: hermes, llama3_json, mistral")
        assert http.post(CHAT, json=asked | {"tool_choice": "none"}).status_code == 503
    with client_of(unknown, tool_call_parser="hermes") as http:
        assert http.post(CHAT, json=asked).status_code == 503


def test_unreachable_cluster_is_503(http):
    asked = {"prompt": "a"}
    cancelled = http.post("/requests/1/cancel")
    for reply in (http.get("/health"), http.post(COMPLETIONS, json=asked), cancelled):
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) >= 1
        check_error(reply, None, "not ready")
        assert "127.0.0.1" not in reply.text  # the address of Redis stays secret
    assert http.get("/load").json() == {"server_load": 0}
    assert http.get("/docs").status_code == 404  # it would load scripts from elsewhere
    assert "pipespec_cluster_up" in http.get("/metrics").text


def test_every_route_but_health_needs_an_api_key(running):
    with client_of(running, api_keys=("first", "second")) as http:
        paths = ("/v1/models", "/metrics", "/openapi.json", "/version", "/load", "/nowhere")
        for path in (*paths, "/events", "/requests/1/cancel", "/pages"):
            for headers in (
                {},
                {"Authorization": "Bearer third"},
                {"Authorization": "first"},
                {"X-Api-Key": "fir"},
                {"X-Api-Key": ""},
                {"Authorization": "Bearer \xff"},
            ):
                reply = http.get(path, headers={k: v.encode("latin-1") for k, v in headers.items()})
                assert reply.status_code == 401
                check_error(reply, None, "API key")
        assert http.get("/health").status_code == 503
        for path in ("/", "/chat", "/page/main.js", "/page/chat.js", "/page/uplot/uPlot.esm.js"):
            page = http.get(path)
            assert page.status_code == 200
            assert page.headers["content-security-policy"].startswith("default-src 'none'; ")
        for path in ("/page/", "/page/../app.py", "/page/%2e%2e/app.py", "/page/nothing.js"):
            assert http.get(path).status_code in (401, 404)
        for headers in ({"Authorization": "bearer second"}, {"X-Api-Key": "first"}):
            assert http.get("/v1/models", headers=headers).status_code == 200


def test_cors_headers_are_sent_only_to_allowed_origins(running):
    asks = {"Origin": "http://here", "Access-Control-Request-Method": "POST"}
    with client_of(running, api_keys=("key",), allowed_origins=("http://here",)) as http:
        allowed = http.options(CHAT, headers=asks)
        assert allowed.headers["access-control-allow-origin"] == "http://here"
        other = http.options(CHAT, headers=asks | {"Origin": "http://there"})
        assert "access-control-allow-origin" not in other.headers
        plain = http.get("/version", headers={"Origin": "http://here", "X-Api-Key": "key"})
        assert "X-Request-Id" in plain.headers["access-control-expose-headers"]
    with client_of(running) as http:
        refused = http.get("/version", headers=asks)
        assert refused.status_code == 403
        assert "access-control-allow-origin" not in refused.headers
