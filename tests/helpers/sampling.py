"""Random logits, and a reference sampler: one row at a time, with everything sorted."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pipespec.core import SamplingParams, SequenceStart, TokenLogprobs
from pipespec.sampling.distribution import TokenCounts, adjust
from pipespec.sampling.draw import noise
from pipespec.sampling.grammar import Matcher
from pipespec.sampling.sampling_state import SamplingState
from pipespec.sampling.verifier import AcceptedPath, verify_batch
from pipespec.sampling.wire_format import pack
from pipespec.system.fair_thread import FairThread
from tests.helpers.grammar import compiled

VOCAB = 97


def allowed(scores: Tensor, sampling: SamplingParams) -> Tensor:
    """Which tokens may follow, bool `[vocab]`, of adjusted logits `[vocab]`."""
    scores = (scores - scores.max()) / (sampling.temperature or 1.0)
    kept = scores > -torch.inf
    if sampling.min_p > 0:
        kept &= scores >= math.log(sampling.min_p)
    falling = scores.sort(descending=True, stable=True)
    if 0 < sampling.top_k < len(scores):
        kept &= scores >= falling.values[sampling.top_k - 1]
    if sampling.top_p < 1:
        shares = scores.masked_fill(~kept, -torch.inf).softmax(0)[falling.indices]
        before = torch.cat((torch.zeros(1), shares.cumsum(0)[:-1]))
        kept[falling.indices[before >= sampling.top_p]] = False
    return kept


def sample(
    logits: Tensor, sampling: SamplingParams, position: int, counts: TokenCounts | None = None
) -> int:
    """The token that follows, from the target's logits `[vocab]`.

    Args:
        position: of the token in the text, prompt included.
        counts: of the text before it; needed if `sampling.has_penalties`.
    """
    scores = adjust(logits, sampling, counts)
    if sampling.temperature == 0:
        return int(scores.argmax())
    drawn = (scores - scores.max()) / sampling.temperature
    drawn += noise([sampling.seed], [position], torch.arange(len(scores))[None])[0]
    return int(drawn.masked_fill(~allowed(scores, sampling), -torch.inf).argmax())


def opened(
    params: SamplingParams,
    prompt: Sequence[int],
    answer: Sequence[int] = (),
    eos: tuple[int, ...] = (),
    matcher: Matcher | Exception | None = None,
) -> SamplingState:
    """The state of a sequence of which `answer` was decided before."""
    text = (*prompt, *answer)
    start = SequenceStart(1, 1, len(prompt), len(text), pack(params, eos))
    mine = SamplingState(
        start, None if matcher is None else lambda _: compiled(matcher), FairThread()
    )
    if mine.needs_text:
        mine.set_text(text)
    return mine


def decided(
    state: SamplingState,
    tip: int,
    nodes: Sequence[int],
    parents: Sequence[int],
    tokens: Sequence[int],
    logits: Tensor,
) -> tuple[list[int], list[TokenLogprobs]]:
    """The next tokens of a single sequence, and their log-probabilities."""
    path = AcceptedPath(tip, nodes, parents, tokens)
    verify_batch([(state, path)], logits)
    return path.tokens, path.logprobs


def some_logits(seed: int, size: int = VOCAB) -> Tensor:
    """Random logits `[size]`."""
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(size, generator=generator)


@torch.no_grad()
def plain_loop(
    target: Path, prompt: list[int], asked: SamplingParams, num_tokens: int
) -> list[int]:
    """The answer sampled by Hugging Face's forward over the whole text, one token at a time."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    answer: list[int] = []
    while len(answer) < num_tokens:
        text = prompt + answer
        logits = model(torch.tensor([text])).logits[0, -1]
        counts = TokenCounts(prompt, answer, len(logits), logits.device)
        answer.append(sample(logits, asked, len(text), counts))
    return answer
