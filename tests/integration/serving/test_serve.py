"""`pipespec serve`: a real server on a real cluster, asked by OpenAI's package and by raw HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import jsonschema
import openai
import pytest
import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipespec.client import registry
from pipespec.client.registry import RunningCluster
from pipespec.controller.cluster_status import read_status
from pipespec.controller.membership import Membership
from pipespec.controller.redis_connection import RedisConnection
from pipespec.system.folders import resource_dir
from tests.helpers.sandbox import PATIENCE_S, Sandbox
from tests.helpers.serving import MODEL, NAME, Server, serving
from tests.helpers.waiting import until
from tests.integration.serving.conftest import CONTEXT
from tools.rig import cluster, http_server
from tools.rig.http_streams import Behaviour, Stream, read_stream
from tools.rig.schemas import SCHEMAS

pytestmark = pytest.mark.slow
NUM_TOKENS = 16
# Keys that come and go while nothing happens: leases, lists of tasks, marks.
FEW_KEYS = 5
PROMPTS = (
    "Once upon a time there was a king who",
    "The little girl ran out of the house and",
    "Tom has three apples and buys four more. How many",
)
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": NUM_TOKENS, "temperature": 0}
HELLO = [{"role": "user", "content": "Tell me a story"}]
LONG: dict[str, Any] = {"max_tokens": 400, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(place: Sandbox) -> Iterator[Server]:
    with serving(place, "--on", NAME) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resource_dir("demo") / "target")


@pytest.fixture(scope="module")
def expected(tokenizer: Any) -> list[list[int]]:
    """What the target says after each prompt, by Hugging Face."""
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    return cluster.reference(resource_dir("demo") / "target", ids, NUM_TOKENS)


def ids_of(tokenizer: Any, tokens: list[str]) -> list[int]:
    """The ids of tokens that a reply has as text."""
    by_text = {tokenizer.decode([i]): i for i in range(len(tokenizer))}
    return [by_text[token] for token in tokens]


def strictly(kind: type[BaseModel], told: Any) -> Any:
    """What was told, which has the types that OpenAI's package states and no key that it does
    not."""
    return kind.model_validate(told, strict=True, extra="forbid")


# --- text -------------------------------------------------------------------------------------


def test_greedy_tokens_equal_hugging_face(
    client: openai.OpenAI, tokenizer: Any, expected: list[list[int]]
) -> None:
    for prompt, ids in zip(PROMPTS, expected, strict=True):
        for given in (prompt, tokenizer.encode(prompt)):
            told = client.completions.create(prompt=given, logprobs=0, **ASKED)
            logprobs = told.choices[0].logprobs
            assert logprobs is not None
            assert ids_of(tokenizer, logprobs.tokens or []) == ids
            assert told.choices[0].text == tokenizer.decode(ids)
            assert told.usage is not None
            assert told.usage.completion_tokens == len(ids)
            assert told.usage.prompt_tokens == len(tokenizer.encode(prompt))


def test_list_of_prompts_gets_answers_in_order(
    client: openai.OpenAI, tokenizer: Any, expected: list[list[int]]
) -> None:
    told = client.completions.create(prompt=list(PROMPTS), n=2, **ASKED)
    texts = [text for text in map(tokenizer.decode, expected) for _ in range(2)]
    assert [choice.text for choice in told.choices] == texts
    assert [choice.index for choice in told.choices] == list(range(6))


def test_chat_equals_completion_of_the_rendered_template(
    client: openai.OpenAI, tokenizer: Any
) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "2+2?"}],
        },
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And 3+3?"},
    ]
    told = client.chat.completions.create(messages=messages, **ASKED)  # type: ignore[arg-type]
    flat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is\n2+2?"},
        *messages[2:],
    ]
    prompt = tokenizer.apply_chat_template(flat, add_generation_prompt=True, tokenize=False)
    same = client.completions.create(
        prompt=tokenizer.encode(prompt, add_special_tokens=False), **ASKED
    )
    assert told.choices[0].message.content == same.choices[0].text
    assert told.choices[0].message.role == "assistant"
    tokens = told.usage.prompt_tokens
    assert (tokens, told.usage.completion_tokens) == (same.usage.prompt_tokens, NUM_TOKENS)
    # What was asked a moment ago is read from KV, but for its last token.
    assert same.usage.prompt_tokens_details.cached_tokens == tokens - 1


def test_streams_equal_whole_replies_in_valid_chunks(server: Server, client: openai.OpenAI) -> None:
    asked = ASKED | {"stream_options": {"include_usage": True}}
    whole = client.chat.completions.create(messages=HELLO, **ASKED)  # type: ignore[call-overload]
    chunks = server.chunks("/v1/chat/completions", asked | {"messages": HELLO})
    for chunk in chunks:
        strictly(ChatCompletionChunk, chunk)
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    first, *middle, last, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"] == whole.usage.to_dict()
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle)
    assert text == whole.choices[0].message.content

    told = client.completions.create(prompt=PROMPTS[0], **ASKED)
    chunks = server.chunks("/v1/completions", asked | {"prompt": PROMPTS[0]})
    for chunk in chunks:
        # The package's type wants a reason in every piece; OpenAI sends null before the last.
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        strictly(Completion, chunk)
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == told.choices[0].text


def test_whole_replies_have_openais_types(server: Server) -> None:
    body = ASKED | {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "n": 2}
    chat = strictly(ChatCompletion, server.http.post("/v1/chat/completions", json=body).json())
    assert [choice.index for choice in chat.choices] == [0, 1]
    assert all(len(token.top_logprobs) == 2 for token in chat.choices[1].logprobs.content)
    body = ASKED | {"prompt": PROMPTS[0], "logprobs": 2, "n": 2}
    told = strictly(Completion, server.http.post("/completions", json=body).json())
    assert [choice.index for choice in told.choices] == [0, 1]
    assert all(len(likely) >= 2 for likely in told.choices[1].logprobs.top_logprobs)


def test_openai_package_reads_streams_of_several_answers(client: openai.OpenAI) -> None:
    asked = ASKED | {"temperature": 1, "seed": 5, "n": 3}
    whole = client.chat.completions.create(messages=HELLO, **asked)  # type: ignore[call-overload]
    texts = ["", "", ""]
    reasons: dict[int, str] = {}
    for chunk in client.chat.completions.create(messages=HELLO, stream=True, **asked):  # type: ignore[call-overload]
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    assert reasons.keys() == {0, 1, 2}


def _object_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "maxProperties": 1}


def test_structured_output_matches_its_constraint(server: Server, client: openai.OpenAI) -> None:
    name, schema = "person", SCHEMAS["nested"]
    form = {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}
    asked: dict[str, Any] = {"model": "demo", "temperature": 1, "seed": 3, "max_tokens": 200}
    asked |= {"messages": HELLO, "response_format": form}
    (whole,) = client.chat.completions.create(**asked).choices
    assert whole.finish_reason == "stop" and whole.message.content
    jsonschema.validate(json.loads(whole.message.content), schema)
    chunks = server.chunks("/v1/chat/completions", asked)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == whole.message.content
    for outputs, fits in (
        ({"choice": ["red", "blue"]}, lambda text: text in ("red", "blue")),
        ({"regex": "[0-9]{3}-[a-f]"}, lambda text: re.fullmatch("[0-9]{3}-[a-f]", text)),
        ({"grammar": 'root ::= "a" ("b" | "c")? "d"'}, lambda t: re.fullmatch("a[bc]?d", t)),
        ({"json": _object_of({"type": "boolean"})}, lambda text: json.loads(text)["a"] in (0, 1)),
    ):
        told = client.completions.create(
            model="demo",
            prompt=PROMPTS[0],
            max_tokens=200,
            temperature=0.5,
            seed=1,
            extra_body={"structured_outputs": outputs},
        )
        (choice,) = told.choices
        assert choice.finish_reason == "stop" and fits(choice.text), choice.text
    asked |= {"response_format": {"type": "json_object"}, "max_tokens": 5}
    assert client.chat.completions.create(**asked).choices[0].message.content.startswith("{")


def test_agent_calls_tools_over_several_turns(client: openai.OpenAI) -> None:
    """Five turns of a loop as agents have it, streamed: every call is one of a tool, with
    arguments of its schema, and what it says goes back."""
    tools = [
        {"type": "function", "function": {"name": name, "parameters": SCHEMAS[schema]}}
        for name, schema in (("find", "object"), ("draw", "union"), ("go", "reference"))
    ]
    messages: list[Any] = [{"role": "user", "content": "Find Tom, draw him, and go home."}]
    called: list[str] = []
    for turn in range(5):
        chosen: Any = "required"
        if turn == 4:
            chosen = {"type": "function", "function": {"name": "go"}}
        with client.chat.completions.stream(
            model="demo",
            messages=messages,
            tools=tools,
            tool_choice=chosen,
            parallel_tool_calls=False,  # so small a model would call for ever
            temperature=1,
            seed=turn,
            max_tokens=150,
        ) as stream:
            (choice,) = stream.get_final_completion().choices
        assert choice.finish_reason == ("tool_calls" if turn < 4 else "stop")
        calls = choice.message.tool_calls
        assert calls and not choice.message.content
        messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in calls:
            called.append(call.function.name)
            schema = next(
                tool["function"]["parameters"]
                for tool in tools
                if tool["function"]["name"] == call.function.name
            )
            jsonschema.validate(json.loads(call.function.arguments), schema)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{turn} done"})
    assert len(called) >= 5 and called[-1] == "go"


def test_impossible_constraints_are_refused_without_delaying_others(
    server: Server, client: openai.OpenAI
) -> None:
    bombs: list[dict[str, Any]] = [
        {"regex": "(a{1,3000}){1,3000}"},
        {
            "json": {
                "allOf": [
                    {"properties": {f"p{i}": {"anyOf": [{}, {"$ref": "#"}]}}} for i in range(300)
                ]
            }
        },
        {"json": json.dumps({"items": {"type": "string"}})[:-1]},
        {"json": '{"items":' * 400 + "{}" + "}" * 400},
        {"choice": [f"choice {i}" for i in range(40_000)]},
        {"json": {"type": "array", "uniqueItems": True}},
        {"grammar": "start: start start"},
    ]
    body = {"prompt": PROMPTS[0], "max_tokens": 40, "stream": True, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as running:
        for bomb in bombs:
            began = time.monotonic()
            reply = server.http.post(
                "/v1/completions", json={"prompt": "a", "structured_outputs": bomb}
            )
            assert time.monotonic() - began < 1, bomb
            assert reply.status_code == 400, bomb
            assert reply.json()["error"]["param"] == "structured_outputs"
        assert running.read().decode().endswith("data: [DONE]\n\n")
    assert client.completions.create(prompt=PROMPTS[0], **ASKED).choices[0].text


@pytest.mark.long
def test_same_seed_gives_the_same_text_and_no_seed_a_new_one(client: openai.OpenAI) -> None:
    def text(**more: Any) -> str:
        asked = {"model": MODEL, "max_tokens": 12, "prompt": PROMPTS[0]} | more
        return client.completions.create(**asked).choices[0].text

    assert text(seed=7) == text(seed=7)
    assert text(seed=7) != text(seed=8)
    # OpenAI's default temperature is 1.
    assert len({text() for _ in range(3)}) > 1
    assert text(temperature=0) == text(temperature=0, seed=3)


def test_echo_returns_the_prompt(server: Server, client: openai.OpenAI) -> None:
    plain = client.completions.create(prompt=PROMPTS[0], **ASKED).choices[0].text
    told = client.completions.create(prompt=PROMPTS[0], echo=True, **ASKED).choices[0].text
    assert told == PROMPTS[0] + plain
    chunks = server.chunks("/v1/completions", ASKED | {"prompt": PROMPTS[0], "echo": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == told


def test_no_part_of_a_stop_string_is_sent(server: Server, client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPTS[0], **ASKED).choices[0].text
    stop = whole[len(whole) // 2 :][:6]
    before = whole[: whole.index(stop)]
    for stops in (stop, [stop, "never"]):
        told = client.completions.create(prompt=PROMPTS[0], stop=stops, **ASKED).choices[0]
        assert (told.text, told.finish_reason) == (before, "stop")
    shown = ""
    for chunk in server.chunks("/v1/completions", ASKED | {"prompt": PROMPTS[0], "stop": stop}):
        shown += chunk["choices"][0]["text"]
        assert before.startswith(shown)
    assert shown == before


def test_stop_token_ids_min_tokens_and_logit_bias_are_honoured(
    client: openai.OpenAI, expected: list[list[int]]
) -> None:
    ids = expected[0]
    asked = ASKED | {"prompt": PROMPTS[0]}
    ended = client.completions.create(**asked, extra_body={"stop_token_ids": [ids[4]]})
    at = ids.index(ids[4]) + 1
    assert ended.usage is not None
    assert (ended.choices[0].finish_reason, ended.usage.completion_tokens) == ("stop", at)
    later = client.completions.create(
        **asked, extra_body={"stop_token_ids": [ids[4]], "min_tokens": at + 1}
    )
    assert later.usage is not None
    assert later.usage.completion_tokens > at
    banned = client.completions.create(**asked, logit_bias={str(ids[0]): -100}, logprobs=0)
    assert banned.choices[0].text != client.completions.create(**asked).choices[0].text


# --- log-probabilities ------------------------------------------------------------------------


def test_logprobs_equal_hugging_face(
    server: Server, client: openai.OpenAI, tokenizer: Any, expected: list[list[int]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(resource_dir("demo") / "target").float()
    prompt = tokenizer.encode(PROMPTS[0])
    with torch.no_grad():
        logits = model(torch.tensor([prompt + expected[0]])).logits[0].double()
    values = logits[len(prompt) - 1 : -1].log_softmax(-1)
    own = [float(row[token]) for row, token in zip(values, expected[0], strict=True)]
    best = [row.topk(3) for row in values]

    told = client.completions.create(prompt=prompt, logprobs=3, **ASKED).choices[0].logprobs
    assert told is not None
    assert told.token_logprobs == pytest.approx(own, abs=1e-4)
    assert told.top_logprobs is not None
    assert told.text_offset is not None
    for top, row in zip(told.top_logprobs, best, strict=True):
        assert sorted(top.values(), reverse=True)[:3] == pytest.approx(
            row.values.tolist(), abs=1e-4
        )
    text = tokenizer.decode(expected[0])
    starts = [
        text[at:].startswith(token)
        for at, token in zip(told.text_offset, told.tokens or [], strict=True)
    ]
    assert all(starts)

    # The prompt's own, longer than what the last stage looks at in one go.
    long = [*prompt, *expected[0]] * 3
    with torch.no_grad():
        values = model(torch.tensor([long])).logits[0, :-1].double().log_softmax(-1)
    own = values.gather(1, torch.tensor(long[1:])[:, None]).squeeze(1).tolist()
    asked = {"prompt": long, "echo": True, "logprobs": 2} | ASKED
    whole = client.completions.create(**asked, extra_body={"prompt_logprobs": 1}).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.token_logprobs is not None
    assert whole.logprobs.token_logprobs[0] is None
    assert whole.logprobs.token_logprobs[1 : len(long)] == pytest.approx(own, abs=1e-4)
    assert whole.logprobs.text_offset == sorted(whole.logprobs.text_offset or [])
    assert len(whole.logprobs.tokens or []) == len(long) + NUM_TOKENS
    by_id = (whole.model_extra or {})["prompt_logprobs"]
    assert by_id[0] is None
    found = [each[str(token)]["logprob"] for each, token in zip(by_id[1:], long[1:], strict=True)]
    assert found == pytest.approx(own, abs=1e-4)
    alone = client.completions.create(**asked | {"max_tokens": 0})
    assert alone.usage is not None
    assert alone.usage.completion_tokens == 0
    assert alone.choices[0].text == tokenizer.decode(long)
    assert alone.choices[0].logprobs is not None
    assert alone.choices[0].logprobs.token_logprobs[1:] == pytest.approx(own, abs=1e-4)
    (shown, *_) = server.chunks("/v1/completions", asked)
    assert shown["choices"][0]["logprobs"] == alone.choices[0].logprobs.model_dump()

    # Before temperature: those of a warmer request are of the same distribution.
    chat = client.chat.completions.create(  # type: ignore[call-overload]
        messages=HELLO, logprobs=True, top_logprobs=2, **ASKED
    )
    warm = client.chat.completions.create(  # type: ignore[call-overload]
        messages=HELLO, logprobs=True, top_logprobs=2, seed=1, **ASKED | {"temperature": 3}
    )
    content, first = chat.choices[0].logprobs.content, warm.choices[0].logprobs.content[0]
    assert [t.logprob for t in first.top_logprobs] == pytest.approx(
        [t.logprob for t in content[0].top_logprobs], abs=1e-4
    )
    said = b"".join(bytes(token.bytes) for token in content)
    assert said.decode(errors="replace").strip() == chat.choices[0].message.content.strip()


# --- who leaves, and who comes in numbers -----------------------------------------------------


def test_disconnected_client_cancels_its_requests(server: Server, client: openai.OpenAI) -> None:
    def unfinished() -> float:
        return sum(server.metric(f"vllm:num_requests_{kind}") for kind in ("running", "waiting"))

    until(lambda: unfinished() == 0)
    left = server.metric("pipespec_request_success_total")
    stream = client.chat.completions.create(messages=HELLO, n=3, stream=True, model=MODEL, **LONG)  # type: ignore[call-overload]
    next(iter(stream))
    until(lambda: unfinished() == 3)
    stream.close()
    until(lambda: unfinished() == 0)
    # And who waits for a whole reply.
    body = {"messages": HELLO, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    with httpx2.Client(base_url=server.url) as impatient, pytest.raises(httpx2.TimeoutException):
        impatient.post("/v1/chat/completions", json=body, timeout=0.3)
    until(lambda: unfinished() == 0)
    assert server.http.get("/load").json() == {"server_load": 0}
    lines = server.http.get("/metrics").text
    assert (
        'vllm:request_success_total{engine="0",finished_reason="abort",model_name="demo"}' in lines
    )
    assert server.metric("pipespec_request_success_total") == left + 4


def behaviours(count: int) -> list[tuple[Behaviour, dict[str, Any]]]:
    """Clients that stay, read slowly, leave at once or in the middle of an answer."""
    draw = random.Random(1)
    kinds = (
        lambda: Behaviour(),
        lambda: Behaviour(pause_s=0.05),
        lambda: Behaviour(leave_s=draw.uniform(0, 0.2)),
        lambda: Behaviour(leave_after=draw.randint(1, 8)),
    )
    size = {"ignore_eos": True, "stream": True, "max_tokens": 8}
    return [
        (kinds[i % 4](), {"prompt": draw.choice(PROMPTS), "seed": i, "n": i % 3 + 1, **size})
        for i in range(count)
    ]


def lasting_keys(running: RunningCluster) -> int:
    """The keys of a cluster that Redis will not expire."""
    pipe = RedisConnection(running.url)
    try:
        return sum(pipe.call("TTL", name) < 0 for name in pipe.call("KEYS", "*"))
    finally:
        pipe.close()


def test_clients_that_disconnect_at_any_time_leave_no_requests(
    place: Sandbox, server: Server, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    monkeypatch.setenv(http_server.STATE_VARIABLE, str(place.folder))
    here = http_server.ServerAddress(server.announced["url"])
    running = http_server.find_cluster(NAME)

    async def run(clients: list[tuple[Behaviour, dict[str, Any]]]) -> list[Stream]:
        reading = (read_stream(here.connect, "/v1/completions", b, how) for how, b in clients)
        return await asyncio.gather(*reading)

    def at_rest() -> bool:
        gauges = [here.metric(f"vllm:num_requests_{what}") for what in ("running", "waiting")]
        overview = read_status(running.url, running.namespace)
        assert overview is not None
        held = overview.statistics.get("kv_slots_held", 0)
        return not any([*gauges, here.open_requests(), held])

    keys = lasting_keys(running)
    for _ in range(5 if long else 2):
        clients = behaviours(20)
        streams = asyncio.run(run(clients))
        assert any(stream.left for stream in streams)
        assert all(stream.left or stream.complete for stream in streams)
        assert all(s.complete for (how, _), s in zip(clients, streams, strict=True) if how.pause_s)
        until(at_rest)
    assert lasting_keys(running) <= keys + FEW_KEYS


def test_sixteen_concurrent_streams_equal_single_ones(server: Server) -> None:
    def stream(seed: int) -> str:
        chunks = server.chunks(
            "/v1/completions",
            {"prompt": PROMPTS[seed % 3], "max_tokens": 8, "seed": seed, "temperature": 0.8},
        )
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    with ThreadPoolExecutor(16) as users:
        together = list(users.map(stream, range(16)))
    assert together == [stream(seed) for seed in range(16)]


def test_slow_reader_delays_no_other_stream(server: Server, client: openai.OpenAI) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(
        {"messages": HELLO, "max_tokens": 400, "ignore_eos": True, "n": 4, "stream": True}
    )
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.connect((host, int(port)))
        slow.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json"
            f"\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        assert slow.recv(64).startswith(b"HTTP/1.1 200")
        told = client.completions.create(prompt=PROMPTS[0], **ASKED)
        assert told.choices[0].finish_reason == "length"
    until(lambda: server.http.get("/load").json() == {"server_load": 0})


# --- what is refused --------------------------------------------------------------------------


def test_openai_package_raises_its_errors_for_refused_requests(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(prompt="a", model=MODEL, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.chat.completions.create(model="gpt-9", messages=HELLO)  # type: ignore[arg-type]
    assert client.completions.create(prompt="a", **ASKED).choices[0].finish_reason


def test_fields_without_effect_are_ignored(client: openai.OpenAI) -> None:
    plain = client.completions.create(prompt=PROMPTS[0], **ASKED)
    told = client.completions.create(
        prompt=PROMPTS[0],
        user="me",
        extra_body={"whatever": [1], "tools": [], "length_penalty": 1.0, "suffix": None},
        **ASKED,
    )
    assert told.choices[0].text == plain.choices[0].text


# --- the other routes -------------------------------------------------------------------------


def test_models_tokenize_and_metrics_routes(
    server: Server, client: openai.OpenAI, tokenizer: Any
) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.to_dict()["max_model_len"]) == (MODEL, CONTEXT)
    assert client.models.retrieve(MODEL) == model
    ids = tokenizer.encode(PROMPTS[0])
    for name in ("prompt", "content"):
        told = server.http.post(
            "/tokenize", json={name: PROMPTS[0], "return_token_strs": True}
        ).json()
        assert (told["tokens"], told["count"], told["max_model_len"]) == (ids, len(ids), CONTEXT)
        assert told["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    told = server.http.post("/tokenize", json={"messages": HELLO}).json()
    assert told["tokens"] == tokenizer.apply_chat_template(
        HELLO, add_generation_prompt=True, return_dict=False
    )
    assert server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == PROMPTS[0]
    info = server.http.get("/tokenizer_info").json()
    assert (info["vocab_size"], info["model_max_length"]) == (len(tokenizer), CONTEXT)
    assert server.http.get("/version").json()["version"]
    assert server.http.get("/health").status_code == 200
    before = server.metric("vllm:generation_tokens_total")
    client.completions.create(prompt=PROMPTS[0], **ASKED)
    assert server.metric("vllm:generation_tokens_total") == before + NUM_TOKENS
    assert server.metric("pipespec_generation_tokens_total") == before + NUM_TOKENS
    assert server.metric("vllm:time_to_first_token_seconds_count") > 0


def test_cluster_metrics_count_the_requests(
    server: Server, client: openai.OpenAI, tokenizer: Any
) -> None:
    def told(name: str) -> float:
        return server.metric(name)

    def settled() -> bool:
        """The head publishes its counts once a second, so those of the test before may come yet."""
        counts = told("pipespec_steps_total"), told("vllm:kv_cache_usage_perc")
        if counts != latest[0]:
            latest[:] = counts, time.monotonic()
        return counts[1] == 0 and time.monotonic() - latest[1] > 2

    latest: list[Any] = [None, 0.0]
    until(settled)

    names = (
        *("pipespec_decided_tokens_total", "pipespec_rows_total", "pipespec_steps_total"),
        *("vllm:iteration_tokens_total_sum", "vllm:iteration_tokens_total_count"),
        *("vllm:spec_decode_num_draft_tokens_total", "pipespec_draft_rows_total"),
        *("vllm:spec_decode_num_accepted_tokens_total", "pipespec_draft_hits_total"),
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
        *(f"vllm:request_{part}_time_seconds_count" for part in ("queue", "prefill", "inference")),
        *(f"vllm:request_{part}_time_seconds_sum" for part in ("queue", "prefill", "inference")),
        *("vllm:request_decode_time_seconds_sum", "vllm:e2e_request_latency_seconds_sum"),
    )
    before = {name: told(name) for name in names}
    asked = PROMPTS[:2]
    for prompt in asked:
        client.completions.create(prompt=prompt, **ASKED)
    decided = NUM_TOKENS * len(asked)
    until(lambda: told(names[0]) == before[names[0]] + decided)
    # A second after the last of them, as the head says it once a second.
    until(lambda: told("vllm:kv_cache_usage_perc") == 0)
    since = {name: told(name) - before[name] for name in names}
    queries = sum(len(tokenizer.encode(prompt)) for prompt in asked)
    assert since["vllm:prefix_cache_queries_total"] == queries
    prompts = queries - since["vllm:prefix_cache_hits_total"]
    assert len(asked) <= prompts <= queries
    assert since["vllm:iteration_tokens_total_sum"] == prompts + decided
    assert since["vllm:iteration_tokens_total_count"] >= since["pipespec_steps_total"] > decided / 5
    fed = since["vllm:spec_decode_num_draft_tokens_total"]
    hits = since["vllm:spec_decode_num_accepted_tokens_total"]
    assert fed == since["pipespec_draft_rows_total"] > hits
    assert hits == since["pipespec_draft_hits_total"] > 0
    assert hits == since["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    # What was decided without having been fed before is fed then, but for the last token.
    missed = decided - hits
    roots = since["pipespec_rows_total"] - fed - prompts
    assert missed - len(asked) <= roots <= missed
    parts = {
        part: since[f"vllm:request_{part}_time_seconds_sum"]
        for part in ("queue", "prefill", "decode", "inference")
    }
    assert min(parts.values()) > 0
    assert parts["inference"] == pytest.approx(parts["prefill"] + parts["decode"])
    whole = parts["queue"] + parts["inference"]
    # An answer's last token comes before its end.
    assert parts["inference"] < whole <= since["vllm:e2e_request_latency_seconds_sum"] + 1e-6
    for part in ("queue", "prefill", "inference"):
        assert since[f"vllm:request_{part}_time_seconds_count"] == len(asked)
    until(lambda: 'pipespec_stage_busy_share{engine="0"' in server.http.get("/metrics").text)
    assert 0 < told("pipespec_stage_busy_share") < 2  # of two stages together


def test_fault_is_counted_and_no_counter_decreases(
    place: Sandbox, server: Server, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(place.folder))
    cluster = registry.find(NAME)
    until(lambda: server.metric("vllm:kv_cache_usage_perc") == 0)
    first = seen = server.counted()
    kinds = "pipespec_faults_total"
    faults, epoch = server.metric(kinds), server.metric("pipespec_epoch")
    before = [server.metric(f"pipespec_recovery_seconds_{kind}") for kind in ("count", "sum")]

    def look() -> float:
        """Faults so far."""
        nonlocal seen
        now = server.counted()
        fallen = {key for key in seen if now.get(key, -1.0) < seen[key]}
        assert not fallen
        seen = now
        return sum(value for (name, *_), value in now.items() if name == kinds)

    asked = ASKED | LONG | {"prompt": PROMPTS[0], "max_tokens": 80}
    undisturbed = client.completions.create(**asked).choices[0].text
    text = ""
    for piece in client.completions.create(stream=True, **asked):
        struck, text = bool(text), text + piece.choices[0].text
        if text and not struck:
            with Membership(cluster.url, cluster.namespace) as shared:
                (pid,) = shared.alive(["local/1"]).values()
            os.kill(pid, signal.SIGKILL)
        if len(text) % 7 == 0:
            look()
    assert text == undisturbed
    # On a busy machine a lease may run out beside it.
    until(lambda: 0 < look() - faults == server.metric("pipespec_epoch") - epoch)
    until(lambda: look() and server.metric("pipespec_resumption_seconds_count") > 0)
    recoveries = server.metric("pipespec_recovery_seconds_count") - before[0]
    assert 0 < recoveries <= look() - faults
    whole = server.metric("pipespec_recovery_seconds_sum") - before[1]
    silent = server.metric("pipespec_resumption_seconds_sum")
    assert 0 < whole < silent < PATIENCE_S
    # And the new epoch goes on from what was counted in the one before.
    decided = "pipespec_decided_tokens_total"
    until(lambda: look() and server.metric("vllm:kv_cache_usage_perc") == 0)
    (before,) = (value for (name, *_), value in first.items() if name == decided)
    assert server.metric(decided) > before + 80


@pytest.mark.long
def test_second_server_of_a_cluster_has_its_own_keys_and_queue(
    place: Sandbox, server: Server, tmp_path: Any
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    more = ("--api-key-file", str(keys), "--max-queued-requests", "2", "--allowed-origins", "*")
    with serving(place, "--on", NAME, *more) as guarded:
        assert guarded.http.get("/health").status_code == 200
        routes = ["/v1/models", "/metrics", "/openapi.json", "/version", "/load", "/nowhere"]
        for route in routes:
            assert guarded.http.get(route).status_code == 401
            assert guarded.http.get(route, headers={"X-Api-Key": "third"}).status_code == 401
        headers = {"X-Api-Key": "second"}
        assert guarded.http.get(routes[0], headers=headers).status_code == 200
        asks = {"Origin": "http://here", "Access-Control-Request-Method": "POST"}
        assert (
            guarded.http.options("/v1/models", headers=asks).headers["access-control-allow-origin"]
            == "*"
        )
        with pytest.raises(openai.AuthenticationError):
            guarded.openai("third").models.list()
        client = guarded.openai("first")
        # An empty queue takes one request whatever it holds.
        stream = client.completions.create(prompt="a", model=MODEL, n=40, stream=True, **LONG)
        reply = guarded.http.post(
            "/v1/completions",
            json={"prompt": "a", "n": 3},
            headers={"Authorization": "Bearer first"},
        )
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert "The queue is full" in reply.json()["error"]["message"]
        stream.close()
        patient = client.with_options(max_retries=20)
        assert patient.completions.create(prompt="a", n=3, **ASKED).choices[2].text
        assert "access-control-allow-origin" not in server.http.get("/health", headers=asks).headers


@pytest.mark.long
def test_shutdown_finishes_running_requests(place: Sandbox) -> None:
    with serving(place, "--on", NAME, "--shutdown-timeout", str(PATIENCE_S)) as server:
        asked = LONG | {"max_tokens": 100}
        stream = server.openai().completions.create(prompt="a", model=MODEL, stream=True, **asked)
        pieces = iter(stream)
        next(pieces)
        server.process.terminate()
        reasons = [piece.choices[0].finish_reason for piece in pieces]
        assert reasons[-1] == "length"
        assert server.process.wait(PATIENCE_S) == 0
        with pytest.raises(httpx2.TransportError):
            server.http.get("/health")


@pytest.mark.long
def test_shutdown_timeout_of_zero_ends_the_server_at_once(place: Sandbox, server: Server) -> None:
    with serving(place, "--on", NAME, "--shutdown-timeout", "0") as ending:
        client = ending.openai()
        stream = client.completions.create(prompt="a", model=MODEL, stream=True, **LONG)
        with ThreadPoolExecutor() as users:
            whole = users.submit(client.completions.create, prompt="a", model=MODEL, **LONG)
            until(lambda: ending.http.get("/load").json() == {"server_load": 2})
            next(iter(stream))
            ending.process.terminate()
            with pytest.raises(openai.APIError, match="The server is shutting down"):
                list(stream)
            with pytest.raises(openai.InternalServerError, match="The server is shutting down"):
                whole.result()
        _, said = ending.process.communicate(timeout=PATIENCE_S)
        assert (ending.process.returncode, said) == (0, "")
    until(lambda: server.metric("vllm:num_requests_running") == 0)
