"""How tokens are to be decided: what `conf/verify/` names, and what its settings may be.

A *spec* holds the defaults of a run, from which a request gets its `Sampling`. `greedy` and
`sample` take what the target says; `relaxed` and `strict` prefer what was guessed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from pipespec.core import RELAXED, STRICT, Sampling
from pipespec.errors import ConfigError

MAX_PENALTY = 2.0
# Far beyond these a logit is no number any more, and nothing could be drawn.
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0
MAX_BIAS = 100.0
MAX_BIASED = 1024  # tokens, as in OpenAI's interface; they travel with the request's first rows
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20


class VerifierSpec(Protocol):
    """A frozen dataclass of settings."""

    def sampling(self, fresh_seed: int) -> Sampling:
        """What a request asks for that says nothing else; `fresh_seed` if no seed is set."""
        ...


@dataclass(frozen=True)
class _Adjusted:
    """What every verifier does to the logits first, and reports of them."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: list[str] = field(default_factory=list)
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def _adjustments(self) -> Sampling:
        return Sampling(
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=parse_bias(self.logit_bias),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


@dataclass(frozen=True)
class Greedy(_Adjusted):
    """The arg-max: the text of `generate(do_sample=False)`."""

    temperature: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature > 0:
            raise ConfigError(
                f"verify.temperature is {self.temperature}, but verify=greedy decodes at 0 only; "
                "pass verify=sample."
            )
        check_sampling(replace(self._adjustments(), temperature=self.temperature))

    def sampling(self, fresh_seed: int) -> Sampling:
        return self._adjustments()


@dataclass(frozen=True)
class Sample(_Adjusted):
    """A draw from the target's own distribution; temperature 0 is greedy."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        check_sampling(self.sampling(0))

    def sampling(self, fresh_seed: int) -> Sampling:
        return replace(
            self._adjustments(),
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=fresh_seed if self.seed is None else self.seed,
        )


@dataclass(frozen=True)
class Relaxed(Sample):
    """Lossy (SpecPipe 3.4): of the guesses, the one that the target finds most probable."""

    def sampling(self, fresh_seed: int) -> Sampling:
        return replace(super().sampling(fresh_seed), acceptance=RELAXED)


@dataclass(frozen=True)
class Strict(Sample):
    """Lossy (SpecPipe 3.4): of the guesses that are among the target's tokens after its cut-offs,
    the one that the draft finds most probable."""

    top_p: float = 0.9

    def sampling(self, fresh_seed: int) -> Sampling:
        return replace(super().sampling(fresh_seed), acceptance=STRICT)


def parse_bias(texts: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """Token ids and biases from texts such as "1234:-2.5". Raises ConfigError."""
    pairs = []
    for text in texts:
        try:
            token, bias = text.split(":")
            pairs.append((int(token), float(bias)))
        except ValueError:
            raise ConfigError(
                f"verify.logit_bias holds {text!r}, but must hold token ids and biases, "
                "as in ['1234:-2.5']."
            ) from None
    repeated = {token for token, _ in pairs if [t for t, _ in pairs].count(token) > 1}
    if repeated:
        raise ConfigError(f"verify.logit_bias names the token {min(repeated)} twice; name it once.")
    return tuple(pairs)


def check_sampling(sampling: Sampling, section: str = "verify") -> None:
    """Raise ConfigError if a value is out of range, naming it as `section`.<field>, or without a
    section by its name alone."""
    s, prefix = sampling, f"{section}." if section else ""

    def refuse(name: str, value: object, must: str) -> None:
        raise ConfigError(f"{prefix}{name} is {value}, but must be {must}.")

    if not (math.isfinite(s.temperature) and s.temperature >= 0):
        refuse("temperature", s.temperature, "0 (greedy) or more")
    if s.top_k < 0:
        refuse("top_k", s.top_k, "a whole number from 1 up, or 0 for all tokens")
    if not 0 < s.top_p <= 1:
        refuse("top_p", s.top_p, "more than 0 and at most 1")
    if not 0 <= s.min_p <= 1:
        refuse("min_p", s.min_p, "from 0 to 1")
    if not MIN_REPETITION <= s.repetition_penalty <= MAX_REPETITION:
        limits = f"from {MIN_REPETITION:g} to {MAX_REPETITION:g} (1 changes nothing)"
        refuse("repetition_penalty", s.repetition_penalty, limits)
    for name in ("presence_penalty", "frequency_penalty"):
        if not -MAX_PENALTY <= getattr(s, name) <= MAX_PENALTY:
            refuse(name, getattr(s, name), f"from {-MAX_PENALTY:g} to {MAX_PENALTY:g}")
    if len(s.logit_bias) > MAX_BIASED:
        refuse("logit_bias", f"of {len(s.logit_bias)} tokens", f"of {MAX_BIASED} at most")
    for token, bias in s.logit_bias:
        if token < 0 or not -MAX_BIAS <= bias <= MAX_BIAS:
            limits = f"a token id and a bias from {-MAX_BIAS:g} to {MAX_BIAS:g}"
            refuse("logit_bias", f"{token}:{bias:g}", limits)
    if not 0 <= s.seed <= MAX_SEED:
        refuse("seed", s.seed, f"from 0 to {MAX_SEED}")
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(s, name)
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            refuse(name, count, f"from 0 to {MAX_LOGPROBS}, or null for none")


def check_vocabulary(sampling: Sampling, vocab_size: int, section: str = "verify") -> None:
    """Raise ConfigError if a biased token is not in the target's vocabulary."""
    prefix = f"{section}." if section else ""
    for token, _ in sampling.logit_bias:
        if token >= vocab_size:
            raise ConfigError(
                f"{prefix}logit_bias names the token {token}, but the target's vocabulary ends "
                f"at {vocab_size - 1}."
            )
