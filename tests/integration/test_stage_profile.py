"""What the ranks of a cluster are made of, seen from its Redis."""

import pytest

from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.redis_connection import RedisConnection
from pipespec.controller.redis_keys import RedisKeys
from pipespec.timing.batch_times import unpack
from tests.helpers import models
from tools.rig import cluster


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        # A chunk of a prompt may come beside running answers, whatever the policy.
        (("policy=root",), [1, 4, 16, 40]),
        (("policy=best_first", "policy.width=8"), [1, 4, 16, 40]),
        # One request at a time: what guesses cost, where the policy asks for it.
        (("policy=best_first", "policy.width=8", "scheduler.max_num_seqs=1"), [1, 4, 8]),
        (("policy=level", "policy.width=8", "scheduler.max_num_seqs=1"), []),
    ],
)
def test_every_stage_profiles_its_batches_before_the_first_one(tmp_path, settings, sizes):
    """No request comes at all."""
    tiny = models.build("llama", tmp_path, num_hidden_layers=2)
    deployment = cluster.make_deployment(
        tiny, tiny, "cluster.stages=2", "decode.prefill_chunk=40", "model.context=32", *settings
    )
    with EmbeddedRedis() as server:
        assert cluster.decode(deployment, server, []) == []
        pipe = RedisConnection(server.url)
        epoch = int(pipe.call("GET", RedisKeys(cluster.NAMESPACE).epoch))
        told = pipe.call("HGETALL", RedisKeys(cluster.NAMESPACE).row_times(epoch))
        pipe.close()
    known = {int(rank): unpack(word.decode()) for rank, word in zip(*[iter(told)] * 2, strict=True)}
    assert {rank: [rows for rows, _ in told.points] for rank, told in known.items()} == (
        {1: sizes, 2: sizes} if sizes else {}
    )
