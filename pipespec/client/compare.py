"""The same prompts decoded in several ways on one cluster: what `pipespec compare` runs.

A *way* is what `feed.*` says of decoding: "feed=level feed.width=32". The cluster is made for the
most that any of them needs (`Config.ways`), and each request names its own. The prompts are decoded
one at a time, all of them in one way before the next. What a source learns from texts
(`source=hybrid`) it keeps from way to way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipespec.client import answers
from pipespec.client.arrivals import Load
from pipespec.client.bench import check, encode, measure
from pipespec.client.dataset import Sample
from pipespec.client.figures import BenchResult
from pipespec.client.own import asking
from pipespec.client.served import ServedModel
from pipespec.client.settings import RequestSettings, group
from pipespec.clock import monotonic_ns
from pipespec.cluster import session
from pipespec.cluster.deployment import decide, fit_context
from pipespec.config.compose import compose, compose_sections
from pipespec.config.schema import Config
from pipespec.controller.records import Accepted, Event
from pipespec.errors import ConfigError
from pipespec.stats import Report
from pipespec.text import FinalText

FEED = "feed"
# Between settings of one way: a blank or comma before a name, and none inside a list.
BETWEEN = re.compile(r"[\s,]+(?=[A-Za-z_][\w.]*=)")
ONE_AT_A_TIME = Load.of(1)


# --- ways -------------------------------------------------------------------------------------


def parts(way: str) -> list[str]:
    """The settings of a way, which blanks or commas may stand between. Raises ConfigError."""
    found = BETWEEN.split(way.strip(" ,"))
    for text in found:
        if group(text) != FEED:
            raise ConfigError(
                f"The way {way!r} holds {text!r}, but a way sets feed.* alone; what all ways have "
                "in common is an argument of its own."
            )
    return found


def ways_of(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """The ways among these arguments, each in one spelling, and the others. Raises ConfigError."""
    ways: list[str] = []
    others = []
    for text in texts:
        if group(text.lstrip(" ,")) != FEED:
            others.append(text)
            continue
        way = " ".join(parts(text))
        if way in ways:
            raise ConfigError(f"The way {way!r} is given twice; give it once.")
        ways.append(way)
    if not ways:
        raise ConfigError("No way was given; pass at least one, as in feed=root feed=best_first.")
    return ways, others


def composed(settings: Sequence[str], ways: Sequence[str]) -> Config:
    """The configuration of a cluster for all ways, whose own is the first. Raises ConfigError."""
    config = compose([*settings, *parts(ways[0])])
    policies = {ways[0]: config.feed}
    for way in ways[1:]:
        (policies[way],) = compose_sections((FEED,), [*settings, *parts(way)])
    return replace(config, ways=policies)


# --- what is known of a way -------------------------------------------------------------------


@dataclass
class Standing:
    """A way while it decodes, as this client sees it.

    Attributes:
        labels: what must be said of its figures (`answers.labels`).
        text: of the answer that it is at, or was at last.
        tokens: of all answers so far.
        tokens_per_s: after the first of each answer; at the end as the head has measured it.
        result: what was measured, once it has decoded all.
    """

    way: str
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
    """What came of every way, in their order."""

    results: Mapping[str, BenchResult]

    @property
    def labels(self) -> dict[str, Any]:
        """`answers.labels`, alike for all."""
        return next(iter(self.results.values())).labels

    def differing(self) -> dict[str, int]:
        """For every way, how many answers have other tokens than those of the first."""
        first = next(iter(self.results.values()))
        return {
            way: sum(
                one.token_ids != other.token_ids
                for one, other in zip(result.requests, first.requests, strict=True)
            )
            for way, result in self.results.items()
        }

    def rows(self) -> list[dict[str, Any]]:
        """The figures of every way; `speed_up` is over the first."""
        rows: list[dict[str, Any]] = []
        differing = self.differing()
        plain = None
        for way, result in self.results.items():
            figures, mine = result.summary(), rate(result)
            plain = mine if not rows else plain
            rows.append(
                {
                    "way": way,
                    "tokens": figures["total_output_tokens"],
                    "tokens_per_s": mine,
                    "tokens_per_step": figures["tokens_per_step"],
                    "speed_up": mine / plain if mine and plain else None,
                    "mean_tbt_ms": figures["mean_tbt_ms"],
                    "hit_rate": figures["hit_rate"],
                    "rows_per_step": figures["rows_per_step"],
                    "overruns": figures["overruns"],
                    "differing_answers": differing[way],
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
    """Decode all samples in every way of `config` (`composed`) on one cluster, started for them.

    Args:
        prompt_tokens: cut every prompt to its first so many tokens.
        on_loaded: called with how many ranks have loaded their models, and of how many.
        on_change: called with where a way stands, whenever tokens have come and at its end.

    Raises:
        ConfigError, Unreachable: before any rank starts, if anything is wrong.
        RankFailed: a rank died; the others have been ended.
    """
    check(samples, prompt_tokens)
    deployment = decide(config)
    settings = RequestSettings.of(config)
    with session.prepare(deployment) as agents:
        served = ServedModel.of(deployment)
        prompts = encode(served, settings, samples, prompt_tokens)
        deployment = fit_context(deployment, max(map(len, prompts)), requests=1)
        seed = answers.fresh_seed()  # one for all, so that they have the same text
        labels = answers.labels(served, settings.sampling(fresh_seed=seed))
        results: dict[str, BenchResult] = {}
        reports: list[Report] = []
        with (
            session.start(deployment, agents, on_loaded) as cluster,
            asking(cluster, served) as client,
        ):
            for way in config.ways:
                standing = Standing(way, labels)
                seen = _Seen(served, settings, prompts, standing, on_change)
                results[way], told = measure(
                    client,
                    replace(settings, feed=way),
                    samples,
                    prompts,
                    ONE_AT_A_TIME,
                    on_event=seen.event,
                    fresh_seed=seed,
                )
                reports += told
                standing.finish(results[way])
                on_change(standing)
    answers.write_trace(deployment, reports)
    return Comparison(results)


class _Seen:
    """Makes of the events of a way where it stands."""

    def __init__(
        self,
        served: ServedModel,
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
