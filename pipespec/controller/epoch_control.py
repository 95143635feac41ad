"""Begins and ends the epochs of a namespace. Each start or recovery of a cluster begins one."""

from __future__ import annotations

from pipespec.controller.log_records import FAILED
from pipespec.controller.lua_scripts import evalsha
from pipespec.controller.rank_controller import KEEP_STALE_S
from pipespec.controller.redis_connection import RedisConnection
from pipespec.controller.redis_keys import RedisKeys
from pipespec.controller.request_log import KEEP_FINISHED_S

# How many clusters in a row may fail with a request that gets no token before it is given up.
MAX_FAILED_CLUSTERS = 3


def begin_epoch(
    url: str, namespace: str, assignment: str = "", *, most_failed: int | str = ""
) -> int:
    """Ends the current epoch of a namespace, if there is one, and begins the next; its number.
    `assignment` is the text that `Membership.epoch` returns with it. Raises Unreachable."""
    keys = RedisKeys(namespace)
    names = (
        keys.epoch,
        keys.queue,
        keys.admitted,
        keys.assignments,
        keys.requests,
        keys.finished,
        keys.totals,
    )
    arguments = (keys.epochs, KEEP_STALE_S, assignment, most_failed, FAILED, KEEP_FINISHED_S)
    with RedisConnection(url) as pipe:
        pipe.load_scripts()
        begun: int = pipe.call(*evalsha("new_epoch", names, *arguments))
        return begun


def end_epoch(url: str, namespace: str, *, failed: bool) -> None:
    """Ends the current epoch of a namespace; its cluster will begin no other. A request with which
    MAX_FAILED_CLUSTERS clusters in a row have failed before a token of it was accepted is given up,
    as it may be the cause. Raises Unreachable."""
    begin_epoch(url, namespace, most_failed=MAX_FAILED_CLUSTERS if failed else "")


def delete_namespace(url: str, namespace: str) -> None:
    """Deletes every key of a namespace; for clusters of one request. Raises Unreachable."""
    with RedisConnection(url) as pipe:
        cursor = b"0"
        while True:
            cursor, names = pipe.call("SCAN", cursor, "MATCH", RedisKeys(namespace).everything)
            if names:
                pipe.call("DEL", *names)
            if cursor == b"0":
                return
