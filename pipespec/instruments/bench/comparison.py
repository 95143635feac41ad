"""The same prompts decoded by several policies on one cluster: what `pipespec compare` runs.

A *policy* is here a choice of `policy` with its settings: "policy=level policy.width=32". The
cluster is made for the most that any of them needs (`Config.request_policies`), and each request
names its own.
The prompts are decoded one at a time, all of them by one policy before the next. What a proposer
learns from texts (`proposer=hybrid`) it keeps from policy to policy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from pipespec.client import answers
from pipespec.client.model_info import ModelInfo
from pipespec.client.request_settings import RequestSettings, group
from pipespec.clock import monotonic_ns
from pipespec.config.compose import compose_sections
from pipespec.config.schema import Config
from pipespec.controller.log_records import Accepted, Event
from pipespec.errors import ConfigError
from pipespec.instruments.bench.arrivals import Load
from pipespec.instruments.bench.dataset import Sample
from pipespec.instruments.bench.figures import BenchResult
from pipespec.instruments.bench.measurement import measure, started
from pipespec.text import FinalText

POLICY, REQUEST_POLICIES = "policy", "request_policies"
# Between settings of one policy: a blank or comma before a name, and none inside a list.
BETWEEN = re.compile(r"[\s,]+(?=[A-Za-z_][\w.]*=)")
ONE_AT_A_TIME = Load.of(1)


# --- policies -------------------------------------------------------------------------------------


def parts(policy: str) -> list[str]:
    """The settings of a policy, which blanks or commas may stand between. Raises ConfigError."""
    found = BETWEEN.split(policy.strip(" ,"))
    for text in found:
        if group(text) != POLICY:
            raise ConfigError(
                f"The policy {policy!r} holds {text!r}, but a policy sets policy.* alone; what all "
                "have in common is an argument of its own."
            )
    return found


def policies_of(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """The policies among these arguments, each in one spelling, and the other arguments.

    Raises ConfigError.
    """
    policies: list[str] = []
    others = []
    for text in texts:
        if group(text.lstrip(" ,")) != POLICY:
            others.append(text)
            continue
        policy = " ".join(parts(text))
        if policy in policies:
            raise ConfigError(f"The policy {policy!r} is given twice; give it once.")
        policies.append(policy)
    if not policies:
        raise ConfigError(
            "No policy was given; pass at least one, as in policy=root policy=best_first."
        )
    return policies, others


def composed(settings: Sequence[str], policies: Sequence[str]) -> Config:
    """The configuration of a cluster for all policies, of which the first is its default.

    Raises ConfigError.
    """
    names = [entry.name for entry in fields(Config) if entry.name != REQUEST_POLICIES]
    sections = compose_sections(names, [*settings, *parts(policies[0])])
    first = dict(zip(names, sections, strict=True))
    request_policies = {policies[0]: first[POLICY]}
    for policy in policies[1:]:
        (request_policies[policy],) = compose_sections((POLICY,), [*settings, *parts(policy)])
    # One of them alone may not allow what the others do, such as proposer.overlap=no.
    return Config(**first, request_policies=request_policies)


# --- what is known of a policy -------------------------------------------------------------------


@dataclass
class Standing:
    """A policy while it decodes, as this client sees it.

    Attributes:
        labels: what must be said of its figures (`answers.labels`).
        text: of the answer that it is at, or was at last.
        tokens: of all answers so far.
        tokens_per_s: after the first of each answer; at the end as the head has measured it.
        result: what was measured, once it has decoded all.
    """

    policy: str
    labels: Mapping[str, Any]
    text: str = ""
    tokens: int = 0
    tokens_per_s: float | None = None
    result: BenchResult | None = None

    def finish(self, result: BenchResult) -> None:
        """It has decoded all."""
        self.result, self.tokens_per_s = result, rate(result)
        self.text = result.requests[-1].text


def rate(result: BenchResult) -> float | None:
    """Tokens per second after the first, by the mean time between tokens."""
    between = result.summary()["mean_tbt_ms"]
    return 1e3 / between if between else None


@dataclass(frozen=True)
class Comparison:
    """What came of every policy, in their order."""

    results: Mapping[str, BenchResult]

    @property
    def labels(self) -> dict[str, Any]:
        """`answers.labels`, alike for all."""
        return next(iter(self.results.values())).labels

    def differing(self) -> dict[str, int]:
        """For every policy, how many answers have other tokens than those of the first."""
        first = next(iter(self.results.values()))
        return {
            policy: sum(
                one.token_ids != other.token_ids
                for one, other in zip(result.requests, first.requests, strict=True)
            )
            for policy, result in self.results.items()
        }

    def rows(self) -> list[dict[str, Any]]:
        """The figures of every policy; `speed_up` is over the first."""
        rows: list[dict[str, Any]] = []
        differing = self.differing()
        plain = None
        for policy, result in self.results.items():
            figures, mine = result.summary(), rate(result)
            plain = mine if not rows else plain
            rows.append(
                {
                    "policy": policy,
                    "tokens": figures["total_output_tokens"],
                    "tokens_per_s": mine,
                    "tokens_per_step": figures["tokens_per_step"],
                    "speed_up": mine / plain if mine and plain else None,
                    "mean_tbt_ms": figures["mean_tbt_ms"],
                    "hit_rate": figures["hit_rate"],
                    "rows_per_step": figures["rows_per_step"],
                    "overruns": figures["overruns"],
                    "differing_answers": differing[policy],
                }
            )
        return rows


# --- decoding ---------------------------------------------------------------------------------


def compare(
    config: Config,
    samples: Sequence[Sample],
    *,
    prompt_tokens: int | None = None,
    on_loaded: Callable[[int, int], None] = lambda ranks, of: None,
    on_change: Callable[[Standing], None] = lambda standing: None,
) -> Comparison:
    """Decode all samples by every policy of `config` (`composed`) on one cluster, started for them.

    Args:
        prompt_tokens: cut every prompt to its first so many tokens.
        on_loaded: called with how many ranks have loaded their models, and of how many.
        on_change: called with the progress of a policy, whenever tokens have come and at its end.

    Raises:
        ConfigError, Unreachable: before any rank starts, if anything is wrong.
        RankFailed: a rank died; the others have been ended.
    """
    results: dict[str, BenchResult] = {}
    seed = answers.fresh_seed()  # one for all, so that they have the same text
    with started(config, samples, prompt_tokens, 1, on_loaded) as run:
        served, settings = run.client.served, run.settings
        labels = answers.labels(served, settings.params(fresh_seed=seed))
        for policy in config.request_policies:
            standing = Standing(policy, labels)
            seen = _Progress(served, settings, run.prompts, standing, on_change)
            results[policy], reports = measure(
                run.client,
                replace(settings, policy=policy),
                samples,
                run.prompts,
                ONE_AT_A_TIME,
                on_event=seen.event,
                fresh_seed=seed,
            )
            run.reports += reports
            standing.finish(results[policy])
            on_change(standing)
    return Comparison(results)


class _Progress:
    """Keeps the progress of a policy from its events."""

    def __init__(
        self,
        served: ModelInfo,
        settings: RequestSettings,
        prompts: Sequence[list[int]],
        standing: Standing,
        on_change: Callable[[Standing], None],
    ):
        self.standing = standing
        self._texts = [FinalText(served.tokenizer, ids, settings.decode.stop) for ids in prompts]
        self._on_change = on_change
        self._ns_per_s = 1e9 * (served.time_scale or 1.0)  # of the emulated machine
        self._sample: int | None = None
        self._later = 0  # tokens after the first ones of their answers
        self._between_ns = 0  # that these took
        self._last_ns = 0

    def event(self, sample: int, event: Event) -> None:
        """Something came of a sample."""
        if not isinstance(event, Accepted):
            return
        standing, now, count = self.standing, monotonic_ns(), len(event.tokens)
        if sample != self._sample:
            self._sample, standing.text = sample, ""
            self._later += count - 1
        else:
            self._later += count
            self._between_ns += now - self._last_ns
        self._last_ns = now
        standing.text += self._texts[sample].push(event.tokens)
        standing.tokens += count
        if self._between_ns:
            standing.tokens_per_s = self._later / (self._between_ns / self._ns_per_s)
        self._on_change(standing)
