"""What to monitor, in Prometheus' format, under our names and vLLM's (`pipespec.server.figures`).

Counters and histograms of answers count what this process has served. What the cluster does, for
whomever, is read from its Redis when somebody looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector

from pipespec.controller.overview import Overview
from pipespec.server.asking import Ask
from pipespec.server.figures import BOTH, OURS, Served, of_cluster, under

ENGINE = "0"  # a process of ours serves one cluster


class Metrics:
    """The figures of one server. `clock` tells seconds."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.unfinished = 0  # answers that are waited for here
        self.model = model
        self._labels = {"model_name": model, "engine": ENGINE}
        self._served = Served()

    def asked(self, ask: Ask) -> list[Watch]:
        """A request came; what watches each of its answers."""
        self._served.n.observe(ask.n)
        for prompt, longest in zip(ask.prompts, ask.max_tokens, strict=True):
            self._served.prompt.observe(len(prompt))
            self._served.longest.observe(longest)
        self._served.prompt_tokens.inc(ask.prompt_tokens)
        return [Watch(self) for _ in ask.samplings]

    def show(self, overview: Overview | None) -> bytes:
        """All figures as text; of a cluster that does not answer nothing is known."""
        return generate_latest(_Shown(self._collect(overview)))

    def figures(self, overview: Overview | None) -> dict[str, list[tuple[dict[str, str], float]]]:
        """The same figures by name, without our prefix, each with its labels but those that all
        have."""
        metrics = [under(OURS, each, {}) for each in self._served.collect()]
        metrics += [each for each in of_cluster(overview, {}) if each.name.startswith(OURS)]
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for sample in (sample for metric in metrics for sample in metric.samples):
            name = sample.name.removeprefix(OURS)
            found.setdefault(name, []).append((sample.labels, sample.value))
        return found

    def _collect(self, overview: Overview | None) -> Iterable[Metric]:
        for metric in self._served.collect():
            for prefix in BOTH:
                yield under(prefix, metric, self._labels)
        yield from of_cluster(overview, self._labels)

    # --- for Watch ----------------------------------------------------------------------------

    def first(self, seconds: float, tokens: int) -> None:
        """The first tokens of an answer came, so long after it was asked for."""
        self._served.ttft.observe(seconds)
        self._served.generation_tokens.inc(tokens)

    def more(self, seconds: float, tokens: int) -> None:
        """Tokens came together, so long after those before."""
        for _ in range(tokens):
            self._served.itl.observe(seconds / tokens)
        self._served.generation_tokens.inc(tokens)

    def ended(self, reason: str, seconds: float, tokens: int) -> None:
        """An answer has ended after so many seconds."""
        self._served.success.labels(reason).inc()
        self._served.e2e.observe(seconds)
        self._served.answer.observe(tokens)

    def parts(self, ttft: float, decoding: float, prefill: float | None) -> None:
        """Where the seconds of an answer went that had a token: to the first, after it, and of
        those to the first the ones at the head; None: it does not know.

        What is left of the time to the first token is the wait until the head opened the request,
        with the ways there and back. Only lengths of time are compared, as the head may be on
        another machine.
        """
        self._served.decode.observe(decoding)
        if prefill is not None:
            self._served.prefill.observe(prefill)
            self._served.queue.observe(max(ttft - prefill, 0.0))
            self._served.inference.observe(prefill + decoding)


class _Shown(Collector):
    """Figures as Prometheus' package takes them."""

    def __init__(self, metrics: Iterable[Metric]):
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class Watch:
    """Takes the times of one answer, from when it was asked for."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._asked = self._last = metrics.clock()
        self._first: float | None = None
        self._tokens = 0
        self._over = False
        metrics.unfinished += 1

    def heard(self, tokens: int) -> None:
        """So many tokens came."""
        now = self._metrics.clock()
        if self._first is None:
            self._first = now
            self._metrics.first(now - self._asked, tokens)
        else:
            self._metrics.more(now - self._last, tokens)
        self._last = now
        self._tokens += tokens

    def ended(self, reason: str, prefill_ns: int | None = None) -> None:
        """It is over; the first reason stays. `prefill_ns` is that of `Finished`."""
        if self._over:
            return
        self._over = True
        self._metrics.unfinished -= 1
        now = self._metrics.clock()
        self._metrics.ended(reason, now - self._asked, self._tokens)
        if self._first is None:
            return
        ttft, decoding = self._first - self._asked, now - self._first
        prefill = None if prefill_ns is None else prefill_ns / 1e9
        self._metrics.parts(ttft, decoding, prefill)
