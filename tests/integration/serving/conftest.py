"""The cluster and the server that the tests of this folder share."""

from collections.abc import Iterator

import openai
import pytest

from tests.helpers.sandbox import Sandbox
from tests.helpers.serving import NAME, Server, cluster_up, serving

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


@pytest.fixture(scope="package")
def server(place: Sandbox) -> Iterator[Server]:
    with serving(place, "--on", NAME) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client
