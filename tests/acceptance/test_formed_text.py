"""Answers under twenty schemas: valid, and the same text however they are decoded.

Real Redis, real loops, the demo pair at temperature 1, so that the draft is often wrong; the ranks
are threads, and all requests are decoded at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import jsonschema
import pytest

from pipespec.controller import epochs
from pipespec.controller.client import Controller
from pipespec.controller.records import Accepted
from pipespec.controller.requests import RequestLog
from pipespec.controller.server import EmbeddedRedis
from pipespec.core import RELAXED, Sampling
from pipespec.engine import grammar, tokenizer
from pipespec.system.resources import resource_dir
from tests.helpers.log import accept, take
from tools.rig import cluster
from tools.rig.schemas import SCHEMAS

PROMPTS = Path(__file__).parent.parent / "data" / "prompts.jsonl"
FOLDER = resource_dir("demo")
TOKENIZER = tokenizer.load(FOLDER / "target")
EOS = 0
MOST = 250  # tokens of an answer
WAYS = {
    "1-root": ("cluster.stages=1", "feed=root"),
    "1-best_first": ("cluster.stages=1", "feed=best_first"),
    "4-root": ("cluster.stages=4", "feed=root"),
    "4-best_first": ("cluster.stages=4", "feed=best_first"),
    "4-level": ("cluster.stages=4", "feed=level", "feed.width=8", "feed.children=4"),
    "4-static_tree": ("cluster.stages=4", "feed=static_tree", "feed.shape=[1,3,1]"),
    "4-suffix": ("cluster.stages=4", "feed=best_first", "source=suffix"),
    "4-free": ("cluster.stages=4", "feed=best_first", "cluster.sync=free"),
    "4-groups": ("cluster.stages=4", "cluster.groups=2", "feed=level", "feed.width=8"),
}
ALWAYS = ("1-best_first", "4-level")
REFERENCE = "4-root"


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@cache
def prompts() -> list[list[int]]:
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    return [TOKENIZER.encode(text)[:24] for text in texts]


def asked(schema: str, seed: int, sampling: Sampling | None = None) -> dict[str, object]:
    """A request for an answer under a schema."""
    made = grammar.of_json_schema(SCHEMAS[schema])
    prompt = prompts()[(seed + len(schema)) % len(prompts())]
    drawn = sampling or Sampling(1.0, top_p=0.95, seed=seed, grammar=made)
    return {"prompt": prompt, "max_new_tokens": MOST, "eos": (EOS,), "sampling": drawn}


def decoded(
    redis: EmbeddedRedis, way: str, requests: Sequence[dict[str, object]]
) -> list[list[int]]:
    """What is answered; every answer has ended by itself."""
    deployment = cluster.make_deployment(FOLDER / "target", FOLDER / "draft", *WAYS[way])
    answers = cluster.decode(deployment, redis, requests)
    assert {reason for _, reason, _ in answers} == {"stop"}
    return [tokens for tokens, *_ in answers]


def check(schema: str, tokens: Sequence[int]) -> None:
    """An answer is JSON that its schema describes."""
    text = TOKENIZER.decode(tokens, skip_special_tokens=True)
    jsonschema.validate(json.loads(text), SCHEMAS[schema])


@pytest.fixture(scope="module")
def expected(redis: EmbeddedRedis, long: bool) -> tuple[list[dict[str, object]], list[list[int]]]:
    """What is asked, and the answers without any guess."""
    cases = [(name, seed) for name in SCHEMAS for seed in range(25 if long else 2)]
    requests = [asked(*case) for case in cases]
    answers = decoded(redis, REFERENCE, requests)
    for (schema, _), tokens in zip(cases, answers, strict=True):
        check(schema, tokens)
    assert len({*map(tuple, answers)}) > len(SCHEMAS)
    return requests, answers


@pytest.mark.parametrize(
    "way",
    [
        way if way in ALWAYS else pytest.param(way, marks=pytest.mark.long)
        for way in WAYS
        if way != REFERENCE
    ],
)
def test_every_way_to_decode_gives_the_same_valid_texts(redis, expected, way):
    requests, answers = expected
    assert decoded(redis, way, requests) == answers


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_a_new_epoch_goes_on_where_the_last_one_ended(redis, expected, share):
    requests, answers = (values[:: len(values) // 10] for values in expected)
    deployment = cluster.make_deployment(FOLDER / "target", FOLDER / "draft", *WAYS["4-level"])
    epoch = epochs.begin(redis.url, cluster.NAMESPACE)
    with RequestLog(redis.url, namespace=cluster.NAMESPACE, epoch=epoch) as log:
        numbers = [log.enqueue(**request) for request in requests]
        with Controller(redis.url, namespace=cluster.NAMESPACE, epoch=epoch, rank=0) as head:
            for number, request, answer in zip(numbers, requests, answers, strict=True):
                take(head)
                base, known = len(request["prompt"]), int(share * len(answer))
                accept(head, number, base, tuple(answer[:known]))
    epoch = epochs.begin(redis.url, cluster.NAMESPACE)
    with RequestLog(redis.url, namespace=cluster.NAMESPACE, epoch=epoch) as log:
        log.close_queue()
        cluster.serve(deployment, redis, epoch)
        for number, answer in zip(numbers, answers, strict=True):
            events = [event for event in log.stream(number) if isinstance(event, Accepted)]
            assert [token for event in events for token in event.tokens] == answer


def test_a_form_makes_text_faster(redis):
    """What must follow is guessed for certain: more tokens per step than without a form."""
    made = grammar.of_json_schema(SCHEMAS["nested"])
    rates = {}
    for name, sampling in (("free", Sampling()), ("formed", Sampling(grammar=made))):
        deployment = cluster.make_deployment(
            FOLDER / "target",
            FOLDER / "draft",
            *WAYS["4-best_first"],
            "feed.row_cost=0",
            "scheduler.max_num_seqs=1",
        )
        requests = [asked("nested", seed, sampling) | {"max_new_tokens": 60} for seed in range(4)]
        told = cluster.decode(deployment, redis, requests)
        tokens = sum(len(answer) for answer, *_ in told)
        rates[name] = tokens / sum(len(a) / stats["tokens_per_step"] for a, _, stats in told)
    assert rates["formed"] > rates["free"]


def test_a_lossy_answer_is_valid_too(redis):
    made = grammar.of_json_schema(SCHEMAS["object"])
    requests = [asked("object", 1, Sampling(grammar=made, acceptance=RELAXED))]
    (tokens,) = decoded(redis, "4-best_first", requests)
    check("object", tokens)
