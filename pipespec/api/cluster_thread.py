"""A cluster that a thread of this process starts, watches and ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from pipespec.client.local_cluster import own_entry
from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import RunningCluster
from pipespec.cluster import session
from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.session import ClusterSession
from pipespec.errors import PipespecError, RankFailed
from pipespec.system.resource_limits import require_resources

# How often the ranks, and whether the cluster is wanted, are looked at.
LOOK_S = 0.1


class _Unwanted(Exception):
    """Nothing needs the cluster any more: its ranks end at once."""


class ClusterThread:
    """Runs a cluster until `stop`, or until the main thread of the process has ended. No signal
    handler is installed, and the ranks have a session of their own, so Ctrl-C reaches only the
    caller. The thread is not a daemon: the interpreter ends after the cluster. `ready` is its
    registry entry once all ranks are loaded, or why it did not start; `ended` is set when all its
    processes are gone."""

    def __init__(self, deployment: Deployment, settings: Sequence[str]):
        self.ready: Future[RunningCluster] = Future()
        self.ended: Future[None] = Future()
        self._session: ClusterSession | None = None
        self._failure: PipespecError | None = None
        self._unwanted = threading.Event()
        self._thread = threading.Thread(
            target=self._main, args=(deployment, tuple(settings)), name="pipespec-cluster"
        )
        self._thread.start()

    def stop(self) -> None:
        self._unwanted.set()

    # --- for clients --------------------------------------------------------------------------

    def check(self) -> None:
        if self._failure is not None:
            raise RankFailed(str(self._failure))
        if self._unwanted.is_set():
            raise RankFailed("The cluster was closed before the request was finished.")

    def reporters(self) -> tuple[int, bool]:
        assert self._session is not None, "it is ready"
        return self._session.reporters()

    # --- the thread ---------------------------------------------------------------------------

    def _main(self, deployment: Deployment, settings: Sequence[str]) -> None:
        try:
            self._run(deployment, settings)
        except _Unwanted:
            self._fail_start(RankFailed("The cluster was closed before it was ready."))
        except BaseException as error:  # noqa: BLE001 - raised where a caller waits for it
            if isinstance(error, PipespecError):
                self._failure = error
            else:
                self._failure = RankFailed(f"The cluster failed: {error!r}")
            self._fail_start(error)
        finally:
            self.ended.set_result(None)

    def _run(self, deployment: Deployment, settings: Sequence[str]) -> None:
        require_resources()
        with session.start_agents(deployment) as agents:
            served = ModelInfo.of(deployment)
            with session.start_cluster(
                deployment, agents, lambda ranks, of: self._require_wanted(0)
            ) as cluster:
                self._session = cluster
                self.ready.set_result(own_entry(cluster, served, settings))
                while cluster.poll():
                    self._require_wanted(LOOK_S)
        raise RankFailed("The ranks of the cluster ended by themselves.")

    def _require_wanted(self, timeout: float) -> None:
        if self._unwanted.wait(timeout) or not threading.main_thread().is_alive():
            raise _Unwanted

    def _fail_start(self, error: BaseException) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
