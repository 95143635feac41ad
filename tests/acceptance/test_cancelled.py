"""A request that is cancelled ends, frees what it held, and does not show in the next one."""

from __future__ import annotations

import threading

import pytest

from pipespec.controller import epochs
from pipespec.controller.overview import look
from pipespec.controller.records import Accepted, Finished
from pipespec.controller.requests import RequestLog
from pipespec.controller.server import EmbeddedRedis
from pipespec.system.resources import resource_dir
from tools.rig import cluster

DEMO = resource_dir("demo")
LONG = tuple(range(100, 300))  # prompts of which the KV pools hold one
SHORT = tuple(range(20, 33))
NUM_TOKENS = 12
SETTINGS = ("cluster.stages=3", "feed.width=8", "decode.prefill_chunk=16", "model.context=256")


@pytest.mark.parametrize("sync", ["lockstep", "free"])
@pytest.mark.parametrize("decoding", [False, True])
def test_what_is_cancelled_leaves_nothing(decoding: bool, sync: str) -> None:
    (expected,) = cluster.reference(DEMO / "target", [SHORT], NUM_TOKENS)
    deployment = cluster.make_deployment(
        DEMO / "target", DEMO / "draft", *SETTINGS, f"cluster.sync={sync}"
    )
    with EmbeddedRedis() as server:
        epoch = epochs.begin(server.url, cluster.NAMESPACE)

        def log() -> RequestLog:
            return RequestLog(server.url, namespace=cluster.NAMESPACE, epoch=epoch)

        def cancel(request: int) -> None:
            """Once it is being decoded, or as soon as it is open."""
            with log() as user:
                if decoding:
                    assert isinstance(next(user.stream(request)), Accepted)
                while look(server.url, cluster.NAMESPACE).open == 0:
                    pass
                user.cancel(request)
                assert [*user.stream(request)][-1] == Finished("cancelled")

        with log() as user:
            doomed = [user.enqueue(prompt=LONG, max_new_tokens=56) for _ in range(3)]
            last = user.enqueue(prompt=SHORT, max_new_tokens=NUM_TOKENS)
            user.close_queue()
            leaving = threading.Thread(target=lambda: [cancel(request) for request in doomed])
            leaving.start()
            cluster.serve(deployment, server, epoch)
            leaving.join()
            for request in doomed:
                *accepted, end = user.stream(request)
                assert end == Finished("cancelled")
                assert all(isinstance(event, Accepted) for event in accepted)
                assert bool(accepted) or not decoding
                reported = user.reports(request, deployment.num_ranks, timeout=10)
                assert sorted(reported) == [0, 1, 2, 3]
            told = [event for event in user.stream(last) if isinstance(event, Accepted)]
            assert [token for event in told for token in event.tokens] == expected
