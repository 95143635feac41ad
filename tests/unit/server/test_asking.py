"""What a request means for the cluster, and what its answers are in OpenAI's words."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipespec.client.registry import Owner, RunningCluster
from pipespec.client.served import ServedModel
from pipespec.cluster.deployment import decide
from pipespec.config.compose import compose
from pipespec.core import Sampling, TokenLogprobs
from pipespec.sampling.spec import MAX_SEED
from pipespec.server import asking, prompts
from pipespec.server.answering import Piece
from pipespec.server.asking import Ask, Defaults
from pipespec.server.chat import Chat
from pipespec.server.completion import Completion
from pipespec.server.errors import ApiError
from pipespec.server.fields import ChatRequest, CompletionRequest
from pipespec.system.resources import resource_dir
from pipespec.text import token_text

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def running() -> RunningCluster:
    served = ServedModel.of(decide(compose(["model.context=100"])))
    return RunningCluster(
        "lab", "", "nobody", 1, Owner.this(), "here", (), served, num_ranks=5, started=1.0
    )


def completion(running: RunningCluster, **body: Any) -> Ask:
    asked = CompletionRequest.model_validate({"prompt": "Once upon a time"} | body)
    known = running.served, Defaults.of(running), running.served.grammars()
    return asyncio.run(asking.completion(asked, *known))


def chat(running: RunningCluster, **body: Any) -> Ask:
    asked = ChatRequest.model_validate({"messages": HELLO} | body)
    known = running.served, Defaults.of(running), running.served.grammars()
    return asyncio.run(asking.chat(asked, *known))


# --- what is asked ----------------------------------------------------------------------------


def test_what_is_left_out_is_as_openai_says(running: RunningCluster) -> None:
    ask = completion(running)
    assert replace(ask.samplings[0], seed=0) == Sampling(temperature=1.0)
    assert (ask.n, ask.max_tokens, ask.stop) == (1, (16,), ())
    assert ask.eos == running.served.eos
    assert ask.samplings[0].seed != completion(running).samplings[0].seed
    ask = chat(running)
    assert ask.max_tokens == (100 - len(ask.prompts[0]),)
    assert ask.samplings[0].logprobs is None
    assert chat(running, logprobs=True).samplings[0].logprobs == 0


def test_unless_the_cluster_was_started_with_settings(running: RunningCluster) -> None:
    settings = (
        "cluster.stages=2",
        "verify=sample",
        "verify.temperature=0.5",
        "verify.seed=4",
        "decode.max_new_tokens=7",
        "decode.stop=[x]",
        "decode.ignore_eos=true",
    )
    warm = replace(running, overrides=settings)
    ask = completion(warm)
    assert ask.samplings == (Sampling(temperature=0.5, seed=4),)
    assert (ask.max_tokens, ask.stop, ask.eos) == ((7,), ("x",), ())
    ask = completion(warm, temperature=2, seed=5, max_tokens=8, stop="y", ignore_eos=False)
    assert ask.samplings == (Sampling(temperature=2.0, seed=5),)
    assert (ask.max_tokens, ask.stop, ask.eos) == ((8,), ("y",), running.served.eos)
    greedy = replace(running, overrides=("verify=greedy",))
    assert completion(greedy).samplings[0].temperature == 0


def test_every_field_arrives(running: RunningCluster) -> None:
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
    first = Sampling(0.5, 0, 0.9, 0.1, 1.1, 0.2, -0.2, ((7, -1.0),), MAX_SEED, 2, None, 3)
    # Another prompt does not change what a seed gives.
    assert ask.samplings == (first, replace(first, seed=0)) * 2
    assert [ask.prompt_of(i) for i in range(4)] == [(5, 6)] * 2 + [ask.prompts[1]] * 2
    assert (ask.max_tokens, ask.stop, ask.priority) == ((9, 9), ("a", "b"), -3)
    assert ask.eos == (*running.served.eos, 8)
    assert completion(running, echo=True, prompt=[[5, 6]]).texts == (
        running.served.tokenizer.decode([5, 6]),
    )


def test_a_prompt_is_told_of_as_far_as_any_field_asks(running: RunningCluster) -> None:
    def counts(**fields: Any) -> tuple[int | None, int | None, int | None]:
        ask = completion(running, prompt=[5, 6], **fields)
        return ask.samplings[0].logprobs, ask.samplings[0].prompt_logprobs, ask.prompt_logprobs

    assert counts(logprobs=2) == (2, None, None)
    assert counts(logprobs=2, echo=True) == (2, 2, None)
    assert counts(prompt_logprobs=0) == (None, 0, 0)
    assert counts(logprobs=2, echo=True, prompt_logprobs=5) == (2, 5, 5)
    assert chat(running, prompt_logprobs=3).samplings[0].prompt_logprobs == 3


def test_a_template_that_refuses_is_one_sentence(tmp_path: Path) -> None:
    target = Path(shutil.copytree(resource_dir("demo") / "target", tmp_path / "target"))
    (target / "chat_template.jinja").unlink()
    settings = json.loads((target / "tokenizer_config.json").read_text())
    for template, why in (("{{ raise_exception('no') }}", "TemplateError: no"), (None, "none")):
        settings["chat_template"] = template
        (target / "tokenizer_config.json").write_text(json.dumps(settings))
        served = ServedModel.of(decide(compose([f"model.target={target}", "source=suffix"])))
        with pytest.raises(ApiError, match=why) as refused:
            prompts.conversation(served, ChatRequest.model_validate({"messages": HELLO}).messages)
        assert (refused.value.status, refused.value.param) == (400, "messages")
        assert str(tmp_path) not in refused.value.message


# --- what is answered -------------------------------------------------------------------------


def test_tokens_that_are_parts_of_characters_have_their_bytes(running: RunningCluster) -> None:
    tokenizer = running.served.tokenizer
    ids = tuple(tokenizer.encode("é"))
    assert len(ids) == 2
    told = tuple(TokenLogprobs(-0.5, ((token, -0.5),)) for token in ids)
    piece = Piece(0, "é", ids, told, finish_reason="stop")

    shape = Completion(completion(running, logprobs=1), tokenizer, "demo")
    shape.take(piece)
    logprobs = shape.reply().model_dump()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["top_logprobs"] == [{"bytes:\\xc3": -0.5}, {"bytes:\\xa9": -0.5}]

    other = Chat(chat(running, logprobs=True, top_logprobs=1), tokenizer, "demo")
    chunk, end = (each.model_dump() for each in other.chunks(piece))
    content = chunk["choices"][0]["logprobs"]["content"]
    assert [token["bytes"] for token in content] == [[0xC3], [0xA9]]
    assert chunk["choices"][0]["delta"] == {"content": "é"}
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "stop")


def test_each_field_tells_as_much_of_the_prompt_as_it_asks(running: RunningCluster) -> None:
    tokenizer = running.served.tokenizer
    ask = completion(running, prompt=[5, 6], echo=True, logprobs=1, prompt_logprobs=2)
    told = TokenLogprobs(-3.0, ((7, -0.1), (8, -0.2)))
    piece = Piece(0, "x", (9,), (TokenLogprobs(-0.5, ((9, -0.5),)),), finish_reason="stop")
    names = [token_text(tokenizer, token) for token in range(10)]

    shape = Completion(ask, tokenizer, "demo")
    shape.take(Piece(0, "", scored=(told,)))
    shape.take(piece)
    choice = shape.reply().model_dump()["choices"][0]
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
    shape = Completion(completion(running, prompt=[5, 6], echo=True, logprobs=1), tokenizer, "demo")
    assert not [*shape.opening()]
    (shown,) = shape.chunks(Piece(0, "", scored=(told,)))
    assert shown.model_dump()["choices"][0]["text"] == tokenizer.decode([5, 6])
    assert shown.model_dump()["choices"][0]["logprobs"]["token_logprobs"] == [None, -3.0]
    (alone,) = Completion(
        completion(running, prompt=[5], echo=True, logprobs=1), tokenizer, "demo"
    ).opening()
    assert alone.model_dump()["choices"][0]["logprobs"]["token_logprobs"] == [None]


def test_what_can_never_be_is_a_number_all_the_same(running: RunningCluster) -> None:
    shape = Completion(completion(running, logprobs=0), running.served.tokenizer, "demo")
    shape.take(Piece(0, "a", (5,), (TokenLogprobs(float("-inf")),)))
    reply = json.loads(shape.reply().model_dump_json())
    assert reply["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


TEXTS = ("a", 'say "no"\n', "é\u2028😀", "\0", "</script>")


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("kind", [Chat, Completion])
def test_the_events_of_a_stream_are_its_chunks(
    running: RunningCluster, kind: type[Chat] | type[Completion], continuous: bool
) -> None:
    ask = chat(running, n=2) if kind is Chat else completion(running, n=2)
    options = {"usage": True, "continuous": continuous}
    as_json, as_models = (kind(ask, running.served.tokenizer, "demo", **options) for _ in range(2))
    as_models.id, as_models.created = as_json.id, as_json.created
    pieces = [Piece(i % 2, text, (i,)) for i, text in enumerate(TEXTS)]
    pieces += [Piece(0, ""), Piece(0, "b", (5,), finish_reason="stop"), Piece(1, "", (6,))]
    for piece in pieces:
        events = [json.loads(event) for event in as_json.events(piece)]
        assert events == [chunk.model_dump() for chunk in as_models.chunks(piece)]
    assert as_json.usage == as_models.usage


@pytest.mark.parametrize("kind", [Chat, Completion])
def test_what_was_in_kv_counts_once_for_a_prompt_with_several_answers(
    running: RunningCluster, kind: type[Chat] | type[Completion]
) -> None:
    ask = chat(running, n=2) if kind is Chat else completion(running, n=2)
    shape = kind(ask, running.served.tokenizer, "demo", usage=True)
    shape.take(Piece(0, "a", (5,)))
    assert "prompt_tokens_details" not in shape.usage.model_dump(), "it is not known yet"
    shape.take(Piece(1, "", finish_reason="stop", cached=9))
    shape.take(Piece(0, "", finish_reason="stop", cached=4))
    assert shape.usage.model_dump()["prompt_tokens_details"] == {"cached_tokens": 4}


def test_usage_is_told_as_often_as_was_asked(running: RunningCluster) -> None:
    ask = chat(running)
    for continuous in (False, True):
        shape = Chat(ask, running.served.tokenizer, "demo", usage=True, continuous=continuous)
        first, second = (
            next(iter(shape.chunks(Piece(0, text, ids)))).model_dump()["usage"]
            for text, ids in (("a", (5,)), ("b", (6, 7)))
        )
        (last,) = (each.model_dump() for each in shape.closing())
        prompt = len(ask.prompts[0])
        assert last["usage"]["completion_tokens"] == 3
        assert last["usage"]["total_tokens"] == prompt + 3
        if continuous:
            assert (first["completion_tokens"], second["completion_tokens"]) == (1, 3)
        else:
            assert first is second is None
    assert list(Chat(ask, running.served.tokenizer, "demo").closing()) == []
