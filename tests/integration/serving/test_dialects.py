"""The SDKs of other interfaces than OpenAI's chats, with a real server on a real cluster: whole and
streamed, tools round trip, structured output, and streams that survive the kill of any rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import ollama
import openai
import pytest

from tests.helpers.sandbox import PATIENCE_S, Sandbox
from tests.helpers.serving import MODEL, NAME, Server, serving

pytestmark = pytest.mark.slow
KEY = "a-key-of-all-dialects"
HELLO = [{"role": "user", "content": "Tell me a story"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Tom", "Lily"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Basel", "Bern"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(place: Sandbox) -> Iterator[Server]:
    with serving(place, "--on", NAME, "--api-key", KEY) as server:
        server.http.headers["Authorization"] = f"Bearer {KEY}"
        yield server


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.url, api_key=KEY, max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


@pytest.fixture(scope="module")
def gpt(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai(KEY) as client:
        yield client


@pytest.fixture(scope="module")
def llama(server: Server) -> ollama.Client:
    return ollama.Client(server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=PATIENCE_S)


# --- Anthropic --------------------------------------------------------------------------------

ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "messages": HELLO}
GREEDY = {"temperature": 0}  # its package has no field for it any more


def test_anthropic_package_reads_messages_whole_and_streamed(
    server: Server, claude: anthropic.Anthropic
) -> None:
    told = claude.messages.create(system="Be kind.", extra_body=GREEDY, **ASKED)
    with claude.messages.stream(system="Be kind.", extra_body=GREEDY, **ASKED) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    (block,) = told.content
    assert block.type == "text" and block.text == text
    assert (told.stop_reason, told.usage.output_tokens) == ("max_tokens", 24)
    assert streamed.content[0].text == text  # type: ignore[union-attr]
    assert streamed.usage.output_tokens == 24
    # The same as OpenAI's interface has.
    chat = server.http.post(
        "/v1/chat/completions",
        json={
            "messages": [{"role": "system", "content": "Be kind."}, *HELLO],
            "max_tokens": 24,
            "temperature": 0,
        },
    ).json()
    assert chat["choices"][0]["message"]["content"] == text
    counted = claude.messages.count_tokens(model=MODEL, messages=HELLO, system="Be kind.")  # type: ignore[arg-type]
    assert counted.input_tokens == chat["usage"]["prompt_tokens"]
    usage = told.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    word = text.split()[2]
    ended = claude.messages.create(
        system="Be kind.", stop_sequences=[word], extra_body=GREEDY, **ASKED
    )
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", word)


def test_anthropic_tools_go_round(claude: anthropic.Anthropic) -> None:
    asked = ASKED | {
        "max_tokens": 100,
        "tools": [{"name": "get_weather", "input_schema": CITY}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    messages: list[Any] = list(HELLO)
    for _ in range(2):
        with claude.messages.stream(**asked | {"messages": messages}) as stream:
            told = stream.get_final_message()
        assert told.stop_reason == "tool_use"
        (call,) = told.content
        assert call.type == "tool_use"
        jsonschema.validate(call.input, CITY)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
        messages += [told.to_param(), {"role": "user", "content": [result]}]
    asked |= {"tool_choice": {"type": "none"}, "messages": messages, "max_tokens": 4}
    assert claude.messages.create(**asked).content[0].type == "text"


# --- OpenAI's responses -----------------------------------------------------------------------


def test_openai_package_reads_responses_whole_and_streamed(gpt: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}
    asked |= {"input": "Tell me a story", "instructions": "Be kind."}
    told = gpt.responses.create(**asked)
    assert (told.status, told.usage.output_tokens) == ("incomplete", 24)  # type: ignore[union-attr]
    text = ""
    for event in gpt.responses.create(stream=True, **asked):
        if event.type == "response.output_text.delta":
            text += event.delta
    assert event.type == "response.incomplete" and event.response.output_text == text
    assert told.output_text == text
    with gpt.responses.stream(**asked | {"max_output_tokens": 40, "temperature": 1}) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_responses_continue_earlier_ones(gpt: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 16}
    first = gpt.responses.create(**asked, input="Tell me a story")
    later = gpt.responses.create(**asked, input="Go on.", previous_response_id=first.id)
    assert later.previous_response_id == first.id
    whole = [
        {"role": "user", "content": "Tell me a story"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Go on."},
    ]
    same = gpt.responses.create(**asked, input=whole)  # type: ignore[call-overload]
    assert later.output_text == same.output_text
    assert later.usage.input_tokens == same.usage.input_tokens  # type: ignore[union-attr]
    assert gpt.responses.retrieve(first.id) == first
    gpt.responses.delete(first.id)
    for gone in (gpt.responses.retrieve, gpt.responses.delete):
        with pytest.raises(openai.NotFoundError, match="There is no response"):
            gone(first.id)
    with pytest.raises(openai.BadRequestError, match="leave stream out"):
        gpt.responses.retrieve(later.id, stream=True)
    unkept = gpt.responses.create(**asked, input="Hello", store=False)
    for unknown in (unkept.id, first.id, "resp_1"):
        with pytest.raises(openai.BadRequestError, match="There is no response") as refused:
            gpt.responses.create(**asked, input="Go on.", previous_response_id=unknown)
        assert refused.value.code == "previous_response_not_found"


def test_response_tools_go_round(gpt: openai.OpenAI) -> None:
    tool = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}
    asked: dict[str, Any] = {"model": MODEL, "tools": [tool], "parallel_tool_calls": False}
    told = gpt.responses.create(input="The weather?", tool_choice="required", **asked)
    (call,) = told.output
    assert call.type == "function_call" and told.status == "completed"
    jsonschema.validate(json.loads(call.arguments), CITY)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    asked |= {"tool_choice": "none", "max_output_tokens": 4}
    by_id = gpt.responses.create(input=[output], previous_response_id=told.id, **asked)
    asked |= {"input": [{"role": "user", "content": "The weather?"}, call.to_dict(), output]}
    by_hand = gpt.responses.create(**asked)
    assert by_id.usage.input_tokens == by_hand.usage.input_tokens  # type: ignore[union-attr]


# --- Ollama -----------------------------------------------------------------------------------


def test_ollama_package_reads_answers_whole_and_streamed(
    server: Server, llama: ollama.Client
) -> None:
    options = {"temperature": 0, "num_predict": 24}
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "options": options}
    told = llama.chat(**asked)
    assert (told.done_reason, told.eval_count) == ("length", 24)
    pieces = [*llama.chat(stream=True, **asked)]
    assert "".join(piece.message.content or "" for piece in pieces) == told.message.content
    assert [piece.done for piece in pieces][-2:] == [False, True]
    made = llama.generate(model=MODEL, prompt=HELLO[0]["content"], options=options)
    assert made.response == told.message.content
    raw = llama.generate(model=MODEL, prompt="Once upon a time", raw=True, options=options)
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 24}
    same = server.http.post("/v1/completions", json=body).json()
    assert raw.response == same["choices"][0]["text"]
    assert [each.model for each in llama.list().models] == [MODEL]
    assert (llama.show(MODEL).modelinfo or {})["pipespec.context_length"] == 1024


def test_ollama_tools_and_formats(llama: ollama.Client) -> None:
    told = llama.chat(model=MODEL, messages=HELLO, format=SCHEMA)
    jsonschema.validate(json.loads(told.message.content or ""), SCHEMA)
    # The calls that the model would write are not parsed: its template is of no known family.
    with pytest.raises(ollama.ResponseError, match="tool-call-parser") as refused:
        llama.chat(model=MODEL, messages=HELLO, tools=[get_weather])
    assert refused.value.status_code == 400
    call = {"function": {"name": "get_weather", "arguments": {"city": "Bern"}}}
    messages = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_weather", "content": "Sunny."},
    ]
    told = llama.chat(model=MODEL, messages=messages, options={"num_predict": 4})
    assert told.eval_count == 4
    with pytest.raises(ollama.ResponseError, match="not served") as missing:
        llama.chat(model="other", messages=HELLO)
    assert missing.value.status_code == 404


def get_weather(city: str) -> str:
    """The weather in a city."""
    return city
