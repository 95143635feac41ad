"""Ollama's routes: what requests become, and replies that Ollama's package accepts."""

import json
from dataclasses import replace
from typing import Any

import ollama
import pytest

from pipespec.client.model_info import ModelInfo
from pipespec.core import TokenLogprobs
from pipespec.extras.dialects.ollama import OllamaChatRequest, OllamaFormat, tags_reply
from pipespec.server.api_errors import ApiError
from pipespec.server.options import ServerOptions
from pipespec.server.preparation import Preparer
from tests.helpers import dialects
from tests.helpers.calling import WEATHER

CHAT, GENERATE, SHOW = "/api/chat", "/api/generate", "/api/show"
HELLO = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, Any] = {"model": "demo", "messages": HELLO}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>'


def chat_shape(served: ModelInfo, preparer: Preparer, **body: Any) -> OllamaFormat:
    return dialects.shape_of(served, preparer, CHAT, ASKED | body)


def lines(shape: Any, answer: Any) -> list[dict[str, Any]]:
    """The lines of a stream."""
    sent = b"".join(dialects.stream_of(shape, answer)).decode()
    assert sent.endswith("\n") and "\n\n" not in sent
    return [json.loads(line) for line in sent.splitlines()]


def test_options_reach_the_request(preparer):
    options = {"temperature": 0, "top_p": 0.9, "top_k": 5, "seed": 7, "num_predict": 9}
    options |= {"repeat_penalty": 1.1, "stop": ["x"], "num_ctx": 4096, "repeat_last_n": 64}
    request = dialects.prepared(preparer, CHAT, ASKED | {"options": options, "stream": False})
    (sampling,) = request.parsed.sampling_params
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.9, 5)
    assert (sampling.seed, sampling.repetition_penalty) == (7, 1.1)
    assert (request.parsed.max_tokens, request.parsed.stop) == ((9,), ("x",))
    assert not request.stream
    assert dialects.prepared(preparer, CHAT, ASKED).stream, "unless it is declined"
    (sampling,) = dialects.prepared(
        preparer, CHAT, ASKED | {"options": {"top_p": 0}}
    ).parsed.sampling_params
    assert (sampling.top_p, sampling.top_k) == (1, 1), "the most probable token remains"
    own = {"seed": 42, "repetition_penalty": 1.2, "min_p": 0.1, "presence_penalty": 0.5}
    (sampling,) = dialects.prepared(preparer, CHAT, ASKED | own).parsed.sampling_params
    assert {name: getattr(sampling, name) for name in own} == own
    for count in (-1, -2, 0, 10**6):
        body = ASKED | {"options": {"num_predict": count}}
        request = dialects.prepared(preparer, CHAT, body)
        assert request.parsed.max_tokens == (2000 - len(request.parsed.prompts[0]),)


def test_formats_and_thinking_are_translated(preparer):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for form in ("json", schema):
        request = dialects.prepared(preparer, CHAT, ASKED | {"format": form})
        assert request.parsed.sampling_params[0].grammar
    assert (
        not dialects.prepared(preparer, CHAT, ASKED | {"format": ""})
        .parsed.sampling_params[0]
        .grammar
    )
    for think, effort in ((True, "medium"), (False, "none"), ("low", "low")):
        body = OllamaChatRequest.model_validate(ASKED | {"think": think})
        assert body.translated().fields["reasoning_effort"] == effort


def test_results_name_the_calls_before_them():
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    other = {"function": {"name": "g", "arguments": {}}}
    messages = [
        *HELLO,
        {"role": "assistant", "thinking": "Hm.", "tool_calls": [call, other]},
        {"role": "tool", "tool_name": "g", "content": "two"},
        {"role": "tool", "content": "one"},
    ]
    body = OllamaChatRequest.model_validate(ASKED | {"messages": messages})
    _, spoken, *results = body.translated().fields["messages"]
    ids = [each["id"] for each in spoken["tool_calls"]]
    assert [len(each) for each in ids] == [9, 9]
    assert spoken["reasoning_content"] == "Hm."
    assert [(each["tool_call_id"], each["content"]) for each in results] == [
        (ids[1], "two"),
        (ids[0], "one"),
    ]


def test_generate_uses_the_template_unless_it_is_raw(served, preparer):
    body = {"model": "demo", "prompt": "Once", "system": "Be brief."}
    request = dialects.prepared(preparer, GENERATE, body)
    assert dialects.prompt_of(served, request) == "system: Be brief.user: Once"
    request = dialects.prepared(
        preparer, GENERATE, {"model": "demo", "prompt": "Once", "raw": True}
    )
    assert dialects.prompt_of(served, request) == "Once"
    assert request.parsed.max_tokens == (2000 - len(request.parsed.prompts[0]),)


@pytest.mark.parametrize(("path", "empty"), [(CHAT, {"messages": []}), (GENERATE, {"prompt": ""})])
def test_request_without_a_prompt_is_answered_at_once(preparer, path, empty):
    reply = preparer.prepare(path, json.dumps({"model": "demo"} | empty).encode())
    assert isinstance(reply, bytes)
    kind: Any = ollama.ChatResponse if path == CHAT else ollama.GenerateResponse
    told = kind(**json.loads(reply))
    assert (told.done, told.done_reason) == (True, "load")


@pytest.mark.parametrize(
    ("served_name", "asked", "found"),
    [
        ("demo", "demo:latest", "demo"),
        ("demo:latest", "demo", "demo:latest"),
        ("demo:latest", "demo:latest", "demo:latest"),
        ("demo", "demo:7b", None),
        ("demo", "other:latest", None),
    ],
)
def test_name_without_a_tag_is_the_same_as_with_latest(served, served_name, asked, found):
    preparer = Preparer(dialects.entry_of(served), ServerOptions((served_name,)))
    if found is None:
        with pytest.raises(ApiError, match="is not served here"):
            dialects.prepared(preparer, CHAT, ASKED | {"model": asked})
        return
    assert dialects.prepared(preparer, CHAT, ASKED | {"model": asked}).model == found
    assert isinstance(preparer.prepare(SHOW, json.dumps({"model": asked}).encode()), bytes)


def test_stream_of_text_is_read_by_the_package(served, preparer):
    answer = dialects.deltas('Say "é"\n')
    made = [ollama.ChatResponse(**line) for line in lines(chat_shape(served, preparer), answer)]
    assert "".join(each.message.content or "" for each in made) == 'Say "é"\n'
    assert [each.done for each in made] == [False, False, True]
    last = made[-1]
    assert (last.done_reason, last.eval_count) == ("stop", 2)
    assert last.total_duration == (last.prompt_eval_duration or 0) + (last.eval_duration or 0)
    told = ollama.ChatResponse(**dialects.whole_of(chat_shape(served, preparer), answer))
    assert told.message.content == 'Say "é"\n'
    assert (told.eval_count, told.prompt_eval_count) == (2, last.prompt_eval_count)
    idle = json.loads(chat_shape(served, preparer).keepalive)
    assert (idle["message"]["content"], idle["done"]) == ("", False)


def test_separators_of_lines_in_a_text_end_no_line(served, preparer):
    text = "a\u2028b\u2029c\x85d"
    made = lines(chat_shape(served, preparer), dialects.deltas(text, step=1))
    assert "".join(line["message"]["content"] for line in made) == text
    call = CALL.replace("Zürich", text)
    made = lines(chat_shape(served, preparer, tools=[WEATHER]), dialects.deltas(call))
    (found,) = (line["message"] for line in made if line["message"].get("tool_calls"))
    assert found["tool_calls"][0]["function"]["arguments"] == {"city": text}


def test_reasoning_is_told_and_calls_are_sent_when_they_are_whole(thinking):
    answer = dialects.deltas(f"<think>Hm, so.</think>I look. {CALL} {CALL}")
    shape, other = (
        chat_shape(thinking, dialects.preparer(thinking), tools=[WEATHER]) for _ in range(2)
    )
    made = [ollama.ChatResponse(**line) for line in lines(shape, answer)]
    assert "".join(each.message.thinking or "" for each in made) == "Hm, so."
    calls = [call.function for each in made for call in each.message.tool_calls or ()]
    assert [(call.name, call.arguments) for call in calls] == [
        ("get_weather", {"city": "Zürich"})
    ] * 2
    told = ollama.ChatResponse(**dialects.whole_of(other, answer)).message
    assert (told.thinking, told.content) == ("Hm, so.", "I look.")
    assert [call.function for call in told.tool_calls or ()] == calls


def test_log_probabilities_of_all_tokens_are_reported(served, preparer):
    scores = TokenLogprobs(-0.5, ((5, -0.5), (6, -1.5)))
    answer = [
        replace(each, logprobs=(scores,) * len(each.token_ids))
        for each in dialects.deltas("Hello you")
    ]
    shape = chat_shape(served, preparer, logprobs=True, top_logprobs=2)
    made = [ollama.ChatResponse(**line) for line in lines(shape, answer)]
    told = [logprob for each in made for logprob in each.logprobs or ()]
    assert [len(each.top_logprobs or ()) for each in told] == [2, 2]
    shape = chat_shape(served, preparer, logprobs=True, top_logprobs=2)
    assert len(ollama.ChatResponse(**dialects.whole_of(shape, answer)).logprobs or ()) == 2


def test_text_of_a_prompt_is_read_by_the_package(served, preparer):
    body = {"model": "demo", "prompt": "Once"}
    shape = dialects.shape_of(served, preparer, GENERATE, body)
    answer = dialects.deltas("upon a time", reason="length")
    made = [ollama.GenerateResponse(**line) for line in lines(shape, answer)]
    assert "".join(each.response or "" for each in made) == "upon a time"
    assert made[-1].done_reason == "length"


def test_models_are_described(served, preparer):
    reply = preparer.prepare(SHOW, b'{"model": "demo", "verbose": true}')
    assert isinstance(reply, bytes)
    told = ollama.ShowResponse(**json.loads(reply))
    architecture = (told.modelinfo or {})["general.architecture"]
    assert (told.modelinfo or {})[f"{architecture}.context_length"] == served.context
    assert told.capabilities == ["completion", "tools"]
    (listed,) = ollama.ListResponse(**tags_reply(("demo",), 1.5, 8)).models
    assert listed.model == "demo" and listed.modified_at is not None
    assert listed.modified_at.timestamp() == 1.5
