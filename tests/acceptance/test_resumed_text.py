"""A request that one epoch starts and another finishes has the text of an uninterrupted one.

The request log holds the first tokens of an answer, which an earlier epoch decided; the ranks of
the next epoch know only the log. They continue with the next token, wherever the border between the
epochs is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pipespec.cluster.deployment.deployment import Deployment
from pipespec.config import choices
from pipespec.controller import epoch_control
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.log_records import Accepted, Finished
from pipespec.controller.request_log import RequestLog
from pipespec.core import PromptLogprobs, SamplingParams, TokenLogprobs
from pipespec.system.folders import resource_dir
from tests.helpers import models
from tests.helpers.log import accept, head_of, take
from tests.helpers.proposers import proposer_overrides, write_truth
from tools.rig import cluster
from tools.rig.log import events_of, reports_of

NUM_TOKENS = 10
# How much of an answer the earlier epoch has decided.
BORDERS = (0, 1, 5, NUM_TOKENS - 1, NUM_TOKENS)
PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6), (5, 17, 3, 8, 120, 44))
SAMPLED = (
    SamplingParams(1.0, seed=1, prompt_logprobs=1),
    SamplingParams(
        1.2, min_p=0.05, repetition_penalty=1.3, presence_penalty=0.4, seed=2**63 - 1, logprobs=2
    ),
    SamplingParams(
        temperature=0.9,
        top_k=50,
        top_p=0.95,
        frequency_penalty=0.75,
        logit_bias=((5, 3.0), (17, -100.0)),
        seed=4,
        logprobs=0,
    ),
    SamplingParams(repetition_penalty=1.4, frequency_penalty=0.5, logprobs=1),  # greedy
)
# The target is its own draft, so that many draft tokens are accepted.
SHAPES = {
    "three": ("cluster.stages=3", "policy.children=4"),
    "level": ("cluster.stages=4", "policy=level", "policy.children=4"),
    "chunks": ("cluster.stages=2", "decode.prefill_chunk=5"),  # the border lies within one
    "two": ("cluster.stages=2", "policy.children=4"),
    "no speculation": ("cluster.stages=2", "policy=root"),
}


@dataclass(frozen=True)
class Answer:
    """The answer of a request, from its events."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    reason: str
    of_prompt: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Started:
    """A request, and what an earlier epoch has decided of its answer."""

    fields: dict[str, Any]
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    of_prompt: Sequence[TokenLogprobs] = ()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.build("llama", tmp_path_factory.mktemp("tiny"))


def resume(deployment: Deployment, redis: EmbeddedRedis, requests: Sequence[Started]) -> list[int]:
    """Lets one epoch leave the requests as they are and another finish them; their ids."""
    with head_of(redis, cluster.NAMESPACE) as earlier:
        numbers = [earlier.enqueue(**asked.fields) for asked in requests]
        for number, asked in zip(numbers, requests, strict=True):
            take(earlier)
            base = len(asked.fields["prompt"])
            if asked.of_prompt:
                earlier.add_prompt_logprobs(number, PromptLogprobs(1, tuple(asked.of_prompt)))
            # In portions, as verdicts bring them.
            borders = [0, *range(1, len(asked.tokens), 3), len(asked.tokens)]
            for start, end in pairwise(borders):
                new = slice(start, end)
                accept(earlier, number, base + start, asked.tokens[new], asked.logprobs[new])
    second = epoch_control.begin_epoch(redis.url, cluster.NAMESPACE)
    with RequestLog(redis.url, namespace=cluster.NAMESPACE, epoch=second) as log:
        log.close_queue()
        cluster.serve(deployment, redis, second)
    return numbers


def answer_of(redis: EmbeddedRedis, number: int, end: int) -> Answer:
    """The answer that a client reads from the start, behind a prompt of so many tokens; each
    position comes once."""
    *events, finished = events_of(redis.url, cluster.NAMESPACE, number)
    assert isinstance(finished, Finished)
    scored = [event for event in events if isinstance(event, PromptLogprobs)]
    accepted = events[len(scored) :]
    at = 1
    for event in scored:
        assert event.base == at
        at += len(event.logprobs)
    for event in accepted:
        assert isinstance(event, Accepted)
        assert event.base == end
        end += len(event.tokens)
    return Answer(
        tuple(token for event in accepted for token in event.tokens),
        tuple(logprobs for event in accepted for logprobs in event.logprobs),
        finished.reason,
        tuple(logprobs for event in scored for logprobs in event.logprobs),
    )


def resumed(
    deployment: Deployment, redis: EmbeddedRedis, requests: Sequence[Started]
) -> list[Answer]:
    numbers = resume(deployment, redis, requests)
    lengths = [len(started.fields["prompt"]) for started in requests]
    return [answer_of(redis, *each) for each in zip(numbers, lengths, strict=True)]


@pytest.fixture(scope="module")
def greedy(tiny: Path) -> list[tuple[int, ...]]:
    """The answers of Hugging Face."""
    return [tuple(answer) for answer in cluster.reference(tiny, PROMPTS, NUM_TOKENS)]


def begun(expected: Sequence[Sequence[int]]) -> list[Started]:
    """Every greedy request with every border."""
    return [
        Started({"prompt": prompt, "max_new_tokens": NUM_TOKENS}, answer[:border])
        for prompt, answer in zip(PROMPTS, expected, strict=True)
        for border in BORDERS
    ]


@pytest.mark.parametrize(
    ("shape", "proposer"),
    [
        *((shape, "draft_model") for shape in SHAPES),
        *(
            pytest.param("two", name, marks=[] if name == "hybrid" else [pytest.mark.long])
            for name in choices.options("proposer")
        ),
    ],
)
def test_resumed_greedy_text_equals_hugging_face(tiny, redis, greedy, shape, proposer, tmp_path):
    truth = tmp_path / "truth.jsonl"
    write_truth(truth, PROMPTS, greedy)
    chosen = proposer_overrides(proposer, truth=truth, target=tiny)
    deployment = cluster.make_deployment(tiny, tiny, *SHAPES[shape], *chosen)
    assert resumed(deployment, redis, begun(greedy)) == [
        Answer(answer, (), "length") for answer in greedy for _ in BORDERS
    ]


@pytest.mark.parametrize("shape", ["three", pytest.param("chunks", marks=pytest.mark.long)])
def test_resumed_text_draws_the_same_tokens(tiny, redis, shape):
    """`test_sampled_text.py` has what an uninterrupted request draws."""
    deployment = cluster.make_deployment(tiny, tiny, *SHAPES[shape])
    fields = [
        {"prompt": PROMPTS[i % len(PROMPTS)], "max_new_tokens": NUM_TOKENS, "sampling": asked}
        for i, asked in enumerate(SAMPLED)
    ]
    whole = resumed(deployment, redis, list(map(Started, fields)))
    assert len({answer.tokens for answer in whole}) == len(whole)
    requests = [
        Started(
            asked,
            answer.tokens[:border],
            answer.logprobs[:border],
            # The whole prompt was scored before the answer started.
            answer.of_prompt[: None if border else 3],
        )
        for asked, answer in zip(fields, whole, strict=True)
        for border in BORDERS
    ]
    answers = resumed(deployment, redis, requests)
    expected = [answer for answer in whole for _ in BORDERS]
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    for found, wanted, asked in zip(answers, expected, requests, strict=True):
        sampling, prompt = asked.fields["sampling"], asked.fields["prompt"]
        count = 0 if sampling.logprobs is None else NUM_TOKENS
        assert len(found.logprobs) == count
        assert len(found.of_prompt) == (sampling.prompt_logprobs is not None) * (len(prompt) - 1)
        pairs = [(found.logprobs, wanted.logprobs), (found.of_prompt, wanted.of_prompt)]
        for mine, theirs in (pair for each in pairs for pair in zip(*each, strict=True)):
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
            assert numbers_of(mine) == pytest.approx(numbers_of(theirs), abs=1e-4)


def numbers_of(logprobs: TokenLogprobs) -> list[float]:
    return [logprobs.logprob, *(value for _, value in logprobs.top)]


def test_stop_string_across_the_border_of_a_resumed_text_is_found(redis):
    """Every border: before the string, at every token within it, and after it."""
    folder = resource_dir("demo")
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    prompt = tuple(tokenizer.encode("In the forest"))
    (answer,) = cluster.reference(folder / "target", [prompt], 12)
    texts = [tokenizer.decode(answer[:count]) for count in range(len(answer) + 1)]
    # It begins within one token and ends within another.
    stop = texts[8][len(texts[3]) + 3 : -1]
    assert stop == "son was to b"
    length = next(count for count, text in enumerate(texts) if stop in text)
    assert length == 8
    deployment = cluster.make_deployment(folder / "target", folder / "draft", "cluster.stages=2")
    fields = {"prompt": prompt, "max_new_tokens": 12, "stop": ("no such text", stop)}
    requests = [Started(fields, answer[:border]) for border in range(length + 1)]
    assert resumed(deployment, redis, requests) == [
        Answer(tuple(answer[:length]), (), "stop") for _ in requests
    ]


def test_every_rank_reports_a_resumed_request_and_the_head_its_replayed_tokens(tiny, redis, greedy):
    """Also for requests whose answer was complete but not yet ended."""
    deployment = cluster.make_deployment(tiny, tiny, "cluster.stages=2")
    fields = {"prompt": PROMPTS[0], "max_new_tokens": NUM_TOKENS}
    borders = (NUM_TOKENS, NUM_TOKENS, 3, NUM_TOKENS, 0, NUM_TOKENS)
    numbers = resume(deployment, redis, [Started(fields, greedy[0][:border]) for border in borders])
    reports = [
        list(reports_of(redis.url, cluster.NAMESPACE, n, deployment.num_ranks, timeout=1).values())
        for n in numbers
    ]
    for border, (head, *stages) in zip(borders, reports, strict=True):
        assert head["replayed"] == border
        assert len(head["token_ns"]) == NUM_TOKENS
        # The last token is never a row.
        known = len(PROMPTS[0]) + NUM_TOKENS - 1
        assert [stage["rank"] for stage in stages] == [1, 2]
        for stage in stages:
            assert stage["rows"] == 0 if border == NUM_TOKENS else stage["rows"] >= known
