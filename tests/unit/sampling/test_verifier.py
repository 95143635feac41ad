"""The tokens that the last stage accepts, given the logits of a batch."""

from functools import partial

import numpy as np
import pytest
import torch

from pipespec.core import RELAXED, DraftTokens, SamplingParams, SequenceStart, TokenLogprobs
from pipespec.sampling import wire_format
from pipespec.sampling.distribution import TokenCounts, logprobs
from pipespec.sampling.params import SamplingConfig
from pipespec.sampling.sampling_state import SamplingState
from pipespec.sampling.verifier import AcceptedPath, verify_batch
from tests.helpers.sampling import decided, sample
from tests.helpers.sampling import opened as opened_state

VOCAB = 6
PROMPT = (1, 2)
TIP = 1
CPU = torch.device("cpu")


opened = partial(opened_state, prompt=PROMPT)


def chain(*draft_tokens: int) -> tuple[list[int], list[int], list[int]]:
    """The tip and a chain of draft tokens below it, as nodes, parents and tokens."""
    nodes = [TIP, *range(10, 10 + len(draft_tokens))]
    return nodes, [0, *nodes[:-1]], [PROMPT[-1], *draft_tokens]


def expected_text(params: SamplingParams, rows: torch.Tensor) -> list[int]:
    """The text of single draws, with new token counts for each."""
    answer: list[int] = []
    for logits in rows:
        counts = TokenCounts(PROMPT, answer, VOCAB, CPU)
        answer.append(sample(logits, params, len(PROMPT) + len(answer), counts))
    return answer


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(1.0, seed=3),
        SamplingParams(0.0, repetition_penalty=5.0, logprobs=1),
        SamplingParams(1.2, 4, 0.9, 0.01, 1.5, 0.5, 1.5, ((3, 1.0),), seed=5, logprobs=0),
    ],
)
def test_verified_text_equals_single_draws_however_batches_divide_it(params):
    rows = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1))
    text = expected_text(params, rows)
    for width in (1, 2, 3, 8):
        mine = opened(params)
        said: list[int] = []
        while len(said) < len(text):
            part = text[len(said) : len(said) + width]
            nodes, parents, draft_tokens = chain(*part[:-1])
            logits = rows[len(said) : len(said) + len(part)]
            tokens, reports = decided(mine, TIP, nodes, parents, draft_tokens, logits)
            assert len(reports) == (0 if params.logprobs is None else len(tokens))
            said += tokens
            assert mine.length == len(PROMPT) + len(said)
        assert said == text


def test_sequences_verified_together_get_the_tokens_they_get_alone() -> None:
    """Of any kind, with accepted and rejected draft tokens."""
    kinds = [
        SamplingParams(),
        SamplingParams(1.0, seed=3, logprobs=2),
        SamplingParams(0.7, 4, 0.9, seed=4),
        SamplingParams(presence_penalty=2.0, logprobs=0),
        SamplingParams(1.5, repetition_penalty=1.5, logit_bias=((3, 1.0),), seed=5),
        SamplingParams(min_tokens=3),
        SamplingParams(acceptance=RELAXED),
    ]
    rows = torch.randn(len(kinds), 8, VOCAB, generator=torch.Generator().manual_seed(7))
    alone, parts = [], []
    for kind, logits in zip(kinds, rows, strict=True):
        text = expected_text(kind, logits)
        nodes, parents, draft_tokens = chain(*text[: len(parts) % 4], 0, *text[:2])
        size = len(nodes)
        mine = opened(kind, eos=(1,))
        mine.add_draft_tokens(draft_step(0, {nodes[1]: {2: -1.0}}), since=0)
        alone.append(decided(mine, TIP, nodes, parents, draft_tokens, logits[:size]))
        again = opened(kind, eos=(1,))
        again.add_draft_tokens(draft_step(0, {nodes[1]: {2: -1.0}}), since=0)
        parts.append((again, AcceptedPath(TIP, nodes, parents, draft_tokens)))
        assert again.length == len(PROMPT) < mine.length
    sizes = [len(path.nodes) for _, path in parts]
    verify_batch(
        parts, torch.cat([logits[:size] for logits, size in zip(rows, sizes, strict=True)])
    )
    assert [(path.tokens, path.logprobs) for _, path in parts] == alone
    assert {len(tokens) for tokens, _ in alone} > {1, 2, 3}


def test_prompt_logprobs_do_not_depend_on_how_batches_divide_the_prompt():
    prompt = (3, 0, 5, 2, 2)
    rows = torch.randn(len(prompt) + 1, VOCAB, generator=torch.Generator().manual_seed(2))
    expected = logprobs(rows[: len(prompt) - 1], prompt[1:], 2)
    terms_ = wire_format.pack(SamplingParams(prompt_logprobs=2), ())
    for width in (1, 2, 3, 5):
        # One token was decided before: it is none of the prompt's.
        mine = SamplingState(SequenceStart(1, 1, len(prompt), len(prompt) + 1, terms_))
        found: list[TokenLogprobs] = []
        while mine.num_unscored:
            at = len(prompt) - mine.num_unscored
            part = slice(at, min(at + width, len(prompt)))
            told = mine.score_prompt(prompt[part], rows[part])
            assert told.base == len(found) + 1
            found += told.logprobs
        assert found == expected
    assert opened(SamplingParams(logprobs=2)).num_unscored == 0


def test_sampling_continues_after_a_resumed_answer():
    params = SamplingParams(1.0, presence_penalty=2.0, seed=2)
    rows = torch.zeros(6, VOCAB)
    text = expected_text(params, rows)
    successor = opened(params, answer=text[:4])
    nodes, parents, draft_tokens = chain(text[4])
    assert decided(successor, TIP, nodes, parents, draft_tokens, rows[4:])[0] == text[4:]


def test_rejected_draft_token_ends_the_path_and_does_not_count_for_penalties():
    params = {"temperature": 0.0, "frequency_penalty": 2.0}
    nodes, parents, draft_tokens = chain(5, 5, 5)
    logits = torch.tensor([[0, 0, 0, 4.0, 3.0, 0]] * 4)
    mine = opened(SamplingParams(**params))
    assert decided(mine, TIP, nodes, parents, draft_tokens, logits)[0] == [3]
    assert decided(mine, TIP, [TIP], [0], [3], logits[:1])[0] == [4]  # 4 - 2 < 3
    assert mine.length == len(PROMPT) + 2


# Of probability .47, .43, .06, .03, .00, .00.
LOGITS = torch.tensor([5.0, 4.9, 3.0, 2.2, -9.0, -9.0])


def after_tip(
    spec: SamplingConfig, draft_tokens: dict[int, float], *, eos: tuple[int, ...] = ()
) -> int:
    """The token after the tip, whose draft tokens have these log-probabilities."""
    mine = opened(spec.params(0), eos=eos)
    mine.add_draft_tokens(draft_step(0, dict.fromkeys([TIP], draft_tokens)), since=0)
    return decided(mine, TIP, [TIP], [0], [PROMPT[-1]], LOGITS[None])[0][0]


def draft_step(step: int, below: dict[int, dict[int, float]]) -> DraftTokens:
    rows = [
        (node, *draft) for node, draft_tokens in below.items() for draft in draft_tokens.items()
    ]
    parents, tokens, logps = zip(*rows, strict=True) if rows else ((), (), ())
    return DraftTokens(step, np.array(parents, int), np.array(tokens, int), np.array(logps, float))


@pytest.mark.parametrize(
    ("draft_tokens", "eos", "expected"),
    [
        ({1: -3.0, 2: -0.1}, (), 1),  # the most probable to the target, whatever the draft states
        ({4: -0.1}, (), 4),  # however improbable it is
        ({4: -0.1}, (3,), 3),  # the end of the text is always a candidate
        ({1: -0.1}, (3, 99), 1),  # 99: no token of this vocabulary
        ({}, (3,), 0),  # no draft tokens: the target's own token
    ],
)
def test_relaxed_takes_the_draft_token_most_probable_to_the_target(draft_tokens, eos, expected):
    assert after_tip(SamplingConfig(acceptance="relaxed"), draft_tokens, eos=eos) == expected
    if draft_tokens:  # whatever would be drawn
        assert {
            after_tip(
                SamplingConfig(temperature=1, acceptance="relaxed", seed=s), draft_tokens, eos=eos
            )
            for s in range(9)
        } == {expected}


@pytest.mark.parametrize(
    ("draft_tokens", "eos", "expected"),
    [
        ({0: -3.0, 1: -0.1}, (), 1),  # both within .9: the most probable to the draft
        ({0: -3.0, 3: -0.1}, (), 0),  # 3 is outside
        ({3: -0.1, 4: -0.1}, (), 0),  # none is within: the target's own token
        ({}, (1,), 0),
        ({0: -3.0}, (1,), 1),  # the end of the text, with the target's probability
        ({0: -0.2}, (1,), 0),
        ({0: -0.2}, (3, 99), 0),  # but not from outside
    ],
)
def test_strict_takes_the_draft_token_in_the_top_p_of_the_draft(draft_tokens, eos, expected):
    spec = SamplingConfig(acceptance="strict", top_p=0.85)
    assert after_tip(spec, draft_tokens, eos=eos) == expected
    if draft_tokens.keys() & {0, 1}:
        drawn = {
            after_tip(
                SamplingConfig(temperature=1, acceptance="strict", seed=s, top_p=0.85),
                draft_tokens,
                eos=eos,
            )
            for s in range(9)
        }
        assert drawn == {expected}


def test_strict_draws_where_there_are_no_draft_tokens():
    assert {
        after_tip(SamplingConfig(temperature=1, acceptance="strict", seed=seed, top_p=0.9), {})
        for seed in range(20)
    } == {0, 1}


def test_draft_tokens_are_dropped_once_their_step_is_decided():
    mine = opened(SamplingParams(acceptance=RELAXED))
    for step in range(100):
        mine.add_draft_tokens(draft_step(step, {step: {2: -1.0}}), since=step - 3)
    assert decided(mine, 99, [99], [98], [2], LOGITS[None])[0] == [2]
    assert decided(mine, 90, [90], [89], [2], LOGITS[None])[0] == [0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_does_not_end_before_min_tokens(temperature: float) -> None:
    """Also after a resumed answer."""
    ends = 3
    likes_to_end = torch.zeros(4, VOCAB).index_fill_(1, torch.tensor([ends]), 50.0)
    params = SamplingParams(temperature, seed=1, min_tokens=2)
    for answer, free in (((), 2), ((5,), 1), ((5, 5), 0)):
        mine = opened(params, answer=answer, eos=(ends, 99))
        found = []
        for row in likes_to_end:
            tokens, _ = decided(mine, TIP, [TIP], [0], [PROMPT[-1]], row[None])
            found += tokens
        assert [token == ends for token in found] == [i >= free for i in range(4)]


def test_lossy_rule_does_not_end_the_text_before_min_tokens() -> None:
    params = SamplingParams(min_tokens=1, acceptance=RELAXED)
    mine = opened(params, eos=(0,))
    mine.add_draft_tokens(draft_step(0, {TIP: {0: -0.1}}), since=0)
    assert decided(mine, TIP, [TIP], [0], [PROMPT[-1]], LOGITS[None])[0] == [1]
