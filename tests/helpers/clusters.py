"""Clusters of real processes that several tests ask.

To start one takes more than ten seconds of computing, most of it imports; to ask it takes one.

    @pytest.fixture(scope="module")
    def clusters() -> Iterator[Clusters]:
        with Clusters("cluster.stages=3") as clusters:
            yield clusters

    clusters.running("policy=root").client.submit(...)
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

from pipespec.cluster.decide import decide
from pipespec.config.compose import compose
from tools.rig.requests import Running, running


class Clusters:
    """One cluster for each set of settings, started when it is first asked for.

    `common` are settings of all of them.
    """

    def __init__(self, *common: str):
        self._common = common
        self._running: dict[tuple[str, ...], tuple[Running, ExitStack]] = {}

    def running(self, *settings: str) -> Running:
        """The cluster of these settings."""
        if settings not in self._running:
            deployment = decide(compose([*self._common, *settings]))
            with ExitStack() as stack:
                cluster = stack.enter_context(running(deployment))
                self._running[settings] = cluster, stack.pop_all()
        return self._running[settings][0]

    @contextmanager
    def last(self, *settings: str) -> Iterator[Running]:
        """The cluster of these settings, for whoever needs it last: it ends with the block, as
        one that was started there would."""
        cluster = self.running(*settings)
        _, stack = self._running.pop(settings)
        with stack:
            yield cluster

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with ExitStack() as stack:
            for _, ending in self._running.values():
                stack.push(ending)
            self._running.clear()
