"""Gives hosts the weights of a new assignment before its epoch begins.

While they are under way, the recovery goes on looking after the other hosts: it is told
WeightsPending, and asks again.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from functools import partial

from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.deployment.rank_assignment import RankAssignment, WeightsPending
from pipespec.cluster.weights.distribution import Distribute
from pipespec.cluster.weights.local import shares_caches
from pipespec.errors import PipespecError, RankFailed

log = logging.getLogger(__name__)


class WeightMoves:
    """Plans assignments without lost workers, for one thread. `distribute` gives the hosts of a
    deployment their weights; `deployment` is the cluster as it is if no worker is lost."""

    def __init__(self, deployment: Deployment, distribute: Distribute) -> None:
        self.deployment = deployment
        self._distribute = distribute
        self._done: set[str] = set()  # assignments whose hosts have their weights
        self._thread: threading.Thread | None = None

    def use(self, deployment: Deployment) -> None:
        """Plan for another layout from now on: a host has joined or left."""
        self.deployment = deployment
        self._done.clear()

    def plan(self, away: set[str]) -> RankAssignment:
        """The assignment to the workers that are left, once their hosts have their weights. If
        these cannot be moved, the ranks say what is lacking when they load.

        Raises ConfigError if these workers are too few, WeightsPending before their hosts are
        ready.
        """
        placement = self.deployment.without(away)
        found = self.deployment.assignment(placement)
        if all(map(shares_caches, self.deployment.hosts)) or found.encode() in self._done:
            return found
        if self._thread is None or not self._thread.is_alive():
            hosts = (host for host in self.deployment.hosts if not away.issuperset(host.workers))
            changed = replace(
                self.deployment,
                fetched=False,
                placement=placement,
                layers=placement.layers,
                hosts=tuple(hosts),
            )
            arguments = changed, found.encode()
            self._thread = threading.Thread(target=self._move, args=arguments, daemon=True)
            self._thread.start()
        raise WeightsPending

    def _move(self, deployment: Deployment, key: str) -> None:
        warn = partial(log.warning, "weights of the new layout: %s")
        try:
            self._distribute(deployment, on_warning=warn)
        except RankFailed:  # the cluster ends
            pass
        except PipespecError as error:
            warn(str(error))
        finally:
            self._done.add(key)
