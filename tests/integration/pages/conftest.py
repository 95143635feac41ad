"""The cluster, the server and the browser that the tests of all pages share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers.browser import KEY, View, chromium
from tests.helpers.sandbox import Sandbox
from tests.helpers.serving import NAME, Server, cluster_up, serving

SETTINGS = (
    "cluster.stages=2",
    "cluster.devices=[cpu]",
    "model.dtype=float32",
    "model.context=1024",
    "scheduler.max_num_seqs=40",
)
# Names of this machine: of a page of somebody else, and of a server as its network calls it.
HOSTS = "--host-resolver-rules=MAP evil.test 127.0.0.1,MAP lan.test 127.0.0.1"


@pytest.fixture(scope="package")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with cluster_up(tmp_path_factory.mktemp("pages"), *SETTINGS) as place:
        yield place


@pytest.fixture(scope="package")
def server(place: Sandbox) -> Iterator[Server]:
    with serving(place, "--on", NAME, "--api-key", KEY, "--limit", "shutdown_timeout=1") as server:
        server.http.headers.update({"Authorization": f"Bearer {KEY}"})
        yield server


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    with chromium(HOSTS) as browser:
        yield browser


@pytest.fixture
def opened(browser: Any, server: Server) -> Iterator[Callable[..., View]]:
    """Opens pages of the server, which close with the test."""
    views: list[View] = []

    def open_page(path: str = "/", **options: Any) -> View:
        views.append(View(browser, server.url, path, **options))
        return views[-1]

    yield open_page
    for view in views:
        view.close()
