"""OpenAI's /v1/responses: what requests become, and replies that OpenAI's package accepts."""

import json
from dataclasses import replace
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from pipespec.client.model_info import ModelInfo
from pipespec.core import TokenLogprobs
from pipespec.extras.dialects.responses import ResponsesFormat, ResponsesRequest
from pipespec.server.api_errors import ApiError
from pipespec.server.preparation import Preparer
from pipespec.server.response_stream import kept_name
from tests.helpers import dialects
from tests.helpers.dialects import parts

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
ASKED: dict[str, Any] = {"model": "demo", "max_output_tokens": 50, "input": "Hello"}
ARGUMENTS = '{"city": "Zürich"}'
CALL = f'<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>'


def fields(**body: Any) -> dict[str, Any]:
    return ResponsesRequest.model_validate(ASKED | body).translated().fields


def shape_of(served: ModelInfo, preparer: Preparer, **body: Any) -> ResponsesFormat:
    return dialects.shape_of(served, preparer, PATH, ASKED | body)


def events(served: ModelInfo, preparer: Preparer, answer: Any, **body: Any) -> list[Any]:
    """The events of a stream, with the types of OpenAI's package and no key that they lack."""
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    made = []
    for sent in dialects.stream_of(shape_of(served, preparer, **body), answer):
        kind, data = sent.decode().rstrip("\n").split("\n")
        data = data.removeprefix("data: ")
        made.append(adapter.validate_json(data, strict=True))
        assert kind == f"event: {made[-1].type}"
        type(made[-1]).model_validate_json(data, strict=True, extra="forbid")
    assert [event.sequence_number for event in made] == [*range(len(made))]
    return made


def whole(served: ModelInfo, preparer: Preparer, answer: Any, **body: Any) -> Response:
    told = dialects.whole_of(shape_of(served, preparer, **body), answer)
    return Response.model_validate(told, strict=True, extra="forbid")


def comparable(response: Response) -> dict[str, Any]:
    """A response without what is drawn for each."""
    told = response.model_dump(exclude={"id", "created_at", "completed_at"})
    for item in told["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return told


def test_items_become_messages():
    asked = [{"type": "input_text", "text": "What"}, {"type": "input_text", "text": "now?"}]
    thought = [{"type": "reasoning_text", "text": "Hm."}]
    said = [{"type": "output_text", "text": "I look.", "annotations": []}]
    call, result = {"type": "function_call"}, {"type": "function_call_output"}
    spoken = {"type": "message", "id": "msg", "status": "completed", "role": "assistant"}
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": asked},
        {"type": "reasoning", "id": "rs", "summary": [], "content": thought},
        spoken | {"content": said},
        call | {"call_id": "a", "name": "get_weather", "arguments": ARGUMENTS},
        call | {"call_id": "b", "name": "get_weather", "arguments": "{}"},
        result | {"call_id": "a", "output": "Sunny."},
        result | {"call_id": "b", "output": [{"type": "input_text", "text": "Rain."}]},
    ]
    made = fields(input=items, instructions="Be kind.")["messages"]
    calls = [
        {"id": id_, "type": "function", "function": {"name": "get_weather", "arguments": given}}
        for id_, given in (("a", ARGUMENTS), ("b", "{}"))
    ]
    assert made == [
        {"role": "system", "content": "Be kind."},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts("What", "now?")},
        {
            "role": "assistant",
            "content": parts("I look."),
            "reasoning_content": "Hm.",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "a", "content": "Sunny."},
        {"role": "tool", "tool_call_id": "b", "content": parts("Rain.")},
    ]


def test_fields_reach_the_request(preparer):
    body = {"temperature": 0.5, "top_p": 0.9, "seed": 7, "top_k": 4, "stop": "x", "stream": True}
    body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "user": "me"}
    request = dialects.prepared(preparer, PATH, ASKED | body)
    (sampling,) = request.parsed.sampling_params
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 4)
    assert (sampling.seed, sampling.logprobs, request.parsed.stop) == (7, 2, ("x",))
    assert (request.stream, request.parsed.max_tokens) == (True, (50,))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    request = dialects.prepared(preparer, PATH, ASKED | {"text": {"format": form}})
    assert request.parsed.sampling_params[0].grammar
    assert fields(reasoning={"effort": "low", "summary": "auto"})["reasoning_effort"] == "low"
    some = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "get_weather"}],
    }
    request = dialects.prepared(preparer, PATH, ASKED | {"tools": [TOOL], "tool_choice": some})
    assert request.parsed.tool_use is not None and request.parsed.sampling_params[0].grammar


def test_conversation_is_continued_with_what_was_kept(served, preparer):
    shape = shape_of(served, preparer, tools=[TOOL], instructions="Be kind.")
    reply = dialects.whole_of(shape, dialects.deltas(f"I look. {CALL}"))
    response, kept = shape.kept
    assert response == shape.id
    assert json.loads(kept.partition(b"\n")[0]) == reply
    output = {"type": "function_call_output", "call_id": "a", "output": "Sunny."}
    later = {"previous_response_id": response, "input": [output], "instructions": "Be brief."}
    body = json.dumps(ASKED | later).encode()
    assert preparer.prepare(PATH, body) == response
    request = preparer.prepare(PATH, body, kept)
    prompt = dialects.prompt_of(served, request)  # type: ignore[arg-type]
    assert prompt.startswith("system: Be brief.user: Helloassistant: I look.<tool_call>{")
    assert "Zürich" in prompt and "Be kind" not in prompt
    assert "tool: Sunny. (a)" in prompt
    assert shape_of(served, preparer, store=False).kept is None


def test_conversation_without_input_is_continued(served, preparer):
    shape = shape_of(served, preparer, input=[], instructions="Greet the user.")
    dialects.whole_of(shape, dialects.deltas("Hello."))
    body = json.dumps(ASKED | {"previous_response_id": shape.id, "input": "Hi"}).encode()
    request = preparer.prepare(PATH, body, shape.kept[1])
    assert dialects.prompt_of(served, request).startswith("assistant: Hello.user: Hi")  # type: ignore[arg-type]


def test_name_of_a_conversation_depends_on_id_and_key():
    names = {kept_name(id_, key) for id_ in ("a", "b") for key in (b"", b"1", b"2")}
    assert len(names) == 6
    assert all(len(name) == 64 for name in names)


def test_stream_of_text_has_the_events_that_the_package_expects(served, preparer):
    answer = dialects.deltas('Say "é"\n')
    made = events(served, preparer, answer, instructions="Be kind.", tools=[TOOL])
    assert [event.type.removeprefix("response.") for event in made] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * 3,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert made[0].response.status == "in_progress" and made[0].response.output == []
    assert "".join(e.delta for e in made if e.type.endswith("text.delta")) == 'Say "é"\n'
    told = whole(served, preparer, answer, instructions="Be kind.", tools=[TOOL])
    assert comparable(told) == comparable(made[-1].response)
    assert (told.status, told.output_text) == ("completed", 'Say "é"\n')
    assert told.instructions == "Be kind." and told.tools[0].name == "get_weather"  # type: ignore[union-attr]
    assert told.usage is not None and told.usage.input_tokens_details.cached_tokens == 3


def test_reasoning_and_calls_are_items_of_their_own(thinking):
    preparer, texts = dialects.preparer(thinking), ["Hm, so.", "I look.", ARGUMENTS, ARGUMENTS]
    answer = dialects.deltas(f"<think>Hm, so.</think>I look. {CALL} {CALL}")
    made = events(thinking, preparer, answer, tools=[TOOL])
    response = made[-1].response
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item.type for item in response.output] == kinds
    assert response.output[0].content[0].text == texts[0]
    assert [item.arguments for item in response.output[2:]] == texts[2:]
    for index, item in enumerate(response.output):
        assert item.status == "completed"
        of_item = [e for e in made if getattr(e, "output_index", None) == index]
        assert of_item[0].type == "response.output_item.added"
        assert of_item[0].item.id == item.id
        assert of_item[-1].item == item
        pieces = [e.delta for e in of_item if e.type.endswith(".delta")]
        assert len(pieces) > 1
        assert "".join(pieces) == texts[index]
    told = whole(thinking, preparer, answer, tools=[TOOL])
    assert comparable(told) == comparable(response)


def test_cut_answer_is_incomplete(served, preparer):
    made = events(served, preparer, dialects.deltas("Hello", reason="length"))
    assert made[-1].type == "response.incomplete"
    assert made[-1].response.incomplete_details.reason == "max_output_tokens"
    assert made[-1].response.output[0].status == "incomplete"
    assert made[-2].item.status == "incomplete"


def test_log_probabilities_of_all_tokens_are_reported(served, preparer):
    scores = TokenLogprobs(-0.5, ((5, -0.5), (6, -1.5)))
    first, *rest = dialects.deltas("Hello you", step=3)
    answer = [replace(first, text="", logprobs=(scores,))]
    answer += [replace(each, logprobs=(scores,) * len(each.token_ids)) for each in rest]
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    made = events(served, preparer, answer, **body)
    told = [each for e in made if e.type.endswith("text.delta") for each in e.logprobs]
    assert len(told) == 3 and len(told[0].top_logprobs) == 2
    (item,) = whole(served, preparer, answer, **body).output
    assert len(item.content[0].logprobs) == 3  # type: ignore[union-attr]


def test_failure_of_a_stream_is_a_failed_response(served, preparer):
    shape = shape_of(served, preparer)
    (sent,) = shape.failed(ApiError(503, "It is away."))
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    event = adapter.validate_json(sent.split(b"data: ")[1], strict=True)
    assert event.response.status == "failed"
    assert (event.response.error.code, event.response.error.message) == (
        "server_error",
        "It is away.",
    )
