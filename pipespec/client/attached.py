"""Ask a cluster that is up already (`pipespec up`), from any process that has its card.

    with attach(card) as cluster:
        request = cluster.submit(prompt, sampling, max_new_tokens=64)
        for event in cluster.events(request):
            ...

Several may ask at the same time: requests queue, and the head takes them in their order.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from pipespec.client.registry import Card, Owner
from pipespec.client.settings import group
from pipespec.clock import Clock, monotonic_ns
from pipespec.cluster import deployment
from pipespec.cluster.session import LOST_REPORTS_S, REPORTS_TIMEOUT_S, ClusterSession
from pipespec.config.schema import Config
from pipespec.controller.overview import look
from pipespec.controller.records import Accepted, Finished
from pipespec.controller.requests import RequestLog
from pipespec.core import Sampling
from pipespec.errors import ControllerError, ModelError, RankFailed, Unreachable
from pipespec.stats import Report, blank

# How long a request may be silent before its cluster is looked at.
HEARTBEAT_S = 0.5


class AttachedCluster:
    """A cluster of another process, as whoever asks it for text sees it. Not for several threads.

    It has the methods of `pipespec.cluster.session.ClusterSession`. Times in its reports are those
    of this machine's clock: where the cluster's is another, they are moved by the least delay with
    which a first token was seen here, so that they include the way of that token.
    """

    def __init__(self, card: Card, log: RequestLog, clock: Clock = monotonic_ns):
        self.card = card
        self._log = log
        self._clock = clock
        self._open: set[int] = set()  # requests that have not finished, as far as was read
        self._first_seen: dict[int, int] = {}  # request: when its first token came here
        self._offset_ns: int | None = None if not card.owner.here else 0

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        eos: Sequence[int] = (),
    ) -> int:
        """Put a request in the queue; its number. As `ClusterSession.submit`."""
        assert 0 < len(prompt) < self.card.context, "the KV pools are made for no more"
        request = self._log.enqueue(
            prompt=tuple(prompt),
            max_new_tokens=max_new_tokens,
            eos=tuple(eos),
            stop=tuple(stop),
            sampling=sampling,
        )
        self._open.add(request)
        return request

    def events(self, request: int) -> Iterator[Accepted | Finished]:
        """The events of a request, from its first on; Finished is the last.

        Raises RankFailed if the cluster ends before the request does.
        """
        for event in self._heard(request):
            if event is None:
                self._check()
                continue
            if isinstance(event, Accepted):
                self._first_seen.setdefault(request, self._clock())
            else:
                self._open.discard(request)
            yield event

    def reports(self, request: int) -> list[Report]:
        """What every rank says of a finished request whose events were read, the head's first.

        One that was lost with what it had to say has a blank report.
        """
        now = look(self.card.url, self.card.namespace)
        faulted = now is not None and now.epoch > self.card.epoch
        count = self.card.num_ranks
        timeout = LOST_REPORTS_S if faulted else REPORTS_TIMEOUT_S
        found = self._log.reports(request, count, timeout, partial=faulted)
        head, *stages = (found.get(rank) or blank(rank) for rank in range(count))
        seen = self._first_seen.pop(request, None)
        if not self.card.owner.here and seen is not None and head["token_ns"]:
            late = seen - head["token_ns"][0]
            self._offset_ns = late if self._offset_ns is None else min(self._offset_ns, late)
        offset = self._offset_ns or 0
        return [{**head, "token_ns": [at + offset for at in head["token_ns"]]}, *stages]

    def leave(self) -> None:
        """Cancel what was submitted and has not finished: nobody will read it."""
        if not self._open:
            return
        card = self.card
        # A connection of its own: the other may have been left in the middle of a reply.
        with (
            suppress(Unreachable),  # a cluster that is gone decodes nothing
            RequestLog(card.url, namespace=card.namespace, epoch=card.epoch, patience=0) as log,
        ):
            for request in self._open:
                try:
                    log.cancel(request)
                except Unreachable:
                    return
                except ControllerError:  # the log has forgotten it
                    continue

    def _heard(self, request: int) -> Iterator[Accepted | Finished | None]:
        try:
            yield from self._log.stream(request, heartbeat=HEARTBEAT_S)
        except Unreachable:
            self._check()
            raise

    def _check(self) -> None:
        """Raise RankFailed if the cluster has ended."""
        if self._ended():
            raise RankFailed(
                f"The cluster {self.card.name!r} on {self.card.host} ended before the request was "
                "finished; start it again with `pipespec up`."
            )

    def _ended(self) -> bool:
        if self.card.owner.here:
            return self.card.owner.gone
        try:
            return look(self.card.url, self.card.namespace) is None
        except Unreachable:
            # Redis may come back; whoever reads the stream knows how long to hope.
            return False


@contextmanager
def attach(
    card: Card, on_loaded: Callable[[int, int], None] = lambda ranks, of: None
) -> Iterator[AttachedCluster]:
    """Connect to a running cluster, whose ranks are loaded. Raises Unreachable without answer.

    Whoever leaves before a request has finished cancels it.
    """
    try:
        log = RequestLog(card.url, namespace=card.namespace, epoch=card.epoch)
    except Unreachable as error:
        raise Unreachable(
            f"The cluster {card.name!r} on {card.host} does not answer: {error}"
        ) from error
    on_loaded(card.num_ranks, card.num_ranks)
    with log:
        cluster = AttachedCluster(card, log)
        try:
            yield cluster
        finally:
            cluster.leave()


def plan_of(card: Card, config: Config) -> deployment.Plan:
    """What a request to a cluster is checked and encoded with.

    Raises ModelError if this machine has not the cluster's target, whose tokenizer it needs.
    """
    try:
        mine = deployment.plan(config)
    except ModelError as error:
        raise ModelError(f"The cluster {card.name!r} cannot be asked from here: {error}") from error
    if mine.target.vocab_size != card.vocab_size:
        raise ModelError(
            f"The cluster {card.name!r} has a vocabulary of {card.vocab_size}, but the model at "
            f"{card.target} on this machine one of {mine.target.vocab_size}; put the cluster's "
            "target there."
        )
    return replace(mine, context=card.context, target=replace(mine.target, eos=card.eos))


def card_of(name: str, cluster: ClusterSession, overrides: Sequence[str]) -> Card:
    """The card of a cluster that this process runs, made by `overrides`."""
    plan = cluster.plan
    target = Path(plan.config.model.target)
    return Card(
        name=name,
        url=cluster.elsewhere,
        namespace=cluster.namespace,
        epoch=cluster.epoch,
        owner=Owner.this(),
        host=socket.gethostname(),
        # Those of the controller may hold a password, and `url` says it all.
        overrides=tuple(text for text in overrides if group(text) != "controller"),
        # What is no folder is the id of a hub's model.
        target=str(target.absolute() if target.is_dir() else plan.config.model.target),
        vocab_size=plan.target.vocab_size,
        context=plan.context,
        eos=plan.target.eos,
        num_ranks=plan.num_ranks,
        started=time.time(),
    )
