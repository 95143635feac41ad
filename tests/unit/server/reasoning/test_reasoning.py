"""Reasoning, split from what models of each family write, wherever it is cut, and grammars that
begin after it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import ollama
import pytest
from anthropic.types import Message
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response

from pipespec.client.model_info import ModelInfo
from pipespec.core import SamplingParams
from pipespec.engine.llguidance_backend import grammar_from_regex
from pipespec.sampling.grammar import unpack_mask
from pipespec.server.answer_blocks import AnswerBlocks
from pipespec.server.api_errors import ApiError
from pipespec.server.dialects.anthropic_format import AnthropicFormat
from pipespec.server.dialects.ollama_format import OllamaChatFormat
from pipespec.server.dialects.responses_format import ResponsesFormat
from pipespec.server.openai_format import ChatFormat
from pipespec.server.preparation import Preparer
from pipespec.server.reasoning.harmony import SPECIAL
from pipespec.server.reasoning.reasoning_use import Family, ReasoningUse, reasoning_use
from pipespec.server.tool_parsers.parser_families import FAMILIES
from pipespec.server.tool_parsers.tool_choice import ToolUse
from tests.helpers import dialects
from tests.helpers.calling import WEATHER, calling

QWEN = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content.split('</think>')[-1] }}"
    "{% endfor %}{{ tools or '' }}{% if add_generation_prompt %}<assistant>\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
CHATS = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]
R1 = "{{ messages[-1].content }}<|Assistant|><think>\n{# </think> #}"
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
HARMONY = (
    "<|channel|>analysis<|message|>Hm <|x|> so.<|end|><|start|>assistant<|channel|>commentary"
    ' to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
)
FINAL = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    "<|channel|>final<|message|>Hi.<|return|>"
)
PREAMBLE = (
    "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f"
    '<|channel|>commentary<|message|>{"a": 1}<|call|>'
)
# A family, whether the prompt has the opening tag, what the model writes, what it thinks, what it
# says, and its calls.
CANNED: list[tuple[Family, bool, str, str, str, list[str]]] = [
    ("think", False, "<think>\nHm </th so.\n</think>\n\nHi. ", "Hm </th so.", "Hi. ", []),
    ("think", True, "\nHm.\n</think>\nHi <think>.", "Hm.", "Hi <think>.", []),
    ("think", True, "</think>Hi.", "", "Hi.", []),
    ("think", False, "\n<think>\n\n</think>\n\nHi.", "", "Hi.", []),
    ("think", False, " Hi <think>.</think>", "", " Hi <think>.</think>", []),
    ("think", False, "", "", "", []),
    ("think", False, "<thi", "", "<thi", []),
    ("think", True, "Hm. \n</thin", "Hm. \n</thin", "", []),
    ("think", True, f"Hm.</think>I look. {CALL}", "Hm.", "I look.", ['f{"a": 1}']),
    ("think", True, f"{CALL}</think>{CALL}", CALL, "", ['f{"a": 1}']),
    ("mistral", False, "[THINK]Hm.[/THINK]Hi.", "Hm.", "Hi.", []),
    ("seed", False, "<seed:think>Hm.</seed:think>\nHi.", "Hm.", "Hi.", []),
    ("gpt_oss", False, HARMONY, "Hm <|x|> so.", "", ['f{"a": 1}']),
    ("gpt_oss", False, FINAL, "Hm.", "Hi.", []),
    ("gpt_oss", False, "<|channel|>final<|message|>Hi.", "", "Hi.", []),
    ("gpt_oss", False, "No messages.", "", "No messages.", []),
    ("gpt_oss", False, "No messages.<|return|>", "", "No messages.", []),
    ("gpt_oss", False, "<|channel|>final<|message|>Hi.<|end|><|start|>assistant", "", "Hi.", []),
    ("gpt_oss", True, "lo.<|return|>", "", "lo.", []),
    ("gpt_oss", True, f"lo.<|end|><|start|>assistant{FINAL}", "Hm.", "lo.Hi.", []),
    ("gpt_oss", False, "<|channel|>analysis<|message|>Hm <|en", "Hm <|en", "", []),
    (
        "gpt_oss",
        False,
        PREAMBLE,
        "",
        "I look.",
        ['f{"a": 1}'],
    ),
]


def split(family: Family, begun: bool, pieces: list[str]) -> tuple[str, str, list[str]]:
    """The reasoning, the text and the calls of an answer that comes in pieces."""
    tools = FAMILIES["openai" if family == "gpt_oss" else "hermes"]
    answer = AnswerBlocks(ToolUse(tools, True), ReasoningUse(family, begun))
    shown = {"reasoning": "", "text": "", "call": ""}
    for number, piece in enumerate(pieces, 1):
        for delta in answer.push(piece, last=number == len(pieces)):
            shown[delta.block.kind] += delta.text
    calls = [call.name + call.text for call in answer.calls]
    texts = (answer.text_of("reasoning"), answer.text_of("text"))
    assert (shown["reasoning"], shown["text"]) == texts, "nothing is taken back"
    return *texts, calls


@pytest.mark.parametrize("case", CANNED, ids=lambda case: f"{case[0]} {case[2][:30]!r}")
def test_reasoning_is_split_wherever_the_text_is_cut(case: Any) -> None:
    family, begun, text, *expected = case

    @given(st.lists(st.integers(0, len(text)), max_size=8))
    def cut(places: list[int]) -> None:
        edges = [0, *sorted(places), len(text)]
        pieces = [text[a:b] for a, b in pairwise(edges)]
        assert [*split(family, begun, pieces)] == expected

    cut()
    assert [*split(family, begun, [*text, ""])] == expected


def test_template_and_prompt_say_whether_there_is_reasoning() -> None:
    assert reasoning_use(QWEN, "<assistant>\n") == ReasoningUse("think", begun=False)
    assert reasoning_use(QWEN, "<think>\n\n</think>\n\n") is None
    assert reasoning_use(R1, "<|Assistant|><think>\n") == ReasoningUse("think", begun=True)
    assert reasoning_use("[THINK]", "a") == ReasoningUse("mistral")
    assert reasoning_use("<seed:think>", "a") == ReasoningUse("seed")
    assert reasoning_use("<|channel|>analysis", "a") == ReasoningUse("gpt_oss")
    assert reasoning_use("{{ messages }}", "<think>") is None
    inside = "<|start|>assistant<|channel|>final<|message|>Hel"
    assert reasoning_use("<|channel|>analysis", inside) == ReasoningUse("gpt_oss", begun=True)
    after = reasoning_use("<|channel|>analysis", f"{inside}lo.<|end|><|start|>assistant")
    assert after == ReasoningUse("gpt_oss", begun=False)


# --- grammars ---------------------------------------------------------------------------------


FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "a",
        "schema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize(
    ("template", "special", "fits", "unfit"),
    [
        (
            QWEN,
            (),
            ['<think>Hm {"b"\n</think>\n\n{"a":1}', '{"a":1}'],
            ["Hm", '<think>Hm</think>Hi {"a":1}', '<think>Hm {"a":1}'],
        ),
        (R1, (), ['Hm.</think>{"a":1}', 'Hm.\n</think>\n\n{"a":1}'], ['{"a":1}', "</think>Hi"]),
        (
            "{{ messages }}[THINK]{# [/THINK] #}",
            ("[THINK]", "[/THINK]"),
            ['Hm.[/THINK]{"a":1}'],
            ['{"a":1}'],
        ),
        (
            "{{ messages }}<|channel|>analysis",
            SPECIAL,
            [
                FINAL.replace("Hi.<|return|>", '{"a":1}'),
                '<|channel|>final<|message|>{"a":1}',
            ],
            ['{"a":1}', "<|channel|>final<|message|>Hi"],
        ),
    ],
)
def test_grammar_begins_after_the_reasoning(
    demo: ModelInfo, template: str, special: tuple[str, ...], fits: list[str], unfit: list[str]
) -> None:
    served = calling(demo, template, *special)
    body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": FORM}
    request = dialects.prepared(dialects.preparer(served), "/v1/chat/completions", body)
    (sampling,) = request.parsed.sampling_params
    for text in (*fits, *unfit):
        matcher = served.grammars().compile(sampling.grammar)
        ids = served.tokenizer.encode(text, add_special_tokens=False)
        taken = matcher.consume(ids)
        ended = unpack_mask(matcher.allowed(), served.vocab_size)[list(request.parsed.eos)].any()
        assert (taken == len(ids) and ended) == (text in fits), text


def test_grammar_of_the_cluster_begins_after_the_reasoning_too(demo: ModelInfo) -> None:
    grammar = grammar_from_regex("[0-9]+")
    defaults = replace(dialects.DEFAULTS, sampling=SamplingParams(grammar=grammar))
    served = calling(demo, R1)
    preparer = Preparer(served, defaults, ("demo",), None)
    body: dict[str, Any] = {"messages": HELLO}
    (sampling,) = dialects.prepared(preparer, CHATS, body).parsed.sampling_params
    matcher = served.grammars().compile(sampling.grammar)
    ids = served.tokenizer.encode("Hm.</think>12", add_special_tokens=False)
    assert matcher.consume(ids) == len(ids)
    with pytest.raises(ApiError, match="what the cluster's grammar describes ends by itself"):
        dialects.prepared(preparer, CHATS, body | {"ignore_eos": True})
    plain = dialects.prepared(preparer, "/v1/completions", {"prompt": "Hi"}).parsed
    assert plain.sampling_params[0].grammar == grammar


def test_grammar_of_a_continued_message_has_no_channels_before_it(demo: ModelInfo) -> None:
    template = (
        "{% for message in messages %}<|start|>{{ message.role }}<|channel|>final<|message|>"
        "{{ message.content }}<|end|>{% endfor %}{# analysis #}"
    )
    served = calling(demo, template, *SPECIAL)
    messages = [*HELLO, {"role": "assistant", "content": "It is"}]
    body = {"messages": messages, "continue_final_message": True, "response_format": FORM}
    parsed = dialects.prepared(dialects.preparer(served), CHATS, body).parsed
    assert parsed.reasoning == ReasoningUse("gpt_oss", begun=True)
    matcher = served.grammars().compile(parsed.sampling_params[0].grammar)
    ids = served.tokenizer.encode('{"a":1}', add_special_tokens=False)
    assert matcher.consume(ids) == len(ids)


def test_grammar_is_alone_where_reasoning_is_off(demo: ModelInfo) -> None:
    served = calling(demo, QWEN)
    body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": FORM}
    path = "/v1/chat/completions"
    preparer = dialects.preparer(served)
    asked = dialects.prepared(preparer, path, body | {"reasoning_effort": "none"})
    assert asked.parsed.reasoning is None
    assert "</think>" not in (asked.parsed.sampling_params[0].grammar or "")


# --- replies ----------------------------------------------------------------------------------

ANSWER = f"<think>Hm, so.</think>I look. {CALL}"


def both(served: ModelInfo, kind: Any, path: str, **body: Any) -> tuple[Any, list[bytes]]:
    """The whole reply to a request, and the events of its stream."""
    request = dialects.prepared(dialects.preparer(served), path, {"model": "demo"} | body)

    def shape() -> Any:
        return kind(request.parsed, served.tokenizer, "demo", **request.options)

    answer = dialects.deltas(ANSWER)
    return dialects.whole_of(shape(), answer), dialects.stream_of(shape(), answer)


@pytest.fixture(scope="module")
def thinking(demo: ModelInfo) -> ModelInfo:
    return calling(demo, QWEN + "{# <tool_call> tool_calls #}")


def test_chats_have_reasoning_content(thinking: ModelInfo) -> None:
    path = "/v1/chat/completions"
    told, events = both(thinking, ChatFormat, path, messages=HELLO, tools=[WEATHER])
    message = told["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, so.", "I look.")
    assert message["tool_calls"][0]["function"]["name"] == "f"
    assert told["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, so."
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."


def test_messages_have_thinking_blocks(thinking: ModelInfo) -> None:
    tool = {"name": "get_weather", "input_schema": {"type": "object"}}
    body = {"messages": HELLO, "max_tokens": 50, "tools": [tool]}
    told, events = both(thinking, AnthropicFormat, "/v1/messages", **body)
    blocks = Message.model_validate(told, strict=True).content
    assert [block.type for block in blocks] == ["thinking", "text", "tool_use"]
    assert blocks[0].thinking == "Hm, so."  # type: ignore[union-attr]
    data = [json.loads(event.split(b"data: ")[1]) for event in events]
    thought = [each["delta"]["thinking"] for each in data if "thinking" in each.get("delta", {})]
    assert "".join(thought) == "Hm, so."


def test_responses_have_reasoning_items(thinking: ModelInfo) -> None:
    tool = {"type": "function", "name": "get_weather", "parameters": {}}
    told, events = both(thinking, ResponsesFormat, "/v1/responses", input="Hi", tools=[tool])
    response = Response.model_validate(told, strict=True, extra="forbid")
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output[0].content[0].text == "Hm, so."  # type: ignore[union-attr, index]
    data = [json.loads(event.split(b"data: ")[1]) for event in events]
    kinds = [each["type"].removeprefix("response.") for each in data]
    first = kinds.index("output_item.added")
    assert kinds[first : first + 2] == ["output_item.added", "content_part.added"]
    thought = [each["delta"] for each in data if each["type"].endswith("reasoning_text.delta")]
    assert "".join(thought) == "Hm, so."
    last = [each for each in data if each["type"] == "response.reasoning_text.done"]
    assert [each["text"] for each in last] == ["Hm, so."]


def test_ollamas_messages_have_thinking(thinking: ModelInfo) -> None:
    told, events = both(thinking, OllamaChatFormat, "/api/chat", messages=HELLO, tools=[WEATHER])
    message = ollama.ChatResponse(**told).message
    assert (message.thinking, message.content) == ("Hm, so.", "I look.")
    lines = [ollama.ChatResponse(**json.loads(event)).message for event in events]
    assert "".join(line.thinking or "" for line in lines) == "Hm, so."
    assert [call.function.name for line in lines for call in line.tool_calls or ()] == ["f"]
