"""Structured output under twenty schemas: valid, and the same text with every policy."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import jsonschema
import pytest

from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.core import RELAXED, SamplingParams
from pipespec.engine.checkpoint import tokenizer
from pipespec.engine.llguidance_backend import grammar_from_json_schema
from pipespec.system.folders import resource_dir
from tests.helpers.proposers import POLICIES
from tools.rig import cluster
from tools.rig.schemas import SCHEMAS

PROMPTS = Path(__file__).parent.parent / "data" / "prompts.jsonl"
FOLDER = resource_dir("demo")
TOKENIZER = tokenizer.load(FOLDER / "target")
EOS = 0
MOST = 250  # tokens of an answer
SETTINGS = {
    "1-root": ("cluster.stages=1", "policy=root"),
    "1-best_first": ("cluster.stages=1", "policy=best_first"),
    **{f"4-{policy}": ("cluster.stages=4", *given) for policy, given in POLICIES.items()},
    "4-suffix": ("cluster.stages=4", "policy=best_first", "proposer=suffix"),
}
ALWAYS = ("1-best_first",)
REFERENCE = "4-root"


@cache
def prompts() -> list[list[int]]:
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    return [TOKENIZER.encode(text)[:24] for text in texts]


def asked(schema: str, seed: int, sampling: SamplingParams | None = None) -> dict[str, object]:
    """A request for an answer under a schema."""
    made = grammar_from_json_schema(SCHEMAS[schema])
    prompt = prompts()[(seed + len(schema)) % len(prompts())]
    drawn = sampling or SamplingParams(1.0, top_p=0.95, seed=seed, grammar=made)
    return {"prompt": prompt, "max_new_tokens": MOST, "eos": (EOS,), "sampling": drawn}


def decoded(
    redis: EmbeddedRedis, settings: str, requests: Sequence[dict[str, object]]
) -> list[list[int]]:
    """The answers, each of which has ended by itself."""
    deployment = cluster.make_deployment(FOLDER / "target", FOLDER / "draft", *SETTINGS[settings])
    answers = cluster.decode(deployment, redis, requests)
    assert {reason for _, reason, _ in answers} == {"stop"}
    return [tokens for tokens, *_ in answers]


def check(schema: str, tokens: Sequence[int]) -> None:
    """An answer is JSON that its schema describes."""
    text = TOKENIZER.decode(tokens, skip_special_tokens=True)
    jsonschema.validate(json.loads(text), SCHEMAS[schema])


@pytest.fixture(scope="module")
def expected(
    redis_server: EmbeddedRedis, long: bool
) -> tuple[list[dict[str, object]], list[list[int]]]:
    """The requests, and their answers without speculation."""
    cases = [(name, seed) for name in SCHEMAS for seed in range(25 if long else 1)]
    requests = [asked(*case) for case in cases]
    answers = decoded(redis_server, REFERENCE, requests)
    for (schema, _), tokens in zip(cases, answers, strict=True):
        check(schema, tokens)
    assert len({*map(tuple, answers)}) > len(cases) / 2
    return requests, answers


@pytest.mark.parametrize(
    "settings",
    [
        settings if settings in ALWAYS else pytest.param(settings, marks=pytest.mark.long)
        for settings in SETTINGS
        if settings != REFERENCE
    ],
)
def test_every_policy_gives_the_same_valid_structured_output(redis, expected, settings):
    requests, answers = expected
    assert decoded(redis, settings, requests) == answers


def test_lossy_structured_output_is_valid(redis):
    made = grammar_from_json_schema(SCHEMAS["object"])
    requests = [asked("object", 1, SamplingParams(grammar=made, acceptance=RELAXED))]
    (tokens,) = decoded(redis, "4-best_first", requests)
    check("object", tokens)
