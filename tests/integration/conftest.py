"""A Redis for the tests of a module, and in it a namespace and a head for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from pipespec.controller.client import Controller
from pipespec.controller.server import EmbeddedRedis
from tests.helpers.log import head_of

names = count()


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def namespace() -> str:
    return f"test-{next(names)}"


@pytest.fixture
def head(server: EmbeddedRedis, namespace: str) -> Iterator[Controller]:
    with head_of(server, namespace) as controller:
        yield controller
