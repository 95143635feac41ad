"""A head without a cluster, and what it does with the request log, one request at a time."""

from collections.abc import Sequence

from pipespec.controller import epoch_control
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.log_records import Accepted
from pipespec.controller.rank_controller import Controller
from pipespec.controller.request_log import RequestLog
from pipespec.core import Request, TokenLogprobs


def head_of(server: EmbeddedRedis, namespace: str) -> Controller:
    """Rank 0 of the next epoch of a namespace."""
    epoch = epoch_control.begin_epoch(server.url, namespace)
    return Controller(server.url, namespace=namespace, epoch=epoch, rank=0)


def accept(
    log: RequestLog,
    request: int,
    base: int,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprobs] = (),
) -> None:
    """Appends tokens to one request."""
    log.accept([(request, Accepted(base, tuple(tokens), tuple(logprobs)))])


def take(head: Controller, *, wait: bool = True) -> Request | None:
    """The next request off the queue; None: there is none, or there will be none."""
    found = head.next_requests(1, wait=wait)
    return found[0][0] if found else None
