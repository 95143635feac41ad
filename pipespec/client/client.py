"""Asks a cluster: hands requests in, follows their answers, collects what the ranks report.

    with attach(running) as client:
        request = client.submit(prompt, sampling, max_new_tokens=64)
        for event in client.events(request):
            ...

Who hands in several hears of all of them through `client.follow()`.

It is the same whether the cluster is of this process (`pipespec.cluster.session`) or was started
by another (`pipespec up`). Several may ask one cluster: the head takes requests by priority, and
equal ones in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from pipespec.client.registry import RunningCluster
from pipespec.client.served import ServedModel
from pipespec.client.settings import RequestSettings
from pipespec.clock import Clock, monotonic_ns
from pipespec.controller.overview import look
from pipespec.controller.records import Accepted, Event, Finished, failure_of
from pipespec.controller.requests import RequestLog
from pipespec.controller.streams import Streams
from pipespec.core import Sampling
from pipespec.errors import ControllerError, RankFailed, Unreachable
from pipespec.stats import Report, blank

# How long the ranks may take to report at the end, and if some of them may be lost.
REPORTS_TIMEOUT_S = 60.0
LOST_REPORTS_S = 2.0


class Asked(Protocol):
    """The cluster that a client asks.

    Attributes:
        heartbeat_s: how long a request may be silent before the cluster is looked at.
        same_clock: whether its clocks are this machine's.
    """

    heartbeat_s: float
    same_clock: bool

    def open_log(self) -> RequestLog:
        """A connection to its request log. Raises Unreachable."""
        ...

    def check(self) -> None:
        """Raise RankFailed if it has ended, so that what is open is never finished."""
        ...

    def reporters(self) -> tuple[int, bool]:
        """How many ranks report on a request, and whether some reports may be lost."""
        ...


class Client:
    """Asks one cluster. Not for several threads.

    Times in its reports are those of this machine's clock: where the cluster's is another, they
    are moved by the least delay with which a first token was seen here, so that they include the
    way of that token.
    """

    def __init__(
        self, cluster: Asked, served: ServedModel, log: RequestLog, clock: Clock = monotonic_ns
    ):
        self.served = served
        self._cluster = cluster
        self._log = log
        self._clock = clock
        self._open: set[int] = set()  # requests that have not finished, as far as was read
        self._first_seen: dict[int, int] = {}  # request: when its first token came here
        self._offset_ns: int | None = 0 if cluster.same_clock else None

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        eos: Sequence[int] = (),
        priority: int = 0,
        feed: str = "",
    ) -> int:
        """Put a request in the queue; its number.

        `prompt` are token ids; prompt and answer must fit into the model's context, which ends
        an answer that does not. `stop` are texts and `eos` tokens that end it earlier.
        Of requests that wait, those of the least `priority` are served first. `feed` is one of the
        ways that the cluster was started with, "": its own.
        """
        assert 0 < len(prompt) < self.served.context, "the KV pools are made for no more"
        request = self._log.enqueue(
            prompt=tuple(prompt),
            max_new_tokens=max_new_tokens,
            eos=tuple(eos),
            stop=tuple(stop),
            sampling=sampling,
            priority=priority,
            feed=feed,
        )
        self._open.add(request)
        return request

    def ask(self, settings: RequestSettings, prompt: Sequence[int], sampling: Sampling) -> int:
        """`submit` with the lengths and ends that settings name."""
        decode = settings.decode
        return self.submit(
            prompt,
            sampling,
            max_new_tokens=decode.max_new_tokens,
            stop=decode.stop,
            eos=() if decode.ignore_eos else self.served.eos,
            priority=decode.priority,
            feed=settings.feed,
        )

    def events(self, request: int) -> Iterator[Event]:
        """The events of a request, from its first on; Finished is the last.

        Raises RankFailed if the cluster ends before the request does, or the request was given up,
        and GrammarError.
        """
        with self.follow() as followed:
            followed.add(request)
            while len(followed):
                for _, event in followed.next():
                    if isinstance(event, Finished) and (failure := failure_of(event.reason)):
                        raise failure
                    yield event

    @contextmanager
    def follow(self) -> Iterator[Followed]:
        """Follow any number of requests at once, over one connection."""
        with self._log.streams() as streams:
            yield Followed(self._cluster, streams, self._heard)

    def _heard(self, request: int, event: Event) -> None:
        if isinstance(event, Accepted):
            self._first_seen.setdefault(request, self._clock())
        elif isinstance(event, Finished):
            self._open.discard(request)

    def reports(self, request: int) -> list[Report]:
        """What every rank says of a finished request whose events were read, the head's first.

        One that was lost with what it had to say has a blank report.
        """
        count, partial = self._cluster.reporters()
        timeout = LOST_REPORTS_S if partial else REPORTS_TIMEOUT_S
        found = self._log.reports(request, count, timeout, partial=partial)
        head, *stages = (found.get(rank) or blank(rank) for rank in range(count))
        seen = self._first_seen.pop(request, None)
        if not self._cluster.same_clock and seen is not None and head["token_ns"]:
            late = seen - head["token_ns"][0]
            self._offset_ns = late if self._offset_ns is None else min(self._offset_ns, late)
        offset = self._offset_ns or 0
        return [{**head, "token_ns": [at + offset for at in head["token_ns"]]}, *stages]

    def leave(self) -> None:
        """Cancel what was submitted and has not finished: nobody will read it."""
        if not self._open:
            return
        # A connection of its own: the other may have been left in the middle of a reply.
        with suppress(Unreachable), self._cluster.open_log() as log:
            for request in self._open:
                try:
                    log.cancel(request)
                except Unreachable:
                    return  # a cluster that is gone decodes nothing
                except ControllerError:  # the log has forgotten it
                    continue


class Followed:
    """Requests whose events are heard as they come, until each has finished."""

    def __init__(
        self,
        cluster: Asked,
        streams: Streams,
        on_event: Callable[[int, Event], None],
    ):
        self._cluster = cluster
        self._streams = streams
        self._on_event = on_event
        self._heard_ns = monotonic_ns()  # when an event came or the cluster was looked at

    def __len__(self) -> int:
        """How many have not finished."""
        return len(self._streams)

    def add(self, request: int) -> None:
        """Follow a request too, from its first event on."""
        self._streams.add(request)

    def next(self, timeout: float | None = None) -> list[tuple[int, Event]]:
        """The next events, each with its request; [] if none comes within `timeout` seconds.

        Raises RankFailed if the cluster ends before what is followed does.
        """
        deadline = None if timeout is None else monotonic_ns() + timeout * 1e9
        while True:
            now = monotonic_ns()
            until = self._heard_ns + self._cluster.heartbeat_s * 1e9
            if deadline is not None:
                until = min(until, deadline)
            try:
                events = self._streams.next(max(0.0, (until - now) / 1e9))
            except Unreachable:
                self._cluster.check()
                raise
            now = monotonic_ns()
            if events:
                self._heard_ns = now
                for request, event in events:
                    self._on_event(request, event)
                return events
            if now >= self._heard_ns + self._cluster.heartbeat_s * 1e9:
                self._cluster.check()
                self._heard_ns = monotonic_ns()
            if deadline is not None and now >= deadline:
                return []


@contextmanager
def attach(running: RunningCluster) -> Iterator[Client]:
    """Connect to a running cluster, whose ranks are loaded. Raises Unreachable without answer.

    Whoever leaves before a request has finished cancels it.
    """
    cluster = _Registered(running)
    try:
        log = RequestLog(running.url, namespace=running.namespace, epoch=running.epoch)
    except Unreachable as error:
        raise Unreachable(
            f"The cluster {running.name!r} on {running.host} does not answer: {error}"
        ) from error
    with log:
        client = Client(cluster, running.served, log)
        try:
            yield client
        finally:
            client.leave()


class _Registered:
    """A cluster of another process, known by its entry in the registry."""

    heartbeat_s = 0.5

    def __init__(self, running: RunningCluster):
        self._running = running
        self.same_clock = running.owner.here

    def open_log(self) -> RequestLog:
        running = self._running
        return RequestLog(running.url, namespace=running.namespace, epoch=running.epoch, patience=0)

    def check(self) -> None:
        if self._ended():
            raise RankFailed(
                f"The cluster {self._running.name!r} on {self._running.host} ended before the "
                "request was finished; start it again with `pipespec up`."
            )

    def reporters(self) -> tuple[int, bool]:
        now = look(self._running.url, self._running.namespace)
        return self._running.num_ranks, now is not None and now.epoch > self._running.epoch

    def _ended(self) -> bool:
        if self._running.owner.here:
            return self._running.owner.gone
        try:
            return look(self._running.url, self._running.namespace) is None
        except Unreachable:
            # Redis may come back; whoever reads the stream knows how long to hope.
            return False
