"""A cluster in its own process, controlled through standard input and output.

    python -m tools.rig.driver OVERRIDE ...

Each input line is a JSON object: {"settings": [...], "prompt": text} decodes the prompt with
further `decode.*` and `sampling.*` settings; with "at" it pauses after so many tokens, until the
next line. {"settle": epoch} waits until all ranks are in that epoch or a later one.

Each output line is one: {"ready": workers}, {"log": worker, "line": ...}, {"settled": epoch,
"ranks": workers}, {"at": tokens, "epoch": number, "ranks": workers, "pids": by worker, "redis":
pid} or {"tokens": [...], "events": [[seconds, base, tokens, epoch], ...], "gap_s": the longest wait
between two events, "faults": [...]}. Seconds are those of the machine's monotonic clock; a base is
a position in the answer. The end of standard input ends the cluster.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from pipespec.client.local_cluster import running
from pipespec.client.sync_client import Client
from pipespec.cluster.decide import decide
from pipespec.cluster.session import ClusterSession
from pipespec.config.compose import compose
from pipespec.controller.log_records import Accepted
from pipespec.controller.membership import Membership
from pipespec.errors import RankFailed, Unreachable

PROMPT = "Once upon a time there was a king who had three sons and"
POLL_S = 0.1

_sending = threading.Lock()


def send(message: dict[str, Any]) -> None:
    with _sending:
        print(json.dumps(message), flush=True)


def pids(cluster: ClusterSession) -> dict[str, int]:
    workers = [*cluster.deployment.workers, *cluster.deployment.spares]
    with Membership(cluster.url, cluster.namespace) as shared:
        return shared.alive(workers)


def ranks(cluster: ClusterSession) -> tuple[str, ...]:
    """The workers of the ranks of this epoch."""
    return cluster.state.assignment.workers


def settle(cluster: ClusterSession, epoch: int) -> dict[str, Any]:
    while cluster.poll():
        with suppress(Unreachable), Membership(cluster.url, cluster.namespace) as shared:
            workers, now = ranks(cluster), cluster.epoch
            joined = shared.await_attached(now, len(workers), POLL_S)
            whole = joined == len(workers) == len(shared.alive(workers))
            if whole and now == cluster.epoch >= epoch:
                return {"settled": now, "ranks": workers}
        time.sleep(POLL_S)
    raise RankFailed("The ranks ended.")


def answer(cluster: ClusterSession, client: Client, message: dict[str, Any]) -> dict[str, Any]:
    config = compose(message.get("settings", []))
    prompt = client.served.encode(message.get("prompt", PROMPT))
    request = client.submit(
        prompt, config.sampling.params(0), max_new_tokens=config.decode.max_new_tokens
    )
    tokens: list[int] = []
    events: list[tuple[float, int, int, int]] = []
    before, gap = time.monotonic(), 0.0
    for event in client.events(request):
        now = time.monotonic()
        gap, before = max(gap, now - before), now
        if not isinstance(event, Accepted):
            continue
        events.append((now, event.base - len(prompt), len(event.tokens), cluster.epoch))
        tokens += event.tokens
        if len(tokens) - len(event.tokens) < message.get("at", 0) <= len(tokens):
            server = cluster.redis.server
            state = {"at": len(tokens), "epoch": cluster.epoch, "ranks": ranks(cluster)}
            send({**state, "pids": pids(cluster), "redis": server.pid})
            sys.stdin.readline()
            before = time.monotonic()
    return {
        "tokens": tokens,
        "events": events,
        "gap_s": gap,
        "faults": [fault.reason for fault in cluster.faults],
    }


def main() -> None:
    deployment = decide(compose(sys.argv[1:]))
    on_log = lambda m, line: send({"log": m, "line": line})  # noqa: E731
    with running(deployment, on_log=on_log) as (cluster, client):
        send({"ready": cluster.deployment.workers})
        for line in sys.stdin:
            message = json.loads(line)
            if "settle" in message:
                send(settle(cluster, message["settle"]))
            else:
                send(answer(cluster, client, message))


if __name__ == "__main__":
    main()
