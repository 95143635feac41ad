"""`pipespec serve`: a real server on a real cluster, asked by OpenAI's package and by raw HTTP."""

import re
import signal
import time
from typing import Any

import httpx2
import openai
import pytest
import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipespec.system.folders import resource_dir
from tests.helpers.sandbox import PATIENCE_S
from tests.helpers.serving import MODEL, NAME, serving
from tests.helpers.waiting import until
from tests.integration.serving.conftest import CONTEXT
from tools.rig import cluster

pytestmark = pytest.mark.slow
NUM_TOKENS = 16
PROMPTS = (
    "Once upon a time there was a king who",
    "The little girl ran out of the house and",
    "Tom has three apples and buys four more. How many",
)
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": NUM_TOKENS, "temperature": 0}
HELLO = [{"role": "user", "content": "Tell me a story"}]
LONG: dict[str, Any] = {"max_tokens": 400, "temperature": 0, "extra_body": {"ignore_eos": True}}


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


def test_greedy_tokens_equal_hugging_face(client, tokenizer, expected):
    for prompt, ids in zip(PROMPTS, expected, strict=True):
        for given in (prompt, tokenizer.encode(prompt)):
            told = client.completions.create(prompt=given, logprobs=0, **ASKED)
            logprobs = told.choices[0].logprobs
            assert ids_of(tokenizer, logprobs.tokens or []) == ids
            assert told.choices[0].text == tokenizer.decode(ids)
            assert told.usage.completion_tokens == len(ids)
            assert told.usage.prompt_tokens == len(tokenizer.encode(prompt))


def test_chat_equals_completion_of_the_rendered_template(client, tokenizer):
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


def test_streams_equal_whole_replies_in_valid_chunks(server, client):
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


def test_whole_replies_have_openais_types(server):
    body = ASKED | {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "n": 2}
    chat = strictly(ChatCompletion, server.http.post("/v1/chat/completions", json=body).json())
    assert all(len(token.top_logprobs) == 2 for token in chat.choices[1].logprobs.content)
    body = ASKED | {"prompt": PROMPTS[0], "logprobs": 2, "n": 2}
    told = strictly(Completion, server.http.post("/completions", json=body).json())
    assert all(len(likely) >= 2 for likely in told.choices[1].logprobs.top_logprobs)


@torch.no_grad()
def scored(ids: list[int]) -> tuple[torch.Tensor, list[float]]:
    """The target's log-probabilities after each token but the last, `[tokens - 1, vocab]`, and
    those of the tokens that follow, by Hugging Face."""
    model = AutoModelForCausalLM.from_pretrained(resource_dir("demo") / "target").float()
    values = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    return values, values.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1).tolist()


def test_logprobs_equal_hugging_face(server, client, tokenizer, expected):
    prompt = tokenizer.encode(PROMPTS[0])
    values, own = scored([*prompt, *expected[0]])
    told = client.completions.create(prompt=prompt, logprobs=3, **ASKED).choices[0].logprobs
    assert told.token_logprobs == pytest.approx(own[len(prompt) - 1 :], abs=1e-4)
    for top, best in zip(told.top_logprobs, values[len(prompt) - 1 :].topk(3).values, strict=True):
        assert sorted(top.values(), reverse=True)[:3] == pytest.approx(best.tolist(), abs=1e-4)
    text = tokenizer.decode(expected[0])
    starts = [
        text[at:].startswith(token)
        for at, token in zip(told.text_offset, told.tokens or [], strict=True)
    ]
    assert all(starts)

    # The prompt's own, longer than what the last stage looks at in one go.
    long = [*prompt, *expected[0]] * 3
    own = scored(long)[1]
    asked = {"prompt": long, "echo": True, "logprobs": 2} | ASKED
    whole = client.completions.create(**asked, extra_body={"prompt_logprobs": 1}).choices[0]
    assert whole.logprobs.token_logprobs[0] is None
    assert whole.logprobs.token_logprobs[1 : len(long)] == pytest.approx(own, abs=1e-4)
    assert whole.logprobs.text_offset == sorted(whole.logprobs.text_offset or [])
    assert len(whole.logprobs.tokens or []) == len(long) + NUM_TOKENS
    by_id = (whole.model_extra or {})["prompt_logprobs"]
    assert by_id[0] is None
    found = [each[str(token)]["logprob"] for each, token in zip(by_id[1:], long[1:], strict=True)]
    assert found == pytest.approx(own, abs=1e-4)
    alone = client.completions.create(**asked | {"max_tokens": 0})
    assert alone.usage.completion_tokens == 0
    assert alone.choices[0].text == tokenizer.decode(long)
    (shown, *_) = server.chunks("/v1/completions", asked)
    assert shown["choices"][0]["logprobs"] == alone.choices[0].logprobs.model_dump()


def test_a_prompt_of_exactly_the_context_is_scored(client, expected):
    prompt = (expected[0] * CONTEXT)[:CONTEXT]
    own = scored(prompt)[1]
    asked = {"echo": True, "logprobs": 1} | ASKED | {"max_tokens": 0}
    for prompts in (prompt, [prompt, prompt[1:]]):
        told = client.completions.create(prompt=prompts, **asked).choices[0]
        assert told.finish_reason == "length"
        assert told.logprobs.token_logprobs[1:] == pytest.approx(own, abs=1e-4)
    with pytest.raises(openai.BadRequestError, match=f"but the context holds {CONTEXT};"):
        client.completions.create(prompt=[*prompt, 5], **asked)


def test_disconnected_client_cancels_its_requests(server, client):
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


def test_models_and_tokenize_routes(server, client, tokenizer):
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


def test_cluster_metrics_count_the_requests(server, client, tokenizer):
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
        *("pipespec_decided_tokens_total", "pipespec_steps_total"),
        *("vllm:iteration_tokens_total_sum", "vllm:iteration_tokens_total_count"),
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
        *(f"vllm:request_{part}_time_seconds_count" for part in ("queue", "prefill", "inference")),
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
    assert fed > since["vllm:spec_decode_num_accepted_tokens_total"] > 0
    for part in ("queue", "prefill", "inference"):
        assert since[f"vllm:request_{part}_time_seconds_count"] == len(asked)
    until(lambda: 'pipespec_stage_busy_share{engine="0"' in server.http.get("/metrics").text)
    assert 0 < told("pipespec_stage_busy_share") < 2  # of two stages together


@pytest.mark.long
def test_shutdown_finishes_running_requests(place):
    with serving(place, "--on", NAME, "--limit", f"shutdown_timeout={PATIENCE_S}") as server:
        asked = LONG | {"max_tokens": 100}
        stream = server.openai().completions.create(prompt="a", model=MODEL, stream=True, **asked)
        pieces = iter(stream)
        next(pieces)
        server.process.terminate()
        assert [piece.choices[0].finish_reason for piece in pieces][-1] == "length"
        assert server.process.wait(PATIENCE_S) == 0


def test_ctrl_c_says_what_is_waited_for_and_a_second_one_ends_it(place):
    with serving(place, "--on", NAME) as ending:
        client, said = ending.openai(), ending.process.stderr
        stream = iter(client.completions.create(prompt="a", model=MODEL, stream=True, **LONG))
        next(stream)
        ending.process.send_signal(signal.SIGINT)
        line = re.escape("ending: open requests: 1, answered for 30 s at most; Ctrl-C again ends")
        assert re.match(line, said.readline())
        ending.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="The server is shutting down"):
            list(stream)
        assert ending.process.wait(10) == 0  # 0.7 s on a machine with nothing else
        assert said.read() == ""
