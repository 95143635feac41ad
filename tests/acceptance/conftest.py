from collections.abc import Iterator
from contextlib import closing

import pytest

from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.redis_connection import RedisConnection


@pytest.fixture(scope="module")
def redis_server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis(redis_server: EmbeddedRedis) -> EmbeddedRedis:
    """An empty Redis: a test that failed may have left requests."""
    with closing(RedisConnection(redis_server.url)) as connection:
        connection.call("FLUSHALL")
    return redis_server
