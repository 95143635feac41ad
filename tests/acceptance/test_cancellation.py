"""A cancelled request ends, frees its KV slots, and does not change the next one."""

from __future__ import annotations

import threading

import pytest

from pipespec.controller import epoch_control
from pipespec.controller.cluster_status import read_status
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.log_records import Accepted, Event, Finished
from pipespec.controller.request_log import RequestLog
from pipespec.system.folders import resource_dir
from tools.rig import cluster
from tools.rig.log import client_of, events_of, reports_of

DEMO = resource_dir("demo")
LONG = tuple(range(100, 300))  # prompts of which the KV pools hold one
SHORT = tuple(range(20, 33))
NUM_TOKENS = 12
SETTINGS = ("cluster.stages=3", "policy.width=8", "decode.prefill_chunk=16", "model.context=256")


@pytest.mark.parametrize("sync", ["lockstep", "free"])
@pytest.mark.parametrize("decoding", [False, True])
def test_cancelled_request_frees_its_kv_slots(decoding: bool, sync: str) -> None:
    (expected,) = cluster.reference(DEMO / "target", [SHORT], NUM_TOKENS)
    deployment = cluster.make_deployment(
        DEMO / "target", DEMO / "draft", *SETTINGS, f"cluster.sync={sync}"
    )
    with EmbeddedRedis() as server:
        epoch = epoch_control.begin_epoch(server.url, cluster.NAMESPACE)

        def log() -> RequestLog:
            return RequestLog(server.url, namespace=cluster.NAMESPACE, epoch=epoch)

        def events(request: int) -> list[Event]:
            return events_of(server.url, cluster.NAMESPACE, request)

        def cancel(request: int) -> None:
            """Once it is being decoded, or as soon as it is open."""
            with log() as user:
                if decoding:
                    with client_of(server.url, cluster.NAMESPACE) as client:
                        assert isinstance(next(client.events(request)), Accepted)
                while read_status(server.url, cluster.NAMESPACE).open == 0:
                    pass
                user.cancel(request)
                assert events(request)[-1] == Finished("cancelled")

        with log() as user:
            doomed = [user.enqueue(prompt=LONG, max_new_tokens=56) for _ in range(3)]
            last = user.enqueue(prompt=SHORT, max_new_tokens=NUM_TOKENS)
            user.close_queue()
            leaving = threading.Thread(target=lambda: [cancel(request) for request in doomed])
            leaving.start()
            cluster.serve(deployment, server, epoch)
            leaving.join()
            for request in doomed:
                *accepted, end = events(request)
                assert end == Finished("cancelled")
                assert all(isinstance(event, Accepted) for event in accepted)
                assert bool(accepted) or not decoding
                reported = reports_of(server.url, cluster.NAMESPACE, request, deployment.num_ranks)
                assert sorted(reported) == [0, 1, 2, 3]
            decided = [event for event in events(last) if isinstance(event, Accepted)]
            assert [token for event in decided for token in event.tokens] == expected
