"""Sampling settings: the section `sampling`, and the ranges of its values."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields

from pipespec.core import EXACT, RELAXED, STRICT, SamplingParams
from pipespec.errors import ConfigError
from pipespec.settings import check_settings, setting

ACCEPTANCES = (EXACT, RELAXED, STRICT)
MAX_PENALTY = 2.0
# Far beyond these limits logits overflow, and nothing could be drawn.
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0
MAX_BIAS = 100.0
MAX_BIASED = 1024  # tokens, as in OpenAI's interface; they travel with the request's first rows
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1  # as of int64, which clients have
MAX_LOGPROBS = 20
_ABOVE_0, _FINITE = math.nextafter(0.0, 1.0), sys.float_info.max
_PENALTIES = -MAX_PENALTY, MAX_PENALTY, f"from {-MAX_PENALTY:g} to {MAX_PENALTY:g}"
# The least and the largest value of numbers, and what they must be.
_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, _FINITE, "0 (greedy) or more"),
    "top_k": (0, math.inf, "a whole number from 1 up, or 0 for all tokens"),
    "top_p": (_ABOVE_0, 1.0, "more than 0 and at most 1"),
    "min_p": (0.0, 1.0, "from 0 to 1"),
    "repetition_penalty": (
        *(MIN_REPETITION, MAX_REPETITION),
        f"from {MIN_REPETITION:g} to {MAX_REPETITION:g} (1 changes nothing)",
    ),
    "presence_penalty": _PENALTIES,
    "frequency_penalty": _PENALTIES,
    "seed": (MIN_SEED, MAX_SEED, f"from {MIN_SEED} to {MAX_SEED}"),
}


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are chosen: the defaults of requests, with the names of vLLM's `SamplingParams`.

    `logit_bias` holds texts such as "1234:-2.5". With `temperature` 0 decoding is greedy, the text
    of `generate(do_sample=False)`.
    """

    temperature: float = setting(
        0.0, "0 is greedy decoding; above, tokens are drawn from the target's distribution."
    )
    top_k: int = setting(0, "Draws from so many most probable tokens; 0 is all.", "tokens")
    top_p: float = setting(
        1.0, "Draws from the smallest set of tokens that has this probability together."
    )
    min_p: float = setting(
        0.0, "Draws from tokens whose probability is at least this share of the highest."
    )
    repetition_penalty: float = setting(
        1.0, "Above 1, tokens of the prompt and the answer become less likely."
    )
    presence_penalty: float = setting(
        0.0, "Subtracted from the logits of tokens that the answer holds."
    )
    frequency_penalty: float = setting(
        0.0, "Subtracted from a token's logit for each time that the answer holds it."
    )
    logit_bias: list[str] = setting(
        [], "Token ids and what is added to their logits, as in ['1234:-2.5']."
    )
    seed: int | None = setting(
        None,
        "Seed of the draws, which gives one text under every policy; null is a fresh one, which "
        "the statistics show.",
    )
    logprobs: int | None = setting(
        None,
        "Reports log-probabilities of the chosen and of so many most probable tokens, up to 20.",
        "tokens",
    )
    prompt_logprobs: int | None = setting(
        None, "The same as sampling.logprobs, for the prompt's tokens.", "tokens"
    )
    acceptance: str = setting(
        EXACT,
        "Which draft tokens are accepted: exact is lossless, relaxed and strict are LOSSY "
        "(docs/sampling.md).",
        choices=ACCEPTANCES,
    )

    def __post_init__(self) -> None:
        check_settings("sampling", self)
        check_sampling(self.params(0))

    def params(self, fresh_seed: int) -> SamplingParams:
        """The parameters of a request; `fresh_seed` is used if no seed is set."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        given["logit_bias"] = parse_bias(self.logit_bias)
        if self.seed is None:
            given["seed"] = fresh_seed if self.temperature > 0 or self.acceptance != EXACT else 0
        return SamplingParams(**given)


def parse_bias(texts: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """Token ids and biases from texts such as "1234:-2.5". Raises ConfigError."""
    pairs = []
    for text in texts:
        try:
            token, bias = text.split(":")
            pairs.append((int(token), float(bias)))
        except ValueError:
            raise ConfigError(
                f"sampling.logit_bias holds {text!r}, but must hold token ids and biases, "
                "as in ['1234:-2.5']."
            ) from None
    repeated = {token for token, _ in pairs if [t for t, _ in pairs].count(token) > 1}
    if repeated:
        raise ConfigError(
            f"sampling.logit_bias names the token {min(repeated)} twice; name it once."
        )
    return tuple(pairs)


def check_sampling(sampling: SamplingParams, section: str = "sampling") -> None:
    """Raise ConfigError if a value is out of range. The message names it as `section`.<field>, or
    by its name alone if `section` is empty."""
    s, prefix = sampling, f"{section}." if section else ""

    def refuse(name: str, value: object, must: str) -> None:
        raise ConfigError(f"{prefix}{name} is {value}, but must be {must}.")

    for name, (least, most, must) in _RANGES.items():
        if not least <= getattr(s, name) <= most:
            refuse(name, getattr(s, name), must)
    if len(s.logit_bias) > MAX_BIASED:
        refuse("logit_bias", f"of {len(s.logit_bias)} tokens", f"of {MAX_BIASED} at most")
    for token, bias in s.logit_bias:
        if token < 0 or not -MAX_BIAS <= bias <= MAX_BIAS:
            limits = f"a token id and a bias from {-MAX_BIAS:g} to {MAX_BIAS:g}"
            refuse("logit_bias", f"{token}:{bias:g}", limits)
    if s.acceptance == STRICT and (s.top_k, s.top_p, s.min_p) == (0, 1.0, 0.0):
        raise ConfigError(
            f"{prefix}acceptance=strict accepts the draft tokens that top_k, top_p or min_p "
            f"leaves, but none of them is set; set one, for example {prefix}top_p=0.9."
        )
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(s, name)
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            refuse(name, count, f"from 0 to {MAX_LOGPROBS}, or null for none")


def check_vocabulary(sampling: SamplingParams, vocab_size: int, section: str = "sampling") -> None:
    """Raise ConfigError if a biased token is not in the target's vocabulary."""
    prefix = f"{section}." if section else ""
    for token, _ in sampling.logit_bias:
        if token >= vocab_size:
            raise ConfigError(
                f"{prefix}logit_bias names the token {token}, but the target's vocabulary ends "
                f"at {vocab_size - 1}."
            )
