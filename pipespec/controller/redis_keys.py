"""The names of the keys that pipespec uses in Redis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _named(*names: str) -> Any:
    return property(lambda keys: keys.key(*names))


def _of_epoch(name: str) -> Callable[[RedisKeys, int], str]:
    return lambda keys, epoch: keys.key("epochs", epoch, name)


def _of_request(*names: str) -> Callable[[RedisKeys, int], str]:
    """A key that each request has (lua/includes/request.lua)."""
    return lambda keys, request: keys.key("requests", request, *names)


@dataclass(frozen=True)
class RedisKeys:
    """The keys of one namespace; those that end with an epoch live in `epochs`. One hash tag holds
    them together on one node of a Redis Cluster."""

    namespace: str

    def key(self, *names: object) -> str:
        return ":".join((f"{{{self.namespace}}}", *map(str, names)))

    everything = _named("*")  # a pattern that matches all keys of the namespace

    # --- epochs -------------------------------------------------------------------------------

    epoch, epochs = _named("epoch"), _named("epochs")
    assignments = _named("assignments")  # the stream of epochs, each with its assignment
    suspicions = _named("suspicions")
    fault = _named("fault")  # which epoch ended last, and why
    probe = _named("probe")  # written to learn whether Redis writes
    launcher = _named("launcher")  # the launcher's lease
    # The sums of the counts of all epochs that have ended, and the launcher's counts of faults
    # (hash).
    totals = _named("totals")

    def lease(self, worker: str) -> str:
        return self.key("leases", worker)

    # The addresses that ranks exchange before they are linked (hash by name).
    link_addresses = _of_epoch("link_addresses")
    ranks = _of_epoch("ranks")
    # The followers of ranks that have joined (hash: worker, process id).
    followers = _of_epoch("followers")
    # For how many tokens of text each rank has KV slots (hash by rank).
    kv_tokens = _of_epoch("kv_tokens")
    statistics = _of_epoch("statistics")  # the head's state: its requests and KV slots (hash)
    # The ranks' counts since the epoch began (hash by "name" or "name/label").
    counts = _of_epoch("counts")
    row_times = _of_epoch("row_times")  # of each stage's batches by their rows (hash by rank)
    # The attention backend and other choices of each rank (hash by rank).
    computing = _of_epoch("computing")
    closed = _of_epoch("closed")
    # Whether the head was notified of requests (lua/includes/notify_head.lua).
    arrived = _of_epoch("arrived")
    graph = _of_epoch("graph")
    ready = _of_epoch("ready")  # the prefix of the ready lists: one per rank, `<prefix>:<rank>`

    def joining(self, epoch: int, members: str) -> tuple[str, ...]:
        """Those of lua/join_epoch.lua; `members`: the hash of who has joined."""
        tables = (self.kv_tokens(epoch), self.row_times(epoch), self.computing(epoch))
        return (self.epoch, members, *tables)

    def draft_tokens(self, epoch: int, sequence: int) -> str:
        return self.key("epochs", epoch, "draft_tokens", sequence)

    # --- requests -----------------------------------------------------------------------------

    counter = _named("counter")
    finished = _named("finished")  # how many requests have finished
    queue, admitted = _named("queue"), _named("admitted")
    requests = _named("requests")  # the prefix of a request's keys
    request, events, reports = _of_request(), _of_request("events"), _of_request("reports")
    shared = _of_request("shared")  # what it and others have in common

    def listener(self, name: str) -> str:
        """The stream that wakes a listener which is to follow more requests."""
        return self.key("listeners", name)

    # The stream of the head's steps, which has entries while a dashboard is open.
    published_steps = _named("published_steps")
    watched = _named("watched")  # exists while a dashboard is open
    watched_request = _of_request("watched")  # and while one shows the tree of a request
    # The prefix of conversations that a later request may continue (by name), their names, the
    # oldest first (lua/keep_conversation.lua), and how many bytes they take.
    conversations = _named("conversations")
    conversation_order = _named("conversations", "order")
    conversation_bytes = _named("conversations", "bytes")
