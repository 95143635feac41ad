"""Tools in a chat: what the template is shown, and what replies say beside the calls."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from pipespec.client.model_info import ModelInfo
from pipespec.core import TokenLogprobs
from pipespec.server.openai_format import ChatFormat
from pipespec.server.reply_format import OutputDelta
from pipespec.server.request_parsing import ParsedRequest, RequestParser
from pipespec.server.request_schema import ChatRequest
from tests.helpers import dialects
from tests.helpers.calling import HERMES, WEATHER, calling, fits

Chat = Callable[..., ParsedRequest]
DIG: dict[str, Any] = {"type": "function", "function": {"name": "dig"}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "And in Zürich?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'},
            },
            {"id": "b", "type": "function", "function": {"name": "get_time", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Sunny"}]},
    {"role": "tool", "tool_call_id": "b", "content": "12:00", "name": "get_time"},
]


@pytest.fixture(scope="module")
def served(demo: ModelInfo) -> ModelInfo:
    return calling(demo, HERMES)


@pytest.fixture(scope="module")
def chat(served: ModelInfo) -> Chat:
    """Parses a request with more fields. Its parser tries grammars in a process of its own."""
    parser = RequestParser(dialects.entry_of(served))
    usual = {"messages": CONVERSATION, "tools": [WEATHER]}
    return lambda **body: parser.parse(ChatRequest.model_validate(usual | body))


def test_chat_template_gets_the_same_input_as_from_transformers(served, chat):
    backend = served.tokenizer
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(backend.backend), chat_template=HERMES
    )
    parsed = json.loads(json.dumps(CONVERSATION))
    parsed[1]["content"] = ""
    for call, arguments in zip(parsed[1]["tool_calls"], ({"city": "Zürich"}, {}), strict=True):
        call["function"]["arguments"] = arguments
    parsed[2]["content"] = "Sunny"
    expected = theirs.apply_chat_template(
        parsed, tools=[WEATHER], add_generation_prompt=True, tokenize=False
    )
    assert '"arguments": {"city": "Zürich"}' in expected
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    for tools in ([WEATHER], [strict]):
        ask = chat(tools=tools)
        assert served.tokenizer.decode(ask.prompts[0]) == expected


def test_tools_that_may_not_be_called_are_not_in_the_prompt(served, chat):
    for body in ({"tool_choice": "none"}, {"tools": []}, {"tools": None}):
        ask = chat(**body)
        assert ask.tool_use is None
        assert "What the weather is" not in served.tokenizer.decode(ask.prompts[0])
    some = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "dig"}}]}
    for body in ({"tools": [WEATHER, DIG]}, {"tools": [DIG]}):
        ask = chat(**body, tool_choice={"type": "allowed_tools", "allowed_tools": some})
        assert ask.tool_use is not None
        prompt = served.tokenizer.decode(ask.prompts[0])
        assert "What the weather is" not in prompt and '"dig"' in prompt
    for body in ({}, {"tool_choice": "auto"}, {"tool_choice": None}):
        ask = chat(**body)
        assert ask.tool_use is not None and ask.tool_use.parallel
    cut = chat(parallel_tool_calls=False).tool_use
    assert cut is not None and not cut.parallel


@pytest.mark.parametrize(
    ("body", "texts", "unfit", "reason"),
    [
        (
            {"tool_choice": "required"},
            ['[{"name":"get_weather","arguments":{"city":"a"}},{"name":"dig","arguments":{}}]'],
            ["Hello", "[]", '[{"name":"fly","arguments":{}}]'],
            "tool_calls",
        ),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            ['[{"name":"dig","arguments":{}}]'],
            ['[{"name":"dig","arguments":{}},{"name":"dig","arguments":{}}]'],
            "tool_calls",
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "dig"}}],
                    },
                }
            },
            ['[{"name":"dig","arguments":{}}]'],
            ['[{"name":"get_weather","arguments":{"city":"a"}}]'],
            "tool_calls",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
            ['[{"name":"get_weather","arguments":{"city":"Bern"}}]'],
            ['[{"name":"dig","arguments":{}}]', '[{"name":"get_weather","arguments":{"city":3}}]'],
            "stop",
        ),
    ],
)
def test_required_call_is_the_only_answer_that_matches(served, chat, body, texts, unfit, reason):
    ask = chat(tools=[WEATHER, DIG], **body)
    for text in (*texts, *unfit):
        assert fits(served, ask, text) == (text in texts)
    shape = ChatFormat(ask, served.tokenizer, "demo")
    shape.add(OutputDelta(0, texts[0], (5,)))
    shape.add(OutputDelta(0, "", (6,), finish_reason="stop"))
    (choice,) = shape.response()["choices"]
    assert choice["finish_reason"] == reason and choice["message"]["content"] is None
    assert [
        {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
        for call in choice["message"]["tool_calls"]
    ] == json.loads(texts[0])


TEXT, OWN = {"type": "string"}, "https://example.org/go"
CLOSED: dict[str, Any] = {"type": "object", "additionalProperties": False}
# Parameters, arguments that fit, and others that do not.
PARAMETERS: list[tuple[dict[str, Any] | None, list[str], list[str]]] = [
    (
        {"$defs": {"at": {"enum": ["Bern", "Uri"]}}, "properties": {"at": {"$ref": "#/$defs/at"}}},
        ['{"at":"Uri"}'],
        ['{"at":"Ulm"}', "3"],
    ),
    (
        CLOSED | {"properties": {"a": {"type": "integer"}, "next": {"$ref": "#"}}},
        ['{"a":1,"next":{"a":2,"next":{}}}'],
        ['{"next":[{"name":"go","arguments":{}}]}', '{"next":3}'],
    ),
    (
        CLOSED | {"$id": OWN, "properties": {"a": TEXT, "b": {"$ref": f"{OWN}#/properties/a"}}},
        ['{"b":"c"}'],
        ['{"b":1}'],
    ),
    (
        CLOSED | {"properties": {"a": TEXT | {"$id": "item"}, "b": {"$ref": "item"}}},
        ['{"b":"c"}'],
        ['{"b":1}'],
    ),
    (
        {"$ref": "#/definitions/all", "definitions": {"all": CLOSED | {"properties": {"a": TEXT}}}},
        ['{"a":"b"}'],
        ['{"a":1}', "[]"],
    ),
    ({"type": ["object", "null"], "properties": {"a": TEXT}}, ['{"a":"b"}'], ["null"]),
    ({"anyOf": [CLOSED, TEXT]}, ["{}"], ['"a"']),
    (None, ["{}"], ['{"a":1}']),
    ({}, ["{}"], ['{"a":1}']),
    ({"type": "object", "properties": {}, "required": [], "title": "No"}, ["{}"], ['{"a":1}']),
    ({"type": "object", "strict": True, "x-order": ["b"]}, ["{}"], ['{"a":1}']),
    ({"type": "object", "additionalProperties": True}, ["{}", '{"a":1}'], ["[]"]),
]


@pytest.mark.parametrize(("parameters", "good", "unfit"), PARAMETERS)
@pytest.mark.parametrize("named", [False, True])
def test_arguments_of_required_calls_are_what_the_function_declares(
    served, chat, named, parameters, good, unfit
):
    own = {} if parameters is None else {"parameters": parameters}
    go, other = {"name": "go"} | own, {"name": "stay", "parameters": {"$defs": {"at": {}}}}
    choice: Any = {"type": "function", "function": {"name": "go"}} if named else "required"
    tools = [{"type": "function", "function": each} for each in (go, other)]
    ask = chat(tools=tools, tool_choice=choice)
    for arguments in (*good, *unfit):
        text = f'[{{"name":"go","arguments":{arguments}}}]'
        assert fits(served, ask, text) == (arguments in good), arguments


def test_tool_calls_keep_the_logprobs_of_all_tokens(served, chat):
    text = 'Hm <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    tokenizer = served.tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = [
        OutputDelta(0, tokenizer.decode([token]), (token,), (TokenLogprobs(-0.5),)) for token in ids
    ]
    ask = chat(logprobs=True)
    shape, whole = (ChatFormat(ask, tokenizer, "demo", continuous=True, usage=True) for _ in "ab")
    end = OutputDelta(0, "", finish_reason="stop")
    chunks = dialects.chunks(e for piece in (*pieces, end) for e in shape.events(piece))
    for piece in (*pieces, end):
        whole.add(piece)
    reply = whole.response()
    (choice,) = reply["choices"]
    result = [
        token["token"]
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for token in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert result == [token["token"] for token in choice["logprobs"]["content"]]
    assert len(result) == len(ids) == reply["usage"]["completion_tokens"]
    assert chunks[-1]["usage"]["completion_tokens"] == len(ids)
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
