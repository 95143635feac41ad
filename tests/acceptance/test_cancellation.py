"""A cancelled request ends, frees its KV slots, and does not change the next one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from pipespec.controller import epoch_control
from pipespec.controller.cluster_status import read_status
from pipespec.controller.log_records import Accepted, Finished
from pipespec.controller.request_log import RequestLog
from pipespec.core import SamplingParams
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
def test_cancelled_request_frees_its_kv_slots(redis, decoding: bool, sync: str) -> None:
    (expected,) = cluster.reference(DEMO / "target", [SHORT], NUM_TOKENS)
    settings = *SETTINGS, f"cluster.sync={sync}"
    deployment = cluster.make_deployment(DEMO / "target", DEMO / "draft", *settings)
    where = redis.url, cluster.NAMESPACE
    epoch = epoch_control.begin_epoch(*where)
    with client_of(*where) as client:
        greedy = SamplingParams()
        doomed = [client.submit(LONG, greedy, max_new_tokens=56) for _ in range(3)]
        last = client.submit(SHORT, greedy, max_new_tokens=NUM_TOKENS)
        with RequestLog(redis.url, namespace=cluster.NAMESPACE, epoch=epoch) as log:
            log.close_queue()
        with ThreadPoolExecutor(1) as ranks:
            serving = ranks.submit(cluster.serve, deployment, redis, epoch)
            for request in doomed:  # once it is being decoded, or as soon as it is open
                if decoding:
                    assert isinstance(next(client.events(request)), Accepted)
                while read_status(*where).open == 0:
                    pass
                client.cancel(request)
                assert events_of(*where, request)[-1] == Finished("cancelled")
            serving.result()
    for request in doomed:
        *accepted, end = events_of(*where, request)
        assert end == Finished("cancelled")
        assert all(isinstance(event, Accepted) for event in accepted)
        assert bool(accepted) or not decoding
        assert sorted(reports_of(*where, request, deployment.num_ranks)) == [0, 1, 2, 3]
    decided = [event for event in events_of(*where, last) if isinstance(event, Accepted)]
    assert [token for event in decided for token in event.tokens] == expected
