"""From the target's logits to a token (docs/sampling.md).

The order is that of vLLM, and of Transformers wherever the two agree:

    logit bias, repetition, frequency and presence penalty     also when decoding greedily
    temperature, min-p, top-k, top-p                           what is left is drawn from
    draw                                                       keyed by (seed, position)

The draw adds to each log-probability a Gumbel noise and takes the maximum, which is a draw
from the distribution (Gumbel-max). The noise of token i at a position is the i-th number of
a stream that starts at a hash of seed and position: no state is kept, so a draw is the same
whichever rank, batch or run it happens in. Unlike the inverse of a cumulative sum, where one
token's rounding error moves all later tokens, the maximum changes only where two tokens come
within that error of each other; so the few last bits by which logits depend on the shape of a
batch hardly ever change a text.

Everything is float64, and pure: no generator, global or other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pipespec.core import Sampling, TokenLogprobs
from pipespec.errors import ConfigError

MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
# Most probable tokens among which top-p looks before it sorts them all.
SORTED_FIRST = 1024


# --- limits -----------------------------------------------------------------------------------


def check_sampling(sampling: Sampling, section: str = "verify") -> None:
    """Raise ConfigError if a value is out of range, naming it as `section`.<field>."""
    s = sampling

    def refuse(name: str, value: object, must: str) -> None:
        raise ConfigError(f"{section}.{name} is {value}, but must be {must}.")

    if not (math.isfinite(s.temperature) and s.temperature >= 0):
        refuse("temperature", s.temperature, "0 (greedy) or more")
    if s.top_k < 0:
        refuse("top_k", s.top_k, "a whole number from 1 up, or 0 for all tokens")
    if not 0 < s.top_p <= 1:
        refuse("top_p", s.top_p, "more than 0 and at most 1")
    if not 0 <= s.min_p <= 1:
        refuse("min_p", s.min_p, "from 0 to 1")
    if not (math.isfinite(s.repetition_penalty) and s.repetition_penalty > 0):
        refuse("repetition_penalty", s.repetition_penalty, "more than 0 (1 changes nothing)")
    for name in ("presence_penalty", "frequency_penalty"):
        if not -MAX_PENALTY <= getattr(s, name) <= MAX_PENALTY:
            refuse(name, getattr(s, name), f"from {-MAX_PENALTY:g} to {MAX_PENALTY:g}")
    for token, bias in s.logit_bias:
        if token < 0 or not -MAX_BIAS <= bias <= MAX_BIAS:
            limits = f"a token id and a bias from {-MAX_BIAS:g} to {MAX_BIAS:g}"
            refuse("logit_bias", f"{token}:{bias:g}", limits)
    if not 0 <= s.seed <= MAX_SEED:
        refuse("seed", s.seed, f"from 0 to {MAX_SEED}")
    if s.logprobs is not None and not 0 <= s.logprobs <= MAX_LOGPROBS:
        refuse("logprobs", s.logprobs, f"from 0 to {MAX_LOGPROBS}, or null for none")
    if s.accept_top < 0:
        refuse("accept_top", s.accept_top, "a whole number from 1 up")
    if not 0 <= s.accept_ratio <= 1:
        refuse("accept_ratio", s.accept_ratio, "from 0 to 1")


def check_vocabulary(sampling: Sampling, vocab_size: int, section: str = "verify") -> None:
    """Raise ConfigError if a biased token is not in the target's vocabulary."""
    for token, _ in sampling.logit_bias:
        if token >= vocab_size:
            raise ConfigError(
                f"{section}.logit_bias names the token {token}, but the target's vocabulary ends "
                f"at {vocab_size - 1}."
            )


# --- logits to a distribution -----------------------------------------------------------------


class Tally:
    """Which tokens stand in a text, as the penalties want to know it.

    `seen` is bool `[vocab]`: in the prompt or the answer; `counts` is int64 `[vocab]`: how
    often in the answer.
    """

    def __init__(
        self, prompt: Sequence[int], answer: Sequence[int], vocab_size: int, device: torch.device
    ):
        counts = torch.bincount(torch.tensor(answer, dtype=torch.int64), minlength=vocab_size)
        self.counts = counts.to(device)
        self.seen = self.counts > 0
        self.seen[torch.tensor(prompt, dtype=torch.int64, device=device)] = True

    def append(self, token: int) -> None:
        """The answer goes on with `token`."""
        self.counts[token] += 1
        self.seen[token] = True


def adjust(logits: Tensor, sampling: Sampling, tally: Tally | None) -> Tensor:
    """The logits `[vocab]` after bias and penalties, float64.

    `tally` is the text before; it may be None if `sampling.penalises` is False.
    """
    scores = logits.to(torch.float64, copy=True)
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        scores.index_add_(
            0,
            torch.tensor(ids, device=scores.device),
            torch.tensor(biases, dtype=torch.float64, device=scores.device),
        )
    if sampling.penalises:
        assert tally is not None
        penalty = sampling.repetition_penalty
        penalised = torch.where(scores > 0, scores / penalty, scores * penalty)
        scores = torch.where(tally.seen, penalised, scores)
        scores -= sampling.frequency_penalty * tally.counts
        scores -= sampling.presence_penalty * (tally.counts > 0)
    return scores


def distribution(scores: Tensor, sampling: Sampling) -> Tensor:
    """The log-probabilities `[vocab]` that a token is drawn with; -inf: never.

    `scores` are adjusted logits. At temperature 0 it is the distribution at temperature 1,
    from which nothing is drawn.
    """
    scores = (scores - scores.max()) / (sampling.temperature or 1.0)
    kept = scores > -torch.inf
    if sampling.min_p > 0:
        kept &= scores >= math.log(sampling.min_p)
    if 0 < sampling.top_k < len(scores):
        kept &= scores >= scores.topk(sampling.top_k).values[-1]  # equals of the last one stay
    if sampling.top_p < 1:
        kept = _nucleus(scores, kept, sampling.top_p)
    return scores.masked_fill(~kept, -torch.inf).log_softmax(0)


def _nucleus(scores: Tensor, kept: Tensor, top_p: float) -> Tensor:
    """Of the tokens `kept` (bool `[vocab]`), the most probable that together have `top_p`."""
    probabilities = scores.masked_fill(~kept, -torch.inf).softmax(0)
    head = scores.topk(min(SORTED_FIRST, len(scores))).values[-1]
    # Sorting a large vocabulary takes longer than all else; its head is nearly always enough.
    for candidates in (kept & (scores >= head), kept):
        ids = candidates.nonzero().squeeze(1)
        ids = ids[scores[ids].sort(descending=True, stable=True).indices]
        reached = probabilities[ids].cumsum(0)
        if reached[-1] >= top_p:
            break
    before = reached.roll(1)
    before[0] = 0.0
    chosen = torch.zeros_like(kept)
    chosen[ids[before < top_p]] = True
    return chosen


# --- the draw ---------------------------------------------------------------------------------

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
# Uniforms are odd multiples of 2^-53, all exact in float64 and strictly between 0 and 1.
_UNIFORM_BITS = 52


def _mix(value: int) -> int:
    """The output function of SplitMix64 (Steele, Lea and Flood 2014)."""
    for shift, factor in _MIX:
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> _LAST_SHIFT)


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned one."""
    return value - 2**64 if value >= 2**63 else value


def _shift(values: Tensor, by: int) -> Tensor:
    """Shift right without sign, int64."""
    return (values >> by) & (2 ** (64 - by) - 1)


def uniforms(seed: int, position: int, ids: Tensor) -> Tensor:
    """Numbers `ids` (int64 `[n]`) of the stream of (seed, position): float64 `[n]` in (0, 1).

    The stream is SplitMix64 from a state that is a hash of both.
    """
    state = _mix((_mix((seed + _GOLDEN) & _MASK) + (position + 1) * _GOLDEN) & _MASK)
    values = ids * _signed(_GOLDEN) + _signed((state + _GOLDEN) & _MASK)  # wraps, as it should
    for shift, factor in _MIX:
        values = (values ^ _shift(values, shift)) * _signed(factor)
    values ^= _shift(values, _LAST_SHIFT)
    return (_shift(values, 64 - _UNIFORM_BITS).double() + 0.5) * 2.0**-_UNIFORM_BITS


def draw(logprobs: Tensor, seed: int, position: int) -> int:
    """A token from the distribution `logprobs` `[vocab]`; `position` is where it will stand."""
    ids = torch.isfinite(logprobs).nonzero().squeeze(1)
    noise = -torch.log(-torch.log(uniforms(seed, position, ids)))
    return int(ids[(logprobs[ids] + noise).argmax()])


def sample(logits: Tensor, sampling: Sampling, position: int, tally: Tally | None = None) -> int:
    """The token that follows, from the target's logits `[vocab]`.

    Args:
        position: of the token: how many tokens stand before it, the prompt's included.
        tally: of the text before it; needed if `sampling.penalises`.
    """
    scores = adjust(logits, sampling, tally)
    if sampling.temperature == 0:
        return int(scores.argmax())
    return draw(distribution(scores, sampling), sampling.seed, position)


def logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """The log-probabilities of `token` and of the `count` most probable tokens, in the
    target's own distribution: before bias, penalties, temperature and cut-offs."""
    values = logits.to(torch.float64).log_softmax(0)
    best = values.topk(min(count, len(values)))
    top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprobs(float(values[token]), tuple(t for t in top if math.isfinite(t[1])))
