"""Lets hosts join the cluster of `pipespec up --invite`: some before it begins, others later."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from pipespec.cli.invite import MINUTES, JoinOptions, described, sentences
from pipespec.cluster.diagnostics.measure_hosts import MeasuredHost
from pipespec.cluster.host_link.join_server import JoinServer
from pipespec.cluster.join.host_changes import measured, with_hosts
from pipespec.cluster.join.look_after_host import LOOK_S, look_after_host
from pipespec.cluster.redis_setup import own_address
from pipespec.config.hosts import HostsFile, load_hosts
from pipespec.errors import ConfigError, PipespecError
from pipespec.placement.costs import Problem
from pipespec.system.network_interfaces import LOOPBACK, source_address
from pipespec.transport.transport_settings import NCCL

if TYPE_CHECKING:
    from pipespec.cluster.deployment.deployment import Deployment
    from pipespec.cluster.host_link.host_session import HostSession
    from pipespec.cluster.session import ClusterSession
    from pipespec.config.schema import Config

# The way to them leads through the interface of the default route (RFC 5737, 3849); nothing is
# sent.
ANYWHERE = ("192.0.2.1", "2001:db8::1")
# Called with a host's name and a sentence.
OnLog = Callable[[str, str], None]


class HostAdmission:
    def __init__(self, options: JoinOptions, deployment: Deployment, on_log: OnLog) -> None:
        self._options, self._on_log = options, on_log
        self._patience_s = deployment.config.cluster.patience_s
        self._early: queue.SimpleQueue[HostSession] = queue.SimpleQueue()
        self._with_it: set[str] = set()  # hosts with which the cluster begins
        self._cluster: ClusterSession | None = None
        self._begun = threading.Event()
        assert deployment.open_to is not None
        taken = [host.name for host in deployment.hosts]
        self.server = JoinServer(deployment.open_to, options.port, self._attend, taken)

    def await_hosts(self, deployment: Deployment, problem: Problem) -> Deployment:
        """Invite as many hosts as the cluster is to begin with, and lay it out over them and those
        of `deployment`, of which `problem` was measured. Raises ConfigError if the target does not
        fit."""
        count = self._options.hosts - len(deployment.hosts)
        if count <= 0:
            return deployment
        found: dict[HostSession, MeasuredHost] = {}
        self._invite(count)
        while True:
            for gone in [each for each in found if each.dismissed]:
                del found[gone]
                self._on_log(gone.host.name, "it has left before the cluster began")
                self._invite(1)
            if len(found) == count:
                break
            try:
                session = self._early.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            try:
                session.tell("the host is measured")
                found[session] = measured(session.host, deployment)
                session.tell("the cluster begins once all hosts are there")
            except PipespecError as error:
                self._on_log(session.host.name, f"it does not join: {error}")
                session.dismiss(f"this host does not join: {error}", failed=True)
                self._invite(1)
        hosts = [(session.host, each) for session, each in found.items()]
        self._with_it = {host.name for host, _ in hosts}
        return replace(with_hosts(deployment, hosts, problem), changes=0)

    def begin(self, cluster: ClusterSession) -> None:
        self._cluster = cluster
        self._begun.set()

    def _invite(self, count: int) -> None:
        for _ in range(count):
            invitation = described(self.server.invite(MINUTES * 60), MINUTES)
            self._on_log("waiting", sentences(invitation).rstrip())

    def _attend(self, session: HostSession) -> None:
        if not self._begun.is_set():
            self._early.put(session)
        while not self._begun.wait(LOOK_S):
            if session.leaving or session.lost_s > self._patience_s:
                session.dismiss("this host has left before the cluster began", failed=False)
                return
        assert self._cluster is not None
        look_after_host(
            session,
            self._cluster.changes,
            self._patience_s,
            self._on_log,
            joined=session.host.name in self._with_it,
        )


def hosts_of(config: Config) -> HostsFile:
    """The hosts that are known before any joins, as a hosts file says it. Raises ConfigError."""
    from pipespec.cluster.decide import host_here

    if config.cluster.hosts is not None:
        return load_hosts(config.cluster.hosts)
    here = host_here(config.cluster)
    return HostsFile("here", (here,), draft=next(iter(here.members)), spares=config.cluster.spares)


def require_open(config: Config) -> None:
    """Raise ConfigError if settings do not allow that hosts join."""
    if config.cluster.groups is not None:
        raise ConfigError("Hosts change the number of stages, so leave cluster.groups out.")
    if config.transport.backend == NCCL:
        raise ConfigError(
            "Hosts that join are linked by gloo, so set transport.backend to auto or gloo."
        )


def _own_default_address() -> str | None:
    for anywhere in ANYWHERE:
        with suppress(OSError):
            return source_address(anywhere)
    return None


def open_to_hosts(deployment: Deployment, options: JoinOptions) -> Deployment:
    """The deployment of a cluster that hosts can join. Raises ConfigError."""
    address = options.address or own_address(deployment.hosts)
    if address is None:
        address = _own_default_address()
        if address is None:
            raise ConfigError(
                "This machine has no default route, by which others could reach it; name its "
                "address with --at."
            )
    hosts = (
        replace(host, address=address) if host.local and host.address == LOOPBACK else host
        for host in deployment.hosts
    )
    return replace(deployment, open_to=address, hosts=tuple(hosts))
