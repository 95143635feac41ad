"""How an answer is generated, as users of the Python interface say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, get_type_hints

from pipespec import core
from pipespec.client.answers import seeds_from
from pipespec.client.request_settings import grammar_for
from pipespec.errors import ConfigError
from pipespec.limits import MAX_COUNT, MAX_PRIORITY, check_choice, check_whole
from pipespec.sampling.params import (
    ACCEPTANCES,
    MAX_BIASED,
    check_sampling,
)
from pipespec.system.validation import Unreadable, typed

MAX_ANSWERS = 128
# Fields that go to the last stage under the same name.
SAME = {entry.name for entry in fields(core.SamplingParams)} - {"logit_bias", "seed", "grammar"}


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What an answer must match; exactly one of these. Needs `pip install 'pipespec[grammar]'`.

    Attributes:
        json: a JSON schema, as a mapping or as text.
        regex: a regular expression.
        choice: texts of which the answer is one.
        grammar: a grammar in Lark's notation.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if len(self._given) != 1:
            what = " and ".join(self._given) or "nothing"
            raise ConfigError(
                f"StructuredOutputsParams has {what}, but takes one of json, regex, choice and "
                "grammar."
            )

    def compile(self) -> str:
        """The grammar as requests carry it. Raises ConfigError."""
        ((name, value),) = self._given.items()
        if value == [] or value == ():
            raise ConfigError("choice is empty; give at least one text.")
        return grammar_for(name, name, dict(value) if isinstance(value, Mapping) else value)

    @property
    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one prompt is answered. Names and meanings are those of vLLM's `SamplingParams`.

    Attributes:
        n: how many answers; more than one needs `temperature` above 0.
        max_tokens: tokens of an answer at most; None: `decode.max_new_tokens` of the cluster.
        min_tokens: before so many tokens nothing ends the answer.
        temperature: 0 takes the most probable token (greedy, the default).
        top_p, top_k, min_p: which tokens are drawn from; `top_k` 0: all.
        seed: of the draws; None: a fresh one for each prompt. Of n answers each has the next.
        stop: a text or several that end the answer and are not part of it.
        stop_token_ids: tokens that end it, besides those of the model.
        ignore_eos: go on after the model's end tokens.
        presence_penalty, frequency_penalty, repetition_penalty: as in vLLM.
        logit_bias: what is added to the logits of tokens.
        logprobs: report log-probabilities of so many most probable tokens, and of the chosen one.
        prompt_logprobs: the same of the prompt's tokens.
        structured_outputs: what the answer must match.
        priority: of requests that wait, the least is served first.
        acceptance: "exact" samples from the target; "relaxed" and "strict" are lossy
            (docs/sampling.md).

    Raises ConfigError for a value that is out of range.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    priority: int = 0
    acceptance: str = core.EXACT

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, kind in _kinds().items():
            try:
                object.__setattr__(self, name, typed(name, getattr(self, name), kind))
            except Unreadable as error:
                raise ConfigError(f"{error}.") from None
        form = self.structured_outputs
        if form is not None and not isinstance(form, StructuredOutputsParams):
            raise ConfigError(
                f"structured_outputs is {form!r:.60}, but must be a StructuredOutputsParams."
            )
        for token, bias in (self.logit_bias or {}).items():
            if type(token) is not int or type(bias) not in (int, float):
                raise ConfigError(
                    f"logit_bias holds {token!r}: {bias!r}, but must hold token ids and numbers."
                )
        check_whole("n", self.n, 1, MAX_ANSWERS)
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1, MAX_COUNT)
        most = MAX_COUNT if self.max_tokens is None else self.max_tokens
        check_whole("min_tokens", self.min_tokens, 0, most)
        check_whole("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        check_choice("acceptance", self.acceptance, ACCEPTANCES)
        if "" in self.stop:
            raise ConfigError("stop holds an empty text, which would end every answer.")
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(
                f"n is {self.n}, but with temperature 0 all answers are equal; set temperature."
            )
        if self.ignore_eos and form is not None:
            raise ConfigError(
                "ignore_eos is set, but a structured output ends by itself; leave one out."
            )
        if len(self.stop_token_ids) > MAX_BIASED:
            raise ConfigError(
                f"stop_token_ids holds {len(self.stop_token_ids)} tokens, but may hold "
                f"{MAX_BIASED}."
            )
        for token in self.stop_token_ids:
            check_whole("stop_token_ids", token, 0, MAX_COUNT)
        check_sampling(self.for_request(seed=0), section="")

    def for_request(self, seed: int, grammar: str = "") -> core.SamplingParams:
        """What the last stage needs to sample; `seed` is used if none is set."""
        biases = () if self.logit_bias is None else tuple(self.logit_bias.items())
        return core.SamplingParams(
            **{name: getattr(self, name) for name in SAME},
            logit_bias=biases,
            seed=seed if self.seed is None else self.seed,
            grammar=grammar,
        )

    def answers(self, fresh_seeds: Sequence[int]) -> list[list[core.SamplingParams]]:
        """The parameters of each of n answers to as many prompts as there are seeds, which are used
        if none is set. Raises ConfigError."""
        outputs = self.structured_outputs
        grammar = "" if outputs is None else outputs.compile()
        made = []
        for fresh_seed in fresh_seeds:
            first = self.for_request(fresh_seed, grammar)
            # Greedy answers do without a seed.
            needs = first.temperature > 0 or first.acceptance != core.EXACT
            seeds = seeds_from(first.seed, self.n)
            made.append([replace(first, seed=seed if needs else 0) for seed in seeds])
        return made


# Of all prompts, or of each; None: the cluster's own settings.
Sampling = SamplingParams | Sequence[SamplingParams] | None


@cache
def _kinds() -> Mapping[str, Any]:
    """The types of fields that are kept as they are given."""
    hints = get_type_hints(SamplingParams) | {"stop": Sequence[str]}
    others = ("logit_bias", "structured_outputs")
    return {name: kind for name, kind in hints.items() if name not in others}
