"""The same prompts decoded by several policies on one cluster, for `pipespec bench --policies`.

A *policy* is here a choice of `policy` with its settings: "policy=level policy.width=32". The
cluster is made for the most that any of them needs (`Config.request_policies`). What a proposer
learns from texts (`proposer=hybrid`) it keeps from policy to policy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pipespec.client import answers
from pipespec.client.request_settings import group
from pipespec.config.compose import chosen_in, compose_sections
from pipespec.config.schema import Config
from pipespec.errors import ConfigError
from pipespec.extras.bench.dataset import Sample
from pipespec.extras.bench.figures import BenchResult
from pipespec.extras.bench.measurement import started

POLICY, NO_SECTIONS = "policy", ("request_policies", "chosen")
# A comma that stands in no list.
BETWEEN = re.compile(r",(?![^\[]*\])")
COPIED = ("mean_tbt_ms", "hit_rate", "rows_per_step", "overruns")


def parts(policy: str) -> list[str]:
    """The settings of a policy, with blanks between them. Raises ConfigError."""
    found = policy.split()
    for text in found:
        if group(text) != POLICY:
            raise ConfigError(
                f"The policy {policy!r} holds {text!r}, but a policy sets policy.* alone; what all "
                "have in common is an argument of its own."
            )
    return found


def policies_of(text: str) -> list[str]:
    """The policies that are listed with commas between them, as settings. Raises ConfigError."""
    policies: list[str] = []
    for named in BETWEEN.split(text):
        policy = " ".join(f"policy={named.strip()}".split())
        parts(policy)
        if policy in policies:
            raise ConfigError(f"The policy {policy!r} is given twice; give it once.")
        policies.append(policy)
    return policies


def composed(settings: Sequence[str], policies: Sequence[str]) -> Config:
    """The configuration of a cluster for all policies, of which the first is its default.

    Raises ConfigError.
    """
    names = [entry.name for entry in fields(Config) if entry.name not in NO_SECTIONS]
    sections = compose_sections(names, [*settings, *parts(policies[0])])
    first = dict(zip(names, sections, strict=True))
    request_policies = {policies[0]: first[POLICY]}
    for policy in policies[1:]:
        (request_policies[policy],) = compose_sections((POLICY,), [*settings, *parts(policy)])
    # One of them alone may not allow what the others do, such as proposer.overlap=no.
    return Config(**first, request_policies=request_policies, chosen=chosen_in(settings))


@dataclass(frozen=True)
class Comparison:
    """What came of every policy, in their order."""

    results: Mapping[str, BenchResult]

    @property
    def labels(self) -> dict[str, Any]:
        """`answers.labels`, alike for all."""
        return next(iter(self.results.values())).labels

    @property
    def differing(self) -> dict[str, int]:
        """How many answers have other tokens than those of the first policy, for those policies
        that have any."""
        first = next(iter(self.results.values()))
        counts = {}
        for policy, result in self.results.items():
            pairs = zip(result.requests, first.requests, strict=True)
            counts[policy] = sum(one.token_ids != other.token_ids for one, other in pairs)
        return {policy: count for policy, count in counts.items() if count}

    @property
    def verdict(self) -> str:
        """One sentence on the texts."""
        if not self.differing:
            return "The texts of all policies are equal, token for token."
        counts = ", ".join(f"{count} with {policy}" for policy, count in self.differing.items())
        why = " as the verifier is LOSSY" if self.labels["lossy"] else ""
        return f"Texts differ from those of {next(iter(self.results))}{why}: {counts}."

    def rows(self) -> list[dict[str, Any]]:
        """The figures of every policy; `speed_up` is over the first."""
        rows: list[dict[str, Any]] = []
        for policy, result in self.results.items():
            figures = result.summary()
            between = figures["mean_tbt_ms"]
            per_s = 1e3 / between if between else None  # after the first
            plain = rows[0]["tokens_per_s"] if rows else per_s
            rows.append(
                {
                    "policy": policy,
                    "tokens": figures["total_output_tokens"],
                    "tokens_per_s": per_s,
                    "tokens_per_step": figures["tokens_per_step"],
                    "speed_up": per_s / plain if per_s and plain else None,
                    **{name: figures[name] for name in COPIED},
                    "differing_answers": self.differing.get(policy, 0),
                }
            )
        return rows


def compare(
    config: Config,
    samples: Sequence[Sample],
    prompt_tokens: int | None,
    on_loaded: Callable[[int, int], None],
    on_done: Callable[[int, int], None],
) -> Comparison:
    """Decode all samples, one at a time, by every policy of `config` (`composed`), on one cluster
    started for them. Arguments and errors are those of `bench`."""
    results: dict[str, BenchResult] = {}
    seed = answers.fresh_seed()  # one for all, so that they have the same text
    count = len(config.request_policies) * len(samples)
    with started(config, samples, prompt_tokens, 1, on_loaded) as run:
        for policy in config.request_policies:
            before = len(results) * len(samples)
            results[policy] = run.measure(
                on_done=lambda done, _, before=before: on_done(before + done, count),  # type: ignore[misc]
                policy=policy,
                fresh_seed=seed,
            )
    return Comparison(results)
