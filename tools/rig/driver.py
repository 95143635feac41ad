"""A cluster in a process of its own, asked and watched through standard input and output.

    python -m tools.rig.driver OVERRIDE ...

Each line in is a JSON object: {"settings": [...], "prompt": text} decodes the prompt with further
`decode.*` and `verify.*` settings; with "at" it pauses when so many tokens have come, until the
next line. {"settle": epoch} waits until all ranks are in that epoch or a later one.

Each line out is one: {"ready": workers}, {"log": worker, "line": ...}, {"settled": epoch, "ranks":
workers}, {"at": tokens, "epoch": number, "ranks": workers, "pids": by worker, "redis": pid} or
{"tokens": [...], "events": [[seconds, base, tokens, epoch], ...], "gap_s": the longest wait
between two events, "faults": [...]}. Seconds are those of the machine's monotonic clock; a base
is a place in the answer. The end of standard input ends the cluster.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from pipespec.client.client import Client
from pipespec.client.own import running
from pipespec.cluster.deployment import decide
from pipespec.cluster.session import ClusterSession
from pipespec.config.compose import compose
from pipespec.controller.membership import Membership
from pipespec.controller.records import Accepted
from pipespec.errors import RankFailed, Unreachable

PROMPT = "Once upon a time there was a king who had three sons and"
LOOK_S = 0.1

_telling = threading.Lock()


def tell(message: dict[str, Any]) -> None:
    with _telling:
        print(json.dumps(message), flush=True)


def pids(cluster: ClusterSession) -> dict[str, int]:
    workers = [*cluster.deployment.workers, *cluster.deployment.spares]
    with Membership(cluster.url, cluster.namespace) as shared:
        return shared.alive(workers)


def ranks(cluster: ClusterSession) -> tuple[str, ...]:
    """The workers that hold the ranks now."""
    return cluster._recovery.assignment.workers


def settle(cluster: ClusterSession, epoch: int) -> dict[str, Any]:
    while cluster.poll():
        with suppress(Unreachable), Membership(cluster.url, cluster.namespace) as shared:
            workers, now = ranks(cluster), cluster.epoch
            joined = shared.await_attached(now, len(workers), LOOK_S)
            whole = joined == len(workers) == len(shared.alive(workers))
            if whole and now == cluster.epoch >= epoch:
                return {"settled": now, "ranks": workers}
        time.sleep(LOOK_S)
    raise RankFailed("The ranks ended.")


def answer(cluster: ClusterSession, client: Client, asked: dict[str, Any]) -> dict[str, Any]:
    config = compose(asked.get("settings", []))
    prompt = client.served.encode(asked.get("prompt", PROMPT))
    request = client.submit(
        prompt, config.verify.sampling(0), max_new_tokens=config.decode.max_new_tokens
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
        if len(tokens) - len(event.tokens) < asked.get("at", 0) <= len(tokens):
            server = cluster._recovery._server
            here = {"at": len(tokens), "epoch": cluster.epoch, "ranks": ranks(cluster)}
            tell({**here, "pids": pids(cluster), "redis": server.pid})
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
    on_log = lambda m, line: tell({"log": m, "line": line})  # noqa: E731
    with running(deployment, on_log=on_log) as (cluster, client):
        tell({"ready": cluster.deployment.workers})
        for line in sys.stdin:
            asked = json.loads(line)
            if "settle" in asked:
                tell(settle(cluster, asked["settle"]))
            else:
                tell(answer(cluster, client, asked))


if __name__ == "__main__":
    main()
