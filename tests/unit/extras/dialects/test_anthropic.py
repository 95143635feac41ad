"""Anthropic's /v1/messages: what requests become, and replies that Anthropic's package accepts."""

import json
from typing import Any

import pytest
from anthropic._streaming import SSEDecoder
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from pipespec.client.model_info import ModelInfo
from pipespec.extras.dialects.anthropic import MessagesRequest
from pipespec.server.api_errors import ApiError
from pipespec.server.preparation import Preparer
from tests.helpers import dialects
from tests.helpers.dialects import parts

PATH = "/v1/messages"
TOOL = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
HELLO = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, Any] = {"model": "demo", "max_tokens": 50, "messages": HELLO}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>'


def fields(**body: Any) -> dict[str, Any]:
    return MessagesRequest.model_validate(ASKED | body).translated().fields


def events(served: ModelInfo, preparer: Preparer, answer: Any, **body: Any) -> list[Any]:
    """The events of a stream, as Anthropic's package decodes and types them."""
    shape = dialects.shape_of(served, preparer, PATH, ASKED | body)
    sent = b"".join(dialects.stream_of(shape, answer))
    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    decoded = [*SSEDecoder().iter_bytes(iter([sent]))]
    told = [event for event in decoded if event.event != "ping"]
    made = [adapter.validate_json(event.data, strict=True) for event in told]
    assert [event.event for event in told] == [each.type for each in made]
    return made


def message(made: list[Any]) -> Message:
    """The message that Anthropic's package puts together from events."""
    snapshot: Any = None
    buffers: Any = {}
    for event in made:
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    return Message.model_validate(snapshot.model_dump())


def whole(served: ModelInfo, preparer: Preparer, answer: Any, **body: Any) -> Message:
    shape = dialects.shape_of(served, preparer, PATH, ASKED | body)
    return Message.model_validate(dialects.whole_of(shape, answer), strict=True, extra="forbid")


def test_conversation_with_tools_becomes_a_chat(preparer):
    cached = {"cache_control": {"type": "ephemeral"}}
    used = {"id": "a", "name": "get_weather", "input": {"city": "Bern"}}
    spoken = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use"} | used,
    ]
    sunny = {"tool_use_id": "a", "content": [{"type": "text", "text": "Sunny."}]}
    results = [
        {"type": "tool_result"} | sunny,
        {"type": "tool_result", "tool_use_id": "b", "is_error": True},
        {"type": "text", "text": "Well?"},
    ]
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"} | cached]},
        {"role": "assistant", "content": spoken},
        {"role": "user", "content": results},
        {"role": "user", "content": "Tell me."},
    ]
    system = [{"type": "text", "text": "Be brief."} | cached, {"type": "text", "text": "Be kind."}]
    made = fields(messages=conversation, system=system, tools=[TOOL])
    call = {"name": "get_weather", "arguments": '{"city": "Bern"}'}
    calls = {"tool_calls": [{"id": "a", "type": "function", "function": call}]}
    assert made["messages"] == [
        {"role": "system", "content": parts("Be brief.", "Be kind.")},
        {"role": "user", "content": parts("Weather?")},
        {"role": "assistant", "content": parts("I look."), "reasoning_content": "Hm."} | calls,
        {"role": "tool", "tool_call_id": "a", "content": parts("Sunny.")},
        {"role": "tool", "tool_call_id": "b", "content": ""},
        {"role": "user", "content": parts("Well?", "Tell me.")},
    ]
    (tool,) = made["tools"]
    assert tool["function"]["parameters"] == TOOL["input_schema"]
    body = ASKED | {"messages": conversation[:2], "max_tokens": 5}
    with pytest.raises(ApiError, match="the last message is no text") as refused:
        dialects.prepared(preparer, PATH, body)
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    ("choice", "ours", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        (
            {"type": "tool", "name": "get_weather"},
            {"type": "function", "function": {"name": "get_weather"}},
            True,
        ),
    ],
)
def test_tool_choice_is_translated(choice, ours, parallel):
    made = fields(tools=[TOOL], tool_choice=choice)
    assert (made["tool_choice"], made["parallel_tool_calls"]) == (ours, parallel)


def test_fields_reach_the_request(preparer):
    body = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["x"], "seed": 7}
    body |= {"metadata": {"user_id": "me"}, "service_tier": "auto", "stream": True}
    body |= {"min_p": 0.1}
    request = dialects.prepared(preparer, PATH, ASKED | body)
    (sampling,) = request.parsed.sampling_params
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.seed, sampling.min_p, request.parsed.stop) == (7, 0.1, ("x",))
    assert (request.stream, request.model) == (True, "demo")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    format_ = {"format": {"type": "json_schema", "schema": schema}}
    assert dialects.prepared(preparer, PATH, ASKED | {"output_config": format_}).parsed
    assert fields(output_config=format_)["response_format"]["json_schema"]["schema"] == schema
    assert fields(thinking={"type": "disabled"})["reasoning_effort"] == "none"
    assert fields(thinking={"type": "adaptive"})["reasoning_effort"] == "medium"
    assert fields(output_config={"effort": "max"})["reasoning_effort"] == "max"


def test_count_of_tokens_is_the_length_of_the_prompt(preparer):
    body = {"model": "demo", "messages": HELLO, "system": "Be brief.", "tools": [TOOL]}
    reply = preparer.prepare(f"{PATH}/count_tokens", json.dumps(body).encode())
    assert isinstance(reply, bytes)
    request = dialects.prepared(preparer, PATH, body | {"max_tokens": 1})
    assert json.loads(reply) == {"input_tokens": len(request.parsed.prompts[0])}


def test_stream_of_text_has_the_events_that_the_package_expects(served, preparer):
    answer = dialects.deltas('Say "é"\n')
    made = events(served, preparer, answer)
    kinds = [event.type for event in made]
    assert kinds == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * 2,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert made[0].message.usage.output_tokens == 0
    streamed = message(made)
    assert streamed.content[0].text == 'Say "é"\n'  # type: ignore[union-attr]
    assert (streamed.stop_reason, streamed.stop_sequence) == ("end_turn", None)
    told = whole(served, preparer, answer)
    assert told.model_dump(exclude={"id"}) == streamed.model_dump(exclude={"id"})
    assert told.usage.cache_read_input_tokens == 3
    request = dialects.prepared(preparer, PATH, ASKED)
    assert told.usage.input_tokens == len(request.parsed.prompts[0]) - 3


def test_reasoning_and_calls_are_blocks_of_their_own(thinking):
    preparer, kinds = dialects.preparer(thinking), ["thinking", "text", "tool_use", "tool_use"]
    answer = dialects.deltas(f"<think>Hm, so.</think>I look. {CALL} {CALL}")
    streamed = message(events(thinking, preparer, answer, tools=[TOOL]))
    assert [block.type for block in streamed.content] == kinds
    thought, _, first, second = streamed.content
    assert thought.thinking == "Hm, so."  # type: ignore[union-attr]
    assert first.input == second.input == {"city": "Zürich"}  # type: ignore[union-attr]
    assert first.id != second.id  # type: ignore[union-attr]
    assert streamed.stop_reason == "tool_use"
    told = whole(thinking, preparer, answer, tools=[TOOL])
    assert [block.type for block in told.content] == kinds
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    alone = whole(thinking, preparer, answer, tools=[TOOL], tool_choice=choice)
    assert [block.type for block in alone.content] == kinds[:3]


@pytest.mark.parametrize(
    ("text", "input_"),
    [
        ('<tool_call>{"name": "get_weather", "arguments": {"city": "Zü', {"city": "Zü"}),
        (
            '<tool_call>{"name": "get_weather", "arguments": {city: 1}}</tool_call>',
            {"unreadable_arguments": "{city: 1}"},
        ),
    ],
)
def test_arguments_that_are_no_object_are_not_lost(served, preparer, text, input_):
    answer = dialects.deltas(text, reason="length")
    streamed = message(events(served, preparer, answer, tools=[TOOL]))
    for told in (whole(served, preparer, answer, tools=[TOOL]), streamed):
        assert told.content[0].input == input_  # type: ignore[union-attr]


def test_arguments_arrive_in_pieces_where_a_grammar_holds(served, preparer):
    choice = {"type": "tool", "name": "get_weather"}
    answer = dialects.deltas('[{"name":"get_weather","arguments":{"city":"Bern"}}]')
    made = events(served, preparer, answer, tools=[TOOL], tool_choice=choice)
    pieces = [event.delta.partial_json for event in made if event.type == "content_block_delta"]
    assert len(pieces) > 1
    told = whole(served, preparer, answer, tools=[TOOL], tool_choice=choice)
    for each in (message(made), told):
        assert each.content[0].input == {"city": "Bern"}  # type: ignore[union-attr]
        assert each.stop_reason == "tool_use"


def test_names_of_tools_may_be_as_long_as_anthropics(preparer):
    assert dialects.prepared(preparer, PATH, ASKED | {"tools": [TOOL | {"name": "x" * 128}]})
    with pytest.raises(ApiError, match="name"):
        dialects.prepared(preparer, PATH, ASKED | {"tools": [TOOL | {"name": "x" * 129}]})


@pytest.mark.parametrize(
    ("reason", "stop", "asked", "told"),
    [
        ("stop", None, 50, "end_turn"),
        ("stop", "x", 50, "stop_sequence"),
        ("length", None, 50, "max_tokens"),
        ("length", None, 10**6, "model_context_window_exceeded"),
    ],
)
def test_reason_of_the_end_is_anthropics(served, preparer, reason, stop, asked, told):
    answer = dialects.deltas("Hi", reason=reason, stop=stop)
    streamed = message(events(served, preparer, answer, max_tokens=asked))
    assert (streamed.stop_reason, streamed.stop_sequence) == (told, stop)


def test_empty_answer_has_no_blocks(served, preparer):
    assert message(events(served, preparer, dialects.deltas(""))).content == []


def test_failure_of_a_stream_is_an_event_that_the_package_raises(served, preparer):
    shape = dialects.shape_of(served, preparer, PATH, ASKED)
    (event,) = SSEDecoder().iter_bytes(iter(shape.failed(ApiError(503, "It is away."))))
    assert event.event == "error"
    assert event.json()["error"] == {"type": "overloaded_error", "message": "It is away."}
