"""The names of the keys that pipespec uses in Redis."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RedisKeys:
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
        """Why all ranks dequantise four-bit weights."""
        return self._key("plain")

    @property
    def launcher(self) -> str:
        """The launcher's lease."""
        return self._key("launcher")

    def lease(self, worker: str) -> str:
        return self._key("leases", worker)

    def link_addresses(self, epoch: int) -> str:
        """The addresses that ranks exchange before they are linked (hash by name)."""
        return self._key("epochs", epoch, "link_addresses")

    def ranks(self, epoch: int) -> str:
        return self._key("epochs", epoch, "ranks")

    def followers(self, epoch: int) -> str:
        """The tensor-parallel followers that have joined (hash: worker, process id)."""
        return self._key("epochs", epoch, "followers")

    def kv_tokens(self, epoch: int) -> str:
        """For how many tokens of text each rank has KV slots (hash by rank)."""
        return self._key("epochs", epoch, "kv_tokens")

    def statistics(self, epoch: int) -> str:
        """The head's published state: its requests and KV slots (hash)."""
        return self._key("epochs", epoch, "statistics")

    def counts(self, epoch: int) -> str:
        """The ranks' counts since the epoch began (hash by "name" or "name/label")."""
        return self._key("epochs", epoch, "counts")

    @property
    def totals(self) -> str:
        """The sums of such counts over all epochs that have ended, and the launcher's counts of
        faults (hash)."""
        return self._key("totals")

    def row_times(self, epoch: int) -> str:
        """The times of each stage's batches by their rows (hash by rank)."""
        return self._key("epochs", epoch, "row_times")

    def computing(self, epoch: int) -> str:
        """The attention backend and other choices of each rank (hash by rank)."""
        return self._key("epochs", epoch, "computing")

    def closed(self, epoch: int) -> str:
        return self._key("epochs", epoch, "closed")

    def arrived(self, epoch: int) -> str:
        """Whether the head was notified of requests (lua/includes/notify_head.lua)."""
        return self._key("epochs", epoch, "arrived")

    def graph(self, epoch: int) -> str:
        return self._key("epochs", epoch, "graph")

    def draft_tokens(self, epoch: int, sequence: int) -> str:
        """The stream of the draft tokens that the head has scheduled of a lossy sequence."""
        return self._key("epochs", epoch, "draft_tokens", sequence)

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
        """The stream that wakes a listener which is to follow more requests."""
        return self._key("listeners", name)

    @property
    def published_steps(self) -> str:
        """The stream of the head's steps, which has entries while a dashboard is open."""
        return self._key("published_steps")

    @property
    def watched(self) -> str:
        """Exists while a dashboard is open."""
        return self._key("watched")

    def watched_request(self, request: int) -> str:
        """Exists while a dashboard shows the tree of a request."""
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

    @property
    def conversations(self) -> str:
        """The prefix of conversations that a later request may continue (by name)."""
        return self._key("conversations")

    @property
    def conversation_order(self) -> str:
        """Their names, the oldest first (lua/keep_conversation.lua)."""
        return self._key("conversations", "order")

    @property
    def conversation_bytes(self) -> str:
        """How many bytes they take."""
        return self._key("conversations", "bytes")
