"""The cluster of an `LLM`: its settings, from the arguments, and the thread that runs it."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from pipespec.client.local_cluster import own_entry
from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import RunningCluster
from pipespec.cluster import session
from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.session import ClusterSession
from pipespec.errors import ConfigError, PipespecError, RankFailed
from pipespec.head.policies.policy import SpeculationPolicy

Path = str | os.PathLike[str]
# How often the ranks, and whether the cluster is wanted, are looked at.
LOOK_S = 0.1


def overrides_of(
    model: Path | None,
    draft: Path | None,
    stages: int | None,
    hosts: Path | None,
    settings: Mapping[str, Any],
) -> list[str]:
    if hosts is not None and stages is not None:
        raise ConfigError(
            f"hosts={os.fspath(hosts)} and stages={stages} are both given, but a hosts file says "
            "how many stages there are; leave one out."
        )
    if draft is not None and model is None:
        raise ConfigError(
            f"draft={os.fspath(draft)} is given without a model; pass the model that it drafts for."
        )
    if "trace" in settings:
        raise ConfigError("An LLM has no setting 'trace'; leave it to `pipespec generate`.")
    paths = {"model.target": model, "model.draft": draft, "cluster": hosts}
    found = [f"{name}={os.fspath(path)}" for name, path in paths.items() if path is not None]
    if stages is not None:
        found.append(f"cluster.stages={stages}")
    return [*found, *(f"{name}={value_text(value)}" for name, value in settings.items())]


def check_policy(policy: object, settings: Mapping[str, Any]) -> None:
    if policy is None:
        return
    kind = type(policy)
    if not isinstance(policy, SpeculationPolicy):
        raise ConfigError(
            f"policy is {policy!r:.60}, but must be a SpeculationPolicy; name one that is built in "
            'by settings={"policy": ...}.'
        )
    if kind.__module__ == "__main__":
        raise ConfigError(
            f"The policy {kind.__name__} is defined in __main__, which ranks cannot import; put "
            "its class into a module of its own."
        )
    for name in settings:
        if name.partition(".")[0] == "policy":
            raise ConfigError(f"policy and the setting {name!r} are both given; leave one out.")


def value_text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_item, value))}]"
    return str(value)


def _item(value: Any) -> str:
    if not isinstance(value, str):
        return value_text(value)
    return QuotedString(text=value, quote=Quote.single).with_quotes()


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
