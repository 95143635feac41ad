"""Requests that a server must survive: valid, odd and hostile ones, the same for the same seed."""

import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from pipespec.server.request_schema import UNSUPPORTED_FIELDS, ChatRequest, CompletionRequest

MODEL = "demo"
KEY = "a-key-for-these-requests"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
OLLAMA_CHAT, OLLAMA_GENERATE, OLLAMA_SHOW = "/api/chat", "/api/generate", "/api/show"
GET_ROUTES = (
    *("/v1/models", f"/v1/models/{MODEL}", "/health", "/version", "/load", "/metrics"),
    *("/tokenizer_info", "/openapi.json", "/", "/chat", "/page/main.js", "/models", "/api/tags"),
    *("/api/ps", "/api/version"),
)
ODD_ROUTES = (
    *("/v1/models/%00", "/v1/models/%ff%fe", "/v1/models/..%2f..%2fetc%2fpasswd", "//", "/../.."),
    *("/page/../../pyproject.toml", "/page/%2e%2e/app.py", "/nowhere", "/v1", "/v1/chat"),
    *("/?" + "a=b&" * 500, "/" + "x" * 6000, "/v1/models?" + "%" * 50, "/%", "/*", "/docs"),
    *("/requests/0/cancel", "/requests/-1/cancel", "/requests/99999999999999999999/cancel"),
    *("/requests/%F0%9F%98%80/cancel", "/metrics/", "/v1/completions", "/events?request=x"),
)
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "FOO")
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SURROGATE = "\ud800"
# Instead of any value.
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 0.5, -0.0, 2**31, 2**53, 2**63, -(2**63), 2**64, 10**30),
    *(1e308, float("nan"), float("inf"), float("-inf"), "", " ", "a", "0", "\0", "\x7f", "\u202e"),
    *(SURROGATE, f"a{SURROGATE}b", "\udfff\ud800", "😀" * 20, "ﷺ" * 30, "a\u0300" * 40, "\ufeff"),
    *([], {}, [[]], [{}], {"": ""}, {SURROGATE: SURROGATE}, [None], [SURROGATE], ["a"] * 300),
    *([0] * 300, [-1], [10**9], [1.5], [True], {"a": {"a": []}}, "<|endoftext|>", "{{ 1/0 }}"),
    *("{% for i in range(10**9) %}x{% endfor %}", "/" * 3000, "%s%n%x", "'; DROP TABLE x; --"),
)
FIELDS = (
    *(ChatRequest.model_fields | CompletionRequest.model_fields | UNSUPPORTED_FIELDS),
    *("user", "metadata", "tokens", "content", "return_token_strs"),
)
# Bodies that are no JSON, or hardly.
TEXTS: tuple[bytes, ...] = (
    *(b"", b"null", b"0", b'"a"', b"[]", b"{", b'{"prompt": "a"', b"\xff\xfe", b"\xef\xbb\xbf{}"),
    *(b"[" * 100_000, b'{"a":' * 50_000, b'{"prompt": "\\ud800"}', b'{"prompt": "\xed\xa0\x80"}'),
    *(b'{"prompt": "a", "temperature": 1e400}', b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}"),
    *(b'{"prompt": "a", "prompt": "b", "max_tokens": 1}', b'{"prompt": "a", "max_tokens": 1}}'),
    *(b"prompt=a&max_tokens=1", b"\0" * 1000, b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
    *(b'{"messages": [' + b"{}," * 2000 + b"{}]}", b'{"' + b"k" * 100_000 + b'": 1}'),
)


@dataclass(frozen=True)
class Case:
    """A request as it is sent.

    Attributes:
        name: what is odd about it.
        sent: all bytes of it.
        half: whether the client closes its side after them: the request is not whole.
    """

    name: str
    sent: bytes
    half: bool = False


def request(
    method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> bytes:
    """A well-formed request, on a connection of its own."""
    given = {"Host": "127.0.0.1", "Connection": "close", "X-Api-Key": KEY}
    if body is not None:
        given |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    given |= headers or {}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {text}" for name, text in given.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")


def cases(count: int, seed: int) -> Iterator[Case]:
    """So many requests, the most expensive ones (`LARGE`) once each among them."""
    draw = random.Random(seed)
    kinds = (valid, mutated, no_json, odd_route, odd_headers, broken_framing)
    weights = (15, 45, 8, 10, 10, 15)
    # Far apart, and none at the end.
    places = {round((number + 0.5) * count / len(LARGE)): make for number, make in enumerate(LARGE)}
    for number in range(count):
        if number in places:
            yield places[number]()
        else:
            yield draw.choices(kinds, weights)[0](draw)


# Valid bodies by path, beside what all have.
_HELLO = [{"role": "user", "content": "Hello"}]
_ITEM = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}
_RESULT = {"type": "function_call_output", "call_id": "a", "output": "sunny"}
_USE = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Bern"}}
_DONE = {"type": "tool_result", "tool_use_id": "a", "content": "sunny"}
_CALL = {"function": {"name": "weather", "arguments": {"city": "Bern"}}}
BODIES: dict[str, tuple[dict[str, Any], ...]] = {
    CHAT: ({"messages": _HELLO}, {"messages": _HELLO, "tools": [TOOL], "tool_choice": "auto"}),
    COMPLETIONS: ({"prompt": "Once"}, {"prompt": ["a", "b"]}, {"prompt": [[5], [6, 7]]}),
    TOKENIZE: ({"prompt": "Once"}, {"messages": _HELLO}),
    DETOKENIZE: ({"tokens": [5, 6, 7]},),
    RESPONSES: (
        {"input": [*_HELLO, _ITEM, _RESULT], "store": False, "previous_response_id": "resp_1"},
        {"input": "Hello", "tools": [{"type": "function", "name": "f", "parameters": {}}]}
        | {"tool_choice": "required", "max_output_tokens": 2},
        {"input": "Hello", "text": {"format": {"type": "json_object"}}, "max_output_tokens": 2},
    ),
    MESSAGES: (
        {"messages": [*_HELLO, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [*_HELLO, {"role": "assistant", "content": [_USE]}]}
        | {"tools": [{"name": "weather", "input_schema": {}}], "tool_choice": {"type": "any"}},
        {"messages": [{"role": "user", "content": [_DONE]}]},
    ),
    COUNT: ({"messages": _HELLO, "system": "Be brief."},),
    OLLAMA_CHAT: (
        {"messages": _HELLO, "options": {"num_predict": 2}, "format": "json"},
        {"messages": [{"role": "assistant", "tool_calls": [_CALL]}]}
        | {"options": {"num_predict": 1, "stop": "x"}, "think": True},
    ),
    OLLAMA_GENERATE: ({"prompt": "Once", "raw": True, "options": {"num_predict": 1}},),
    OLLAMA_SHOW: ({"verbose": True},),
}
# The most used ones are drawn more often.
PATHS = (*(CHAT, COMPLETIONS) * 4, *BODIES)


def posted(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A path, and a valid body for it."""
    path = draw.choice(PATHS)
    shared = {"model": MODEL, "max_tokens": draw.randint(1, 3), "seed": 1}
    shared |= {"stream": draw.random() < 0.4}
    return path, shared | deepcopy(draw.choice(BODIES[path]))


def as_json(body: Any) -> bytes:
    return json.dumps(body).encode()


def valid(draw: random.Random) -> Case:
    if draw.random() < 0.5:
        path = draw.choice(GET_ROUTES)
        return Case(f"GET {path}", request("GET", path))
    path, body = posted(draw)
    return Case(f"valid {path} {json.dumps(body)[:300]}", request("POST", path, as_json(body)))


def mutated(draw: random.Random) -> Case:
    """Some values of a valid body, at any depth, are others."""
    path, body = posted(draw)
    for _ in range(draw.randint(1, 3)):
        change(draw, body)
    return Case(f"mutated {path} {json.dumps(body)[:300]}", request("POST", path, as_json(body)))


def change(draw: random.Random, body: dict[str, Any]) -> None:
    place: Any = body
    while True:
        keys = [*place] if isinstance(place, dict) else [*range(len(place))]
        inner = [key for key in keys if isinstance(place[key], dict | list) and place[key]]
        if not inner or draw.random() < 0.6:
            break
        place = place[draw.choice(inner)]
    what = draw.random()
    if isinstance(place, list):
        place[draw.randrange(len(place))] = hostile(draw)
    elif what < 0.2 and place:
        del place[draw.choice([*place])]
    elif what < 0.6 and place:
        place[draw.choice([*place])] = hostile(draw)
    else:
        place[draw.choice(FIELDS)] = hostile(draw)


def hostile(draw: random.Random) -> Any:
    return deepcopy(draw.choice(HOSTILE))  # a later change may go into it


def no_json(draw: random.Random) -> Case:
    path, text = draw.choice(PATHS), draw.choice(TEXTS)
    return Case(f"no JSON {path} {text[:60]!r}", request("POST", path, text))


def odd_route(draw: random.Random) -> Case:
    method, path = draw.choice(METHODS), draw.choice((*ODD_ROUTES, *GET_ROUTES))
    # A stream of events has no end.
    if path == "/events":
        path = "/version"
    return Case(f"{method} {path[:60]}", request(method, path))


def odd_headers(draw: random.Random) -> Case:
    path, body = posted(draw)
    odd = draw.choice(
        (
            {"X-Api-Key": ""},
            {"X-Api-Key": "wrong"},
            {"X-Api-Key": "\xe9" * 100},
            {"X-Api-Key": "", "Authorization": "Bearer"},
            {"X-Api-Key": "", "Authorization": f"bearer   {KEY}"},
            {"X-Api-Key": "", "Authorization": "Basic " + "A" * 3000},
            {"Content-Type": "text/plain"},
            {"Content-Type": "application/json; charset=utf-16"},
            {"Content-Encoding": "gzip"},
            {"Origin": "null"},
            {"Origin": "http://evil.test", "Sec-Fetch-Site": "cross-site"},
            {"Host": ""},
            {"Host": "evil.test"},
            {"Accept": "x/" + "y" * 3000},
            {"Cookie": "a=b; " * 500},
            {"X-Odd": "v" * 100_000},
            {f"X-Odd-{number}": "v" for number in range(500)},
            {"Range": "bytes=0-0"},
            {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
            | {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="},
            {"Upgrade": "h2c", "Connection": "Upgrade, HTTP2-Settings"},
            {"Transfer-Encoding": "chunked"},
            {"Expect": "100-continue"},
            {"X-Request-Id": "\x01\x02"},
        )
    )
    name = json.dumps(odd)[:80]
    # What is upgraded or cut in pieces that do not come ends only with the client.
    half = "Upgrade" in odd or "Transfer-Encoding" in odd
    return Case(name, request("POST", path, as_json(body), odd), half=half)


def broken_framing(draw: random.Random) -> Case:
    """Bytes that are no HTTP, or not quite; most of what can be wrong is the HTTP library's."""
    body = as_json({"prompt": "Once", "max_tokens": 1})
    whole = request("POST", COMPLETIONS, body)
    chunked = request("POST", COMPLETIONS, None, {"Transfer-Encoding": "chunked"})
    garbage = bytes(draw.randrange(256) for _ in range(draw.randint(1, 400)))
    flipped = bytearray(whole)
    for _ in range(draw.randint(1, 4)):
        flipped[draw.randrange(len(flipped))] = draw.randrange(256)
    choices: tuple[tuple[str, bytes], ...] = (
        ("garbage", garbage),
        ("flipped bytes", bytes(flipped)),
        ("cut", whole[: draw.randrange(1, len(whole))]),
        ("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        ("TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200)),
        ("huge length", request("POST", COMPLETIONS, None, {"Content-Length": "9" * 30}) + body),
        ("length and chunks", request("POST", COMPLETIONS, body, {"Transfer-Encoding": "chunked"})),
        ("huge chunk", chunked + b"f" * 20 + b"\r\nabc"),
        ("trailers", chunked + b"0\r\n" + b"A: b\r\n" * 300 + b"\r\n"),
        ("pipelined", request("GET", "/health", None, {"Connection": "keep-alive"}) * 5),
        ("long line", b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n"),
        ("more after it", whole + garbage),
    )
    name, sent = draw.choice(choices)
    return Case(f"framing: {name} {sent[:40]!r}", sent, half=True)


def message(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def large(name: str, path: str, body: Any) -> Callable[[], Case]:
    """`body` makes it when it is needed."""
    return lambda: Case(f"large: {name}", request("POST", path, as_json(body())))


LARGE: tuple[Callable[[], Case], ...] = (
    large("prompt of 10 MB", COMPLETIONS, lambda: {"prompt": "a b " * 2_500_000}),
    large("prompt of 31 MB", COMPLETIONS, lambda: {"prompt": "word" * 7_750_000}),
    large("content of 3 MB", CHAT, lambda: {"messages": [message("é" * 500_000)]}),
    large("text of 3 MB to tokenize", TOKENIZE, lambda: {"prompt": "a" * 3_000_000}),
    large("300,000 messages", CHAT, lambda: {"messages": [message("a")] * 300_000}),
    large("100,000 messages to tokenize", TOKENIZE, lambda: {"messages": [message("a")] * 100_000}),
    large("3 million ids to detokenize", DETOKENIZE, lambda: {"tokens": [5] * 3_000_000}),
    large("a million ids as a prompt", COMPLETIONS, lambda: {"prompt": [5] * 1_000_000}),
    large("100,000 biases", COMPLETIONS, lambda: {"prompt": "a", "logit_bias": biases(100_000)}),
    large("100,000 stops", COMPLETIONS, lambda: {"prompt": "a", "stop": ["x"] * 100_000}),
    large("10,000 tools", CHAT, lambda: {"messages": [message("a")], "tools": [TOOL] * 10_000}),
    large("a regex bomb", COMPLETIONS, lambda: structured(regex="((a{1,999}){1,999}){1,99}")),
    large("a schema of 20,000 fields", COMPLETIONS, lambda: structured(json=wide(20_000))),
    large("a schema 500 levels deep", COMPLETIONS, lambda: structured(json=deep(500))),
    large("unknown fields", COMPLETIONS, lambda: {f"x{i}": i for i in range(200_000)}),
)


def biases(count: int) -> dict[str, int]:
    return {str(token): 1 for token in range(count)}


def structured(**form: Any) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 1, "structured_outputs": form}


def wide(fields: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"f{i}": {"type": "string"} for i in range(fields)}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema
