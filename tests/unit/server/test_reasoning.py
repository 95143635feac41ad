from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.engine.llguidance_backend import grammar_from_regex
from pipespec.server.api_errors import ApiError
from pipespec.server.chat_prompt import ToolUse
from pipespec.server.openai_format import ChatFormat
from pipespec.server.reasoning import HOLD, SPECIAL, Family, ReasoningUse, reasoning_use
from pipespec.server.reply_format import AnswerBlocks
from pipespec.server.tool_parsers.families import FAMILIES
from tests.helpers import dialects
from tests.helpers.calling import WEATHER, calling, fits

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
    ("think", False, "\nuser wants.\n</think>\n\nHi", "user wants.", "Hi", []),
    ("think", False, "Hm.</think> Hi <think>.</think>", "Hm.", "Hi <think>.</think>", []),
    ("think", False, f"Hm.\n{CALL}</think>{CALL}", f"Hm.\n{CALL}", "", ['f{"a": 1}']),
    ("think", False, f"Hm. {CALL}", "", "Hm.", ['f{"a": 1}']),
    ("mistral", False, "Hm.[/THINK]Hi.", "Hm.", "Hi.", []),
    ("seed", False, "Hm.</seed:think>Hi.", "Hm.", "Hi.", []),
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
    ("gpt_oss", False, PREAMBLE, "", "I look.", ['f{"a": 1}']),
]


def split(family: Family, begun: bool, pieces: list[str]) -> tuple[str, str, list[str]]:
    """The reasoning, the text and the calls of an answer that comes in pieces."""
    tools = FAMILIES["openai" if family == "gpt_oss" else "hermes"]
    answer = AnswerBlocks(ToolUse(tools, tools, True), ReasoningUse(family, begun))
    shown = {"reasoning": "", "text": "", "call": ""}
    for number, piece in enumerate(pieces, 1):
        for delta in answer.push(piece, last=number == len(pieces)):
            shown[delta.block.kind] += delta.text
    calls = [call.name + call.text for call in answer.calls]
    texts = (answer.text_of("reasoning"), answer.text_of("text"))
    assert (shown["reasoning"], shown["text"]) == texts, "nothing is taken back"
    return *texts, calls


@pytest.mark.parametrize("case", CANNED, ids=lambda case: f"{case[0]} {case[2][:30]!r}")
def test_reasoning_is_split_wherever_the_text_is_cut(case):
    family, begun, text, *expected = case

    @given(st.lists(st.integers(0, len(text)), max_size=8))
    def cut(places: list[int]) -> None:
        edges = [0, *sorted(places), len(text)]
        pieces = [text[a:b] for a, b in pairwise(edges)]
        assert [*split(family, begun, pieces)] == expected

    cut()
    assert [*split(family, begun, [*text, ""])] == expected


def test_template_and_prompt_say_whether_there_is_reasoning():
    assert reasoning_use(R1, "<|Assistant|><think>\n") == ReasoningUse("think", begun=True)
    for text, thinks in (("", True), ("The answer is", False)):
        use = reasoning_use("{{ content.split('</think>')[-1] }}", f"<|Assistant|>{text}", text)
        assert use == ReasoningUse("think", thinks=thinks)
    assert reasoning_use("[THINK]", "a") == ReasoningUse("mistral")
    assert reasoning_use("<seed:think>", "a") == ReasoningUse("seed")
    assert reasoning_use("<|channel|>analysis", "a") == ReasoningUse("gpt_oss")
    assert reasoning_use("{{ messages }}", "<think>") is None
    inside = "<|start|>assistant<|channel|>final<|message|>Hel"
    assert reasoning_use("<|channel|>analysis", inside) == ReasoningUse("gpt_oss", begun=True)
    after = reasoning_use("<|channel|>analysis", f"{inside}lo.<|end|><|start|>assistant")
    assert after == ReasoningUse("gpt_oss", begun=False)


# What the template writes before the text that is continued, that text, and how the answer begins.
CONTINUED: list[tuple[str, str, ReasoningUse | None]] = [
    ("<assistant>", "<think>\nThe ", ReasoningUse("think", True, amid=True)),
    ("<assistant>", "<think>\n", ReasoningUse("think", True)),
    ("<assistant>", "<think>a</think>b", None),
    ("<think>\n\n</think>\n\n", "<think>\nThe ", ReasoningUse("think", True, amid=True)),
    ("<think>\n\n</think>\n\n", "The ", None),
    ("<assistant><think>\n", "The ", ReasoningUse("think", True, amid=True)),
    ("<assistant>", "It is", ReasoningUse("think")),
    ("<assistant>", "[THINK]The ", ReasoningUse("mistral", True, amid=True)),
    ("<assistant>", "<seed:think>The ", ReasoningUse("seed", True, amid=True)),
]


@pytest.mark.parametrize(("before", "text", "expected"), CONTINUED)
def test_answer_continues_the_reasoning_in_which_the_prompt_ends(before, text, expected):
    template = "" if "THINK" in text or "seed" in text else QWEN
    assert reasoning_use(template, f"<user>Why <think>?{before}{text}", text) == expected


def test_answer_continues_the_channel_in_which_the_prompt_ends():
    begins = "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>analysis<|message|>The "
    use = reasoning_use("<|channel|>analysis", begins, "The ")
    assert use == ReasoningUse("gpt_oss", True, amid=True)
    answer = AnswerBlocks(None, use)
    answer.push(f"user wants.<|end|><|start|>assistant{FINAL[FINAL.index('<|channel|>final') :]}")
    assert (answer.text_of("reasoning"), answer.text_of("text")) == ("user wants.", "Hi.")


# Within reasoning, by the ways in which a client can say so.
PREFILLS: list[tuple[str, Any]] = [
    (CHATS, {"content": "<think>\nThe"}),
    (CHATS, {"content": [{"type": "text", "text": "<think>\nThe"}]}),
    (CHATS, {"content": "", "reasoning_content": "The"}),
    ("/v1/messages", {"content": "<think>\nThe"}),
    ("/v1/messages", {"content": [{"type": "thinking", "thinking": "The"}]}),
]


@pytest.mark.parametrize(("path", "prefill"), PREFILLS)
@pytest.mark.parametrize("streams", [False, True])
def test_prefill_within_reasoning_is_continued(demo, path, prefill, streams):
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>\n"
        "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}"
    )
    served = calling(demo, template)
    body = {
        "model": "demo",
        "max_tokens": 50,
        "messages": [*HELLO, {"role": "assistant"} | prefill],
    }
    body |= {"continue_final_message": True} if path == CHATS else {}
    preparer = dialects.preparer(served)
    request = dialects.prepared(preparer, path, body)
    assert dialects.prompt_of(served, request) == "<user>Hi<assistant><think>\nThe"
    shape = dialects.shape_of(served, preparer, path, body)
    answer = dialects.deltas(" user wants\n</think>\n\nHi")
    if streams:
        events = b"".join(dialects.stream_of(shape, answer))
        assert b"think>" not in events and b'" user' in events
    else:
        dialects.whole_of(shape, answer)
        found = shape.answers[0]
        assert (found.text_of("reasoning"), found.text_of("text")) == (" user wants", "Hi")


ONE_TAG = "{{ messages[0].content.split('</think>')[-1] }}"


@pytest.mark.parametrize(
    ("template", "text", "thought", "said"),
    [
        (QWEN, "a " * 129, "", "a " * 129),
        (QWEN, "Hm.</think>" + "a " * 200, "Hm.", "a " * 200),
        # Whether a tag comes within the bound, wherever the stream is cut.
        (QWEN, f"{'a' * (HOLD - 8)}</think>b", "a" * (HOLD - 8), "b"),
        (QWEN, f"{'a' * (HOLD - 7)}</think>b", "", f"{'a' * (HOLD - 7)}</think>b"),
        # Its model always thinks.
        (ONE_TAG, "a" * 300, "a" * 300, ""),
        (ONE_TAG, "a" * 300 + "</think>b", "a" * 300, "b"),
        (ONE_TAG, "Hi", "", "Hi"),
    ],
)
def test_stream_without_tags_is_held_for_its_beginning_alone(demo, template, text, thought, said):
    served = calling(demo, template)
    body = {"messages": HELLO, "stream": True}
    use = dialects.prepared(dialects.preparer(served), CHATS, body).parsed.reasoning
    for step in (1, 7, 1000):
        answer = AnswerBlocks(None, use)
        for begin in range(0, len(text), step):
            answer.push(text[begin : begin + step])
            assert answer.blocks or begin + step <= HOLD or len(text) <= HOLD
        answer.push("", last=True)
        assert (answer.text_of("reasoning"), answer.text_of("text")) == (thought, said)


@pytest.mark.parametrize("tools", [[], [WEATHER]])
def test_whole_reply_without_tags_is_text_and_calls(demo, tools):
    served = calling(demo, ONE_TAG + "{# tools <tool_call> tool_calls #}")
    body = {"messages": HELLO, "tools": tools}
    parsed = dialects.prepared(dialects.preparer(served), CHATS, body).parsed
    said, call = "a" * 300, CALL if tools else ""
    answer = AnswerBlocks(parsed.tool_use, parsed.reasoning)
    answer.push(said + call, last=True)
    assert answer.text_of("text") == said and len(answer.calls) == len(tools)


@pytest.mark.parametrize(
    ("template", "asked", "held"),
    [
        ("{% if enable_thinking %}Think.{% endif %}", {}, False),
        ("{% if enable_thinking %}Think.{% endif %}", {"reasoning_effort": "low"}, True),
        ("{% if thinking is not false %}Think.{% endif %}", {}, True),
        (
            "{% if thinking is not false %}Think.{% endif %}",
            {"chat_template_kwargs": {"thinking": False}},
            False,
        ),
        ("", {}, True),
    ],
)
def test_text_is_not_held_where_reasoning_is_switched_off(demo, template, asked, held):
    served = calling(demo, template + "{{ messages[0].content }}{# <think> </think> #}")
    request = dialects.prepared(dialects.preparer(served), CHATS, {"messages": HELLO} | asked)
    answer = AnswerBlocks(None, request.parsed.reasoning)
    assert bool(answer.push("Hello")) != held
    assert bool(answer.push("", last=True)) == held


def test_tag_in_structured_output_is_text(demo):
    served = calling(demo, QWEN)
    body = {"messages": HELLO, "response_format": {"type": "json_object"}}
    request = dialects.prepared(dialects.preparer(served), CHATS, body)
    answer = AnswerBlocks(None, request.parsed.reasoning)
    answer.push('{"a": "</think>"}', last=True)
    assert answer.text_of("text") == '{"a": "</think>"}'


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "special", "good", "unfit"),
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
            "{{ messages }}<|start|>assistant<|channel|>analysis<|message|>So",
            SPECIAL,
            ['Hm.<|end|><|start|>assistant<|channel|>final<|message|>{"a":1}'],
            ['{"a":1}', FINAL],
        ),
        (
            "{{ messages }}<|channel|>analysis",
            SPECIAL,
            [FINAL.replace("Hi.<|return|>", '{"a":1}'), '<|channel|>final<|message|>{"a":1}'],
            ['{"a":1}', "<|channel|>final<|message|>Hi"],
        ),
    ],
)
def test_grammar_begins_after_the_reasoning(demo, template, special, good, unfit):
    served = calling(demo, template, *special)
    body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": FORM}
    request = dialects.prepared(dialects.preparer(served), CHATS, body)
    for text in (*good, *unfit):
        assert fits(served, request.parsed, text) == (text in good), text


def test_grammar_of_the_cluster_begins_after_the_reasoning_too(demo):
    served = calling(demo, R1)
    preparer = dialects.preparer(served, "decode.regex=[0-9]+")
    body: dict[str, Any] = {"messages": HELLO}
    assert fits(served, dialects.prepared(preparer, CHATS, body).parsed, "Hm.</think>12")
    with pytest.raises(ApiError, match="what the cluster's grammar describes ends by itself"):
        dialects.prepared(preparer, CHATS, body | {"ignore_eos": True})
    plain = dialects.prepared(preparer, "/v1/completions", {"prompt": "Hi"}).parsed
    assert plain.sampling_params[0].grammar == grammar_from_regex("[0-9]+")


def test_grammar_of_a_continued_message_has_no_channels_before_it(demo):
    template = (
        "{% for message in messages %}<|start|>{{ message.role }}<|channel|>final<|message|>"
        "{{ message.content }}<|end|>{% endfor %}{# analysis #}"
    )
    served = calling(demo, template, *SPECIAL)
    messages = [*HELLO, {"role": "assistant", "content": "It is"}]
    body = {"messages": messages, "continue_final_message": True, "response_format": FORM}
    parsed = dialects.prepared(dialects.preparer(served), CHATS, body).parsed
    assert parsed.reasoning is not None and parsed.reasoning.begun
    assert fits(served, parsed, '{"a":1}')


def test_grammar_is_alone_where_reasoning_is_off(demo):
    served = calling(demo, QWEN)
    body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": FORM}
    preparer = dialects.preparer(served)
    asked = dialects.prepared(preparer, CHATS, body | {"reasoning_effort": "none"})
    assert asked.parsed.reasoning is None
    assert "</think>" not in (asked.parsed.sampling_params[0].grammar or "")


def test_chats_have_reasoning_content(demo):
    thinking = calling(demo, QWEN + "{# <tool_call> tool_calls #}")
    body = {"messages": HELLO, "tools": [WEATHER]}
    parsed = dialects.prepared(dialects.preparer(thinking), CHATS, body).parsed
    shape = ChatFormat(parsed, thinking.tokenizer, "demo")
    events = dialects.stream_of(shape, dialects.deltas(f"<think>Hm, so.</think>I look. {CALL}"))
    assert shape.usage["completion_tokens_details"]["reasoning_tokens"] == 4
    deltas = [chunk["choices"][0]["delta"] for chunk in dialects.chunks(events[:-1])]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, so."
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
