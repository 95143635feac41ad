"""The cluster that the tests of servers share; each starts servers of its own on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.sandbox import Sandbox
from tests.helpers.serving import cluster_up

CONTEXT = 1024
SETTINGS = (
    "cluster.stages=2",
    "cluster.devices=[cpu]",
    "model.dtype=float32",
    f"model.context={CONTEXT}",
    "scheduler.max_num_seqs=16",
    "policy.row_cost=0.0001",  # speculates, however long that takes
    "proposer=hybrid",
)


@pytest.fixture(scope="package")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with cluster_up(tmp_path_factory.mktemp("serving"), *SETTINGS) as place:
        yield place
