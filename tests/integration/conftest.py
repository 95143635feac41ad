"""A Redis for a module, a namespace and a head in it for each test, and a place for commands."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.rank_controller import Controller
from pipespec.controller.redis_connection import RedisConnection
from tests.helpers.log import head_of
from tests.helpers.sandbox import Sandbox

names = count()


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis() -> Iterator[EmbeddedRedis]:
    """A Redis for one test."""
    with EmbeddedRedis() as redis:
        yield redis


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """What runs the tests that are coroutines and marked `anyio`."""
    return "asyncio"


@pytest.fixture
def namespace() -> str:
    return f"test-{next(names)}"


@pytest.fixture
def head(server: EmbeddedRedis, namespace: str) -> Iterator[Controller]:
    with head_of(server, namespace) as controller:
        yield controller


@pytest.fixture
def pipe(server: EmbeddedRedis) -> Iterator[RedisConnection]:
    with RedisConnection(server.url) as pipe:
        yield pipe


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """A place of one test; commands that run in its process use it too."""
    with Sandbox(tmp_path) as place:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        yield place
