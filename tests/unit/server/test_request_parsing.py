import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic_core import to_json
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import RunningCluster
from pipespec.core import SamplingParams, TokenLogprobs
from pipespec.sampling.params import MAX_SEED, MIN_SEED
from pipespec.server.openai_format import DONE, ChatFormat, CompletionFormat
from pipespec.server.reply_format import OutputDelta
from pipespec.server.request_parsing import ParsedRequest, RequestParser
from pipespec.server.request_schema import ChatRequest, CompletionRequest
from pipespec.text import token_text
from tests.helpers import dialects

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def running(demo: ModelInfo) -> RunningCluster:
    return dialects.entry_of(demo)


def completion(running: RunningCluster, **body: Any) -> ParsedRequest:
    asked = CompletionRequest.model_validate({"prompt": "Once upon a time"} | body)
    return RequestParser(running).parse(asked)


def chat(running: RunningCluster, **body: Any) -> ParsedRequest:
    asked = ChatRequest.model_validate({"messages": HELLO} | body)
    return RequestParser(running).parse(asked)


def test_omitted_fields_have_openais_defaults(running):
    ask = completion(running)
    assert replace(ask.sampling_params[0], seed=0) == SamplingParams(temperature=1.0)
    assert (ask.n, ask.max_tokens, ask.stop) == (1, (16,), ())
    assert ask.eos == running.served.eos
    assert ask.sampling_params[0].seed != completion(running).sampling_params[0].seed
    ask = chat(running, user="me", whatever=[1], tools=[], suffix=None)  # without effect
    assert ask.max_tokens == (100 - len(ask.prompts[0]),)
    assert ask.sampling_params[0].logprobs is None
    assert chat(running, logprobs=True).sampling_params[0].logprobs == 0


def test_settings_of_the_cluster_override_openais_defaults(running):
    settings = (
        "cluster.stages=2",
        "sampling.temperature=1",
        "sampling.temperature=0.5",
        "sampling.seed=4",
        "decode.max_new_tokens=7",
        "decode.stop=[x]",
        "decode.ignore_eos=true",
    )
    warm = replace(running, overrides=settings)
    ask = completion(warm)
    assert ask.sampling_params == (SamplingParams(temperature=0.5, seed=4),)
    assert (ask.max_tokens, ask.stop, ask.eos) == ((7,), ("x",), ())
    ask = completion(warm, temperature=2, seed=5, max_tokens=8, stop="y", ignore_eos=False)
    assert ask.sampling_params == (SamplingParams(temperature=2.0, seed=5),)
    assert (ask.max_tokens, ask.stop, ask.eos) == ((8,), ("y",), running.served.eos)
    greedy = replace(running, overrides=("sampling.temperature=0",))
    narrow = replace(running, overrides=("sampling.top_p=0.9", "sampling.seed=4"))
    assert completion(narrow).sampling_params == (
        SamplingParams(temperature=1.0, top_p=0.9, seed=4),
    )
    assert completion(greedy).sampling_params[0].temperature == 0


def test_every_field_reaches_the_parsed_request(running):
    ask = completion(
        running,
        prompt=[[5, 6], "Once"],
        n=2,
        seed=MAX_SEED,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=-0.2,
        repetition_penalty=1.1,
        logit_bias={"7": -1},
        min_tokens=3,
        max_tokens=9,
        stop=["a", "b"],
        stop_token_ids=[8],
        logprobs=2,
        echo=None,
        priority=-3,
    )
    first = SamplingParams(0.5, 0, 0.9, 0.1, 1.1, 0.2, -0.2, ((7, -1.0),), MAX_SEED, 2, None, 3)
    # Another prompt does not change what a seed gives.
    assert ask.sampling_params == (first, replace(first, seed=MIN_SEED)) * 2
    assert [ask.prompt_of(i) for i in range(4)] == [(5, 6)] * 2 + [ask.prompts[1]] * 2
    assert (ask.max_tokens, ask.stop, ask.priority) == ((9, 9), ("a", "b"), -3)
    assert ask.eos == (*running.served.eos, 8)
    assert completion(running, echo=True, prompt=[[5, 6]]).echo_texts == (
        running.served.tokenizer.decode([5, 6]),
    )


def test_each_prompt_has_a_fresh_seed(running):
    ask = completion(running, prompt=["Once"] * 3, n=2)
    assert len({one.seed for one in ask.sampling_params}) == 6
    ask = completion(running, prompt=["Once"] * 2, seed=4)
    assert [one.seed for one in ask.sampling_params] == [4, 4]


def test_prompt_begins_with_the_special_token_unless_it_is_declined(running):
    backend = running.served.tokenizer
    tokenizer = Tokenizer.from_str(backend.backend)
    first = tokenizer.id_to_token(7)
    tokenizer.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 7)])
    served = replace(running.served, tokenizer=replace(backend, backend=tokenizer.to_str()))
    beginning = replace(running, served=served)
    plain = completion(running, prompt="Once").prompts
    assert completion(beginning, prompt="Once").prompts == ((7, *plain[0]),)
    assert completion(beginning, prompt="Once", add_special_tokens=False).prompts == plain


def test_prompt_logprobs_cover_the_largest_count_that_any_field_wants(running):
    def counts(**fields: Any) -> tuple[int | None, int | None, int | None]:
        ask = completion(running, prompt=[5, 6], **fields)
        return (
            ask.sampling_params[0].logprobs,
            ask.sampling_params[0].prompt_logprobs,
            ask.prompt_logprobs,
        )

    assert counts(logprobs=2) == (2, None, None)
    assert counts(logprobs=2, echo=True) == (2, 2, None)
    assert counts(prompt_logprobs=0) == (None, 0, 0)
    assert counts(logprobs=2, echo=True, prompt_logprobs=5) == (2, 5, 5)
    assert chat(running, prompt_logprobs=3).sampling_params[0].prompt_logprobs == 3


def test_older_names_of_structured_outputs_are_the_same(running):
    parser = RequestParser(running)

    def grammar(**fields: Any) -> str:
        body = CompletionRequest.model_validate({"prompt": "a"} | fields)
        return parser.parse(body).sampling_params[0].grammar

    for old, new, value in (
        ("guided_json", "json", {"type": "boolean"}),
        ("guided_json", "json", '{"type": "boolean"}'),
        ("guided_regex", "regex", "a+b"),
        ("guided_choice", "choice", ["a", "b"]),
        ("guided_grammar", "grammar", "start: /a+/"),
    ):
        assert grammar(**{old: value}) == grammar(structured_outputs={new: value}) != ""


def test_tokens_that_are_parts_of_characters_are_reported_as_bytes(running):
    tokenizer = running.served.tokenizer
    ids = tuple(tokenizer.encode("é"))
    assert len(ids) == 2
    scores = tuple(TokenLogprobs(-0.5, ((token, -0.5),)) for token in ids)
    piece = OutputDelta(0, "é", ids, scores, finish_reason="stop")

    shape = CompletionFormat(completion(running, logprobs=1), tokenizer, "demo")
    shape.add(piece)
    logprobs = shape.response()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["top_logprobs"] == [{"bytes:\\xc3": -0.5}, {"bytes:\\xa9": -0.5}]

    other = ChatFormat(chat(running, logprobs=True, top_logprobs=1), tokenizer, "demo")
    chunk, end = dialects.chunks(other.events(piece))
    content = chunk["choices"][0]["logprobs"]["content"]
    assert [token["bytes"] for token in content] == [[0xC3], [0xA9]]
    assert chunk["choices"][0]["delta"] == {"content": "é"}
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "stop")


def test_logprobs_and_prompt_logprobs_each_report_their_own_count(running):
    tokenizer = running.served.tokenizer
    ask = completion(running, prompt=[5, 6], echo=True, logprobs=1, prompt_logprobs=2)
    scores = TokenLogprobs(-3.0, ((7, -0.1), (8, -0.2)))
    piece = OutputDelta(0, "x", (9,), (TokenLogprobs(-0.5, ((9, -0.5),)),), finish_reason="stop")
    names = [token_text(tokenizer, token) for token in range(10)]

    shape = CompletionFormat(ask, tokenizer, "demo")
    shape.add(OutputDelta(0, "", prompt_logprobs=(scores,)))
    shape.add(piece)
    choice = shape.response()["choices"][0]
    assert choice["text"] == tokenizer.decode([5, 6]) + "x"
    assert choice["logprobs"]["tokens"] == [names[5], names[6], names[9]]
    assert choice["logprobs"]["token_logprobs"] == [None, -3.0, -0.5]
    tops = [None, {names[7]: -0.1, names[6]: -3.0}, {names[9]: -0.5}]
    assert choice["logprobs"]["top_logprobs"] == tops
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert {token: (each["rank"], each["logprob"]) for token, each in second.items()} == {
        "6": (None, -3.0),
        "7": (1, -0.1),
        "8": (2, -0.2),
    }

    # A stream shows the prompt once all is known of it.
    shape = CompletionFormat(
        completion(running, prompt=[5, 6], echo=True, logprobs=1), tokenizer, "demo"
    )
    assert not [*shape.first_events()]
    (shown,) = dialects.chunks(shape.events(OutputDelta(0, "", prompt_logprobs=(scores,))))
    assert shown["choices"][0]["text"] == tokenizer.decode([5, 6])
    assert shown["choices"][0]["logprobs"]["token_logprobs"] == [None, -3.0]
    ask = completion(running, prompt=[5], echo=True, logprobs=1)
    (alone,) = dialects.chunks(CompletionFormat(ask, tokenizer, "demo").first_events())
    assert alone["choices"][0]["logprobs"]["token_logprobs"] == [None]


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_are_those_of_the_text(running, echo):
    tokenizer, text = running.served.tokenizer, "a😀b ö c"
    special = running.served.eos
    ids = [*special, *tokenizer.encode(text, add_special_tokens=False), *special]
    pieces = [OutputDelta(0, "", (each,), (TokenLogprobs(-1.0),)) for each in ids]
    asked = completion(running, prompt=[5, 6], echo=echo, logprobs=0)
    before = tokenizer.decode([5, 6]) if echo else ""
    if echo:
        pieces[0] = replace(pieces[0], prompt_logprobs=(TokenLogprobs(-1.0),))
    shape = CompletionFormat(asked, tokenizer, "demo")
    for piece in pieces:
        shape.add(piece)
    whole = shape.response()["choices"][0]["logprobs"]
    stream = CompletionFormat(asked, tokenizer, "demo")
    events = [*stream.first_events(), *(event for each in pieces for event in stream.events(each))]
    chunks = [each["choices"][0]["logprobs"] for each in dialects.chunks(iter(events))]
    offsets = whole["text_offset"]
    assert offsets == [at for each in chunks for at in each["text_offset"]]
    by_name = dict(zip(whole["tokens"], offsets, strict=True))
    assert [by_name[name] - len(before) for name in ("b", " c")] == [2, 5]
    assert offsets[-1] == len(before + text)
    assert offsets[-len(ids) : -len(ids) + 2] == [len(before)] * 2


def test_minus_infinity_is_reported_as_a_number(running):
    shape = CompletionFormat(completion(running, logprobs=0), running.served.tokenizer, "demo")
    shape.add(OutputDelta(0, "a", (5,), (TokenLogprobs(float("-inf")),)))
    reply = json.loads(to_json(shape.response()))
    assert reply["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
def test_token_ids_and_fingerprint_are_reported(running, kind):
    ask = chat(running) if kind is ChatFormat else completion(running)
    options: dict[str, Any] = {"token_ids": True, "fingerprint": "fp_1"}
    pieces = [
        OutputDelta(0, "", (5,)),
        OutputDelta(0, "ab", (6, 7)),
        OutputDelta(0, "", finish_reason="stop"),
    ]
    stream = kind(ask, running.served.tokenizer, "demo", **options)
    chunks = dialects.chunks(stream.first_events())
    for piece in pieces:
        chunks += dialects.chunks(stream.events(piece))
    assert {chunk["system_fingerprint"] for chunk in chunks} == {"fp_1"}
    ids = [id_ for chunk in chunks for id_ in chunk["choices"][0].get("token_ids", ())]
    assert ids == [5, 6, 7]
    places = [chunk if kind is ChatFormat else chunk["choices"][0] for chunk in chunks]
    prompts = [[*place["prompt_token_ids"]] for place in places if "prompt_token_ids" in place]
    assert prompts == [[*ask.prompts[0]]]
    whole = kind(ask, running.served.tokenizer, "demo", **options)
    for piece in pieces:
        whole.add(piece)
    reply = whole.response()
    (choice,) = reply["choices"]
    assert (choice["token_ids"], reply["system_fingerprint"]) == ([5, 6, 7], "fp_1")
    place = reply if kind is ChatFormat else choice
    assert place["prompt_token_ids"] == [*ask.prompts[0]]
    plain = kind(ask, running.served.tokenizer, "demo").response()
    assert "token_ids" not in plain["choices"][0] and "prompt_token_ids" not in plain


@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
def test_cached_tokens_count_once_for_a_prompt_with_several_answers(running, kind):
    ask = chat(running, n=2) if kind is ChatFormat else completion(running, n=2)
    shape = kind(ask, running.served.tokenizer, "demo", usage=True)
    shape.add(OutputDelta(0, "a", (5,)))
    assert "prompt_tokens_details" not in shape.usage, "it is not known yet"
    shape.add(OutputDelta(1, "", finish_reason="stop", num_cached_tokens=9))
    shape.add(OutputDelta(0, "", finish_reason="stop", num_cached_tokens=4))
    assert shape.usage["prompt_tokens_details"] == {"cached_tokens": 4}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("wanted", [None, "include_usage", "continuous_usage_stats"])
def test_usage_of_a_stream_is_reported_as_its_options_say(demo, path, wanted):
    body: dict[str, Any] = {"messages": HELLO} if "chat" in path else {"prompt": "Once"}
    if wanted is not None:
        body["stream_options"] = {"include_usage": True, wanted: True}
    shape = dialects.shape_of(demo, dialects.preparer(demo), path, body | {"stream": True})
    answer = [OutputDelta(0, "a", (5,)), OutputDelta(0, "b", (6, 7))]
    *events, done = dialects.stream_of(shape, [*answer, OutputDelta(0, "", finish_reason="stop")])
    assert done == DONE
    chunks = dialects.chunks(events)
    usage = [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks]
    begun = [0] * ("chat" in path)  # a chat's first chunk has its role
    if wanted == "continuous_usage_stats":
        assert usage == [*begun, 1, 3, 3, 3]
    elif wanted is None:
        assert usage == [None] * (len(begun) + 3)
    else:
        assert usage == [*[None] * (len(begun) + 3), 3]
    if wanted is not None:
        prompt = shape.request.prompt_tokens
        assert (chunks[-1]["choices"], chunks[-1]["usage"]["total_tokens"]) == ([], prompt + 3)
