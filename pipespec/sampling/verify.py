"""What the last stage accepts (design: losslessness).

The target alone decides every token: its arg-max, or a draw from its own distribution with
randomness keyed by (seed, position). Only then is it asked whether the tree guessed that
token, i.e. whether the decision after it was computed already. So the tree changes when a
token is known, never which; `relaxed` and `strict` are the exceptions, and say so.

A *spec* is what `conf/verify/` names: the defaults of this run, from which a request gets its
`Sampling`. A *verifier* is what the last stage keeps of one request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from pipespec.core import Request, Sampling, TokenLogprobs
from pipespec.errors import ConfigError
from pipespec.sampling.sampler import Tally, adjust, check_sampling, distribution, draw, logprobs

# --- specs ------------------------------------------------------------------------------------


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

    def _adjustments(self) -> Sampling:
        return Sampling(
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=parse_bias(self.logit_bias),
            logprobs=self.logprobs,
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
    """Lossy: a guess is accepted if the target finds it probable, drawn or not."""

    accept_top: int = 4
    accept_ratio: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accept_top == 0:
            raise ConfigError(
                "verify.accept_top is 0, but must be a whole number from 1 up; verify=sample "
                "accepts what was drawn and nothing else."
            )

    def sampling(self, fresh_seed: int) -> Sampling:
        return replace(
            super().sampling(fresh_seed),
            accept_top=self.accept_top,
            accept_ratio=self.accept_ratio,
        )


@dataclass(frozen=True)
class Strict(Sample):
    """Lossy: a guess is accepted if it is the target's most probable token, drawn or not."""

    def sampling(self, fresh_seed: int) -> Sampling:
        return replace(super().sampling(fresh_seed), accept_top=1)


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


# --- judging ----------------------------------------------------------------------------------


class Verifier:
    """Decides the tokens of one request, at the last stage.

    It keeps the length of the text and, if there are penalties, its tally. All tokens that it
    decides join the text, so both only ever move forward.

    Args:
        request: what was asked for.
        answer: what was accepted before this verifier existed (after a failure), in order.
    """

    def __init__(self, request: Request, answer: Sequence[int] = ()):
        self.sampling = request.sampling
        self.length = len(request.prompt) + len(answer)
        self._text = (request.prompt, tuple(answer))
        self._tally: Tally | None = None

    def decide(
        self,
        tip: int,
        nodes: Sequence[int],
        parents: Sequence[int],
        guesses: Sequence[int],
        logits: torch.Tensor,
    ) -> tuple[list[int], list[TokenLogprobs]]:
        """The tokens that follow the tip, as far as this batch tells, and their log-probabilities.

        Args:
            tip, nodes, parents, guesses: see `walk`.
            logits: of the batch's rows, `[rows, vocab]`.

        Rows off the accepted path cost an arg-max at most: what is drawn depends on the text
        before it, so it is drawn only once that text is decided.
        """
        reports: list[TokenLogprobs] = []
        if self.sampling.plain:
            tokens = walk(tip, nodes, parents, guesses, logits.argmax(-1).tolist().__getitem__)
            self.length += len(tokens)
            return tokens, reports

        def draw_after(row: int) -> int:
            children = [
                guess
                for parent, guess in zip(parents, guesses, strict=True)
                if parent == nodes[row] and self.sampling.lossy
            ]
            token = self._next(logits[row], children)
            if self.sampling.logprobs is not None:
                reports.append(logprobs(logits[row], token, self.sampling.logprobs))
            return token

        return walk(tip, nodes, parents, guesses, draw_after), reports

    def _next(self, logits: torch.Tensor, guesses: Sequence[int]) -> int:
        """Decide one token from its logits `[vocab]`; the text then ends with it."""
        sampling = self.sampling
        if sampling.penalises and self._tally is None:
            self._tally = Tally(*self._text, len(logits), logits.device)
        scores = adjust(logits, sampling, self._tally)
        token = None
        if guesses:
            token = acceptable(distribution(scores, sampling), guesses, sampling)
        if token is None and sampling.temperature == 0:
            token = int(scores.argmax())
        if token is None:
            token = draw(distribution(scores, sampling), sampling.seed, self.length)
        if self._tally is not None:
            self._tally.append(token)
        self.length += 1
        return token


def acceptable(logprobs: torch.Tensor, guesses: Sequence[int], sampling: Sampling) -> int | None:
    """The most probable of the guesses that the lossy rule accepts, or None.

    A guess is accepted if fewer than `accept_top` tokens are more probable and its probability
    is at least `accept_ratio` of the highest, both in the distribution that a token would be
    drawn from, `logprobs` `[vocab]`.
    """
    best = max(guesses, key=lambda guess: (float(logprobs[guess]), -guess))
    value = logprobs[best]
    rank = int((logprobs > value).sum())
    # exp of a difference, so that a guess that cannot be drawn (-inf) has no probability.
    ratio = float(torch.exp(value - logprobs.max()))
    accepted = rank < sampling.accept_top and ratio > 0 and ratio >= sampling.accept_ratio
    return best if accepted else None


def walk(
    tip: int,
    nodes: Sequence[int],
    parents: Sequence[int],
    guesses: Sequence[int],
    draw_after: Callable[[int], int],
) -> list[int]:
    """The tokens that follow the tip, as far as this batch tells.

    Args:
        tip: node id of the last committed row.
        nodes, parents, guesses: the batch's rows `[rows]`; a guess is a row's token.
        draw_after: the token that follows a row, given its index; called along the path only.

    Returns the drawn tokens along the successor chain: empty if the tip is not in the batch,
    else one more than the number of guesses that were right.
    """
    row_of = {node: i for i, node in enumerate(nodes)}
    row_by_guess = {guess: i for i, guess in enumerate(zip(parents, guesses, strict=True))}
    accepted: list[int] = []
    row = row_of.get(tip)
    while row is not None:
        accepted.append(draw_after(row))
        row = row_by_guess.get((nodes[row], accepted[-1]))
    return accepted
