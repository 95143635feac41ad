"""The names of everything pipespec keeps in Redis."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Keys:
    """The keys of one namespace; those that end with an epoch live in `epochs`.

    One hash tag holds them together on one node of a Redis Cluster.
    """

    namespace: str

    def _key(self, *names: object) -> str:
        return ":".join((f"{{{self.namespace}}}", *map(str, names)))

    @property
    def everything(self) -> str:
        """A pattern that matches all keys of the namespace."""
        return self._key("*")

    @property
    def epoch(self) -> str:
        return self._key("epoch")

    @property
    def epochs(self) -> str:
        return self._key("epochs")

    @property
    def assignments(self) -> str:
        """The stream of epochs, each with its assignment."""
        return self._key("assignments")

    @property
    def suspicions(self) -> str:
        return self._key("suspicions")

    @property
    def fault(self) -> str:
        """Which epoch ended last, and why."""
        return self._key("fault")

    @property
    def plain(self) -> str:
        """Why weights of four bits are made plain by all ranks."""
        return self._key("plain")

    def lease(self, worker: str) -> str:
        return self._key("leases", worker)

    def meeting(self, epoch: int) -> str:
        return self._key("epochs", epoch, "meeting")

    def ranks(self, epoch: int) -> str:
        return self._key("epochs", epoch, "ranks")

    def followers(self, epoch: int) -> str:
        """The workers that compute beside a rank and have joined (hash: worker, process id)."""
        return self._key("epochs", epoch, "followers")

    def gatherings(self, epoch: int) -> str:
        """Where those who compute a rank together meet (hash by rank)."""
        return self._key("epochs", epoch, "gatherings")

    def kv_tokens(self, epoch: int) -> str:
        """How many tokens of text each rank has KV slots for (hash by rank)."""
        return self._key("epochs", epoch, "kv_tokens")

    def statistics(self, epoch: int) -> str:
        """What the head says of its requests and slots (hash)."""
        return self._key("epochs", epoch, "statistics")

    def counts(self, epoch: int) -> str:
        """What the ranks have counted since the epoch began (hash by "name" or "name/label")."""
        return self._key("epochs", epoch, "counts")

    @property
    def totals(self) -> str:
        """The sums of such counts over all epochs that have ended, and what the launcher counts
        of faults (hash)."""
        return self._key("totals")

    def row_times(self, epoch: int) -> str:
        """How long the batches of each stage take by their rows (hash by rank)."""
        return self._key("epochs", epoch, "row_times")

    def computing(self, epoch: int) -> str:
        """How each rank computes (hash by rank)."""
        return self._key("epochs", epoch, "computing")

    def closed(self, epoch: int) -> str:
        return self._key("epochs", epoch, "closed")

    def arrived(self, epoch: int) -> str:
        """Whether the head was told that something arrived (lua/includes/arrived.lua)."""
        return self._key("epochs", epoch, "arrived")

    def graph(self, epoch: int) -> str:
        return self._key("epochs", epoch, "graph")

    def guesses(self, epoch: int, sequence: int) -> str:
        """The stream of what the head has fed of a lossy sequence."""
        return self._key("epochs", epoch, "guesses", sequence)

    def ready(self, epoch: int) -> str:
        """The prefix of the ready lists: one per rank, `<prefix>:<rank>`."""
        return self._key("epochs", epoch, "ready")

    @property
    def counter(self) -> str:
        return self._key("counter")

    @property
    def finished(self) -> str:
        """How many requests have finished."""
        return self._key("finished")

    @property
    def queue(self) -> str:
        return self._key("queue")

    @property
    def admitted(self) -> str:
        return self._key("admitted")

    def listener(self, name: str) -> str:
        """The stream that wakes a listener who is to follow more (`pipespec.controller.aio`)."""
        return self._key("listeners", name)

    @property
    def shown(self) -> str:
        """The stream of what the head shows of its steps while anybody watches."""
        return self._key("shown")

    @property
    def watched(self) -> str:
        """There while anybody watches the head's steps."""
        return self._key("watched")

    def watched_request(self, request: int) -> str:
        """There while anybody watches the tree of a request."""
        return self._key("requests", request, "watched")

    @property
    def requests(self) -> str:
        """The prefix of a request's keys (lua/includes/request.lua)."""
        return self._key("requests")

    def request(self, request: int) -> str:
        return self._key("requests", request)

    def events(self, request: int) -> str:
        return self._key("requests", request, "events")

    def reports(self, request: int) -> str:
        return self._key("requests", request, "reports")
