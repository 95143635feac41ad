"""Lets hosts join the cluster of `pipespec up --invite`, some before it begins, others later, and
looks after each until it has left."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from pipespec.cli.invite import MINUTES, JoinOptions, described, sentences
from pipespec.cluster.decide import host_here
from pipespec.cluster.deployment.deployment import Deployment, own_address
from pipespec.cluster.diagnostics.measure_hosts import MeasuredHost
from pipespec.cluster.host_link.host_session import HostSession
from pipespec.cluster.host_link.join_server import JoinServer
from pipespec.cluster.join.host_changes import HostChanges, measured, with_hosts
from pipespec.cluster.join.host_steps import HostSteps
from pipespec.cluster.session import ClusterSession
from pipespec.config.hosts import Host, HostsFile, load_hosts
from pipespec.config.schema import Config
from pipespec.errors import ConfigError, HostFailed, PipespecError
from pipespec.placement.costs import Problem
from pipespec.system.network_interfaces import LOOPBACK, source_address

# The way to them leads through the interface of the default route (RFC 5737, 3849); nothing is
# sent.
ANYWHERE = ("192.0.2.1", "2001:db8::1")
# Seconds between two checks of a host.
LOOK_S = 0.5
# Seconds between two tries to have the others go on without a host that is gone.
RETRY_S = 5.0
# How much longer than the cluster waits for its workers a host may be away.
LONGER_S = 10.0
# Called with a host's name and a sentence.
OnLog = Callable[[str, str], None]


class HostAdmission:
    def __init__(self, options: JoinOptions, deployment: Deployment, on_log: OnLog) -> None:
        self._options, self._on_log = options, on_log
        self._patience_s = deployment.config.cluster.patience_s
        self._alone = deployment
        # Hosts that came before the cluster began; None: it does not join.
        self._early: queue.SimpleQueue[tuple[HostSession, MeasuredHost | None]]
        self._early = queue.SimpleQueue()
        self._with_it: set[HostSession] = set()  # hosts with which the cluster begins
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
            with suppress(queue.Empty):
                session, its_figures = self._early.get(timeout=LOOK_S)
                if its_figures is None:
                    self._invite(1)
                else:
                    found[session] = its_figures
        hosts = [(session.host, each) for session, each in found.items()]
        self._with_it = set(found)
        return with_hosts(deployment, hosts, problem)

    def begin(self, cluster: ClusterSession) -> None:
        self._cluster = cluster
        self._begun.set()

    def _invite(self, count: int) -> None:
        for _ in range(count):
            invitation = described(self.server.invite(MINUTES * 60), MINUTES)
            self._on_log("waiting", sentences(invitation).rstrip())

    def _attend(self, session: HostSession) -> None:
        if not self._begun.is_set():
            figures = self._measured(session)
            self._early.put((session, figures))
            if figures is None:
                return
            session.tell("the cluster begins once all hosts are there")
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
            joined=session in self._with_it,
        )

    def _measured(self, session: HostSession) -> MeasuredHost | None:
        """The figures of a host that came before the cluster began; None: it does not join."""

        def require() -> None:
            if session.leaving or session.lost_s > self._patience_s or session.dismissed:
                raise HostFailed("it has left before the cluster began")

        steps = HostSteps(session.host.name, session.tell, require)
        try:
            return steps.run(partial(measured, session.host, self._alone, steps))
        except PipespecError as error:
            self._on_log(session.host.name, f"it does not join: {error}")
            session.dismiss(f"this host does not join: {error}", failed=not session.leaving)
            return None


def look_after_host(
    session: HostSession,
    changes: HostChanges,
    patience_s: float,
    on_log: OnLog,
    *,
    joined: bool = False,
) -> None:
    """Give a host its ranks, and take them from it when it leaves, fails or stays away, until the
    cluster ends. `patience_s`: how long the cluster waits for a lost host. `on_log`: called with
    the host's name and a sentence. `joined`: the cluster has begun with this host."""
    name = session.host.name

    def tell(sentence: str) -> None:
        on_log(name, sentence)
        session.tell(sentence)

    def leaving() -> bool:
        return session.leaving or session.lost_s > patience_s + LONGER_S

    try:
        if joined:
            tell(f"it computes {changes.ranks_of(session.host)}")
        else:
            changes.join(session.host, tell, leaving)
    except PipespecError as error:
        if changes.over():
            return
        on_log(name, f"it does not join: {error}")
        session.dismiss(f"this host does not join: {error}", failed=not session.leaving)
        go_on_without(name, changes, on_log)
        return
    told = changes.ranks_of(session.host)
    while True:
        session.changed.wait(LOOK_S)
        session.changed.clear()
        if changes.over():
            return
        computes = changes.ranks_of(session.host)
        if computes and computes != told:
            tell(f"it computes {computes}")
        told = computes
        if (failure := changes.failure(name)) is not None:
            break
        if session.lost_s > patience_s + LONGER_S:
            failure = (
                f"it was away for {session.lost_s:.0f} s, so it is given up; "
                "it may join again with a new token"
            )
            break
        if session.leaving:
            session.leaving = False
            try:
                changes.leave(name, tell)
            except PipespecError as error:
                if changes.over():
                    return
                refusal = f"it cannot leave yet: {error}"
                on_log(name, refusal)
                session.tell(refusal, stays=True)
                continue
            on_log(name, "it has left")
            session.dismiss("this host has left the cluster", failed=False)
            return
    on_log(name, failure)
    session.dismiss(failure, failed=True)
    go_on_without(name, changes, on_log)


def go_on_without(name: str, changes: HostChanges, on_log: OnLog) -> None:
    """Have the others compute without a host that is gone, as soon as they can."""
    problem = None
    while not changes.over():
        try:
            changes.lost(name)
            return
        except PipespecError as error:
            if problem != (problem := str(error)):
                on_log(name, f"the others cannot go on without it yet: {problem}")
        time.sleep(RETRY_S)


def hosts_of(config: Config) -> HostsFile:
    """The hosts that are known before any joins, as a hosts file says it. Raises ConfigError."""
    if config.cluster.hosts is not None:
        return load_hosts(config.cluster.hosts)
    here = host_here(config.cluster)
    return HostsFile("here", (here,), draft=next(iter(here.members)), spares=config.cluster.spares)


def address_for_others(hosts: Sequence[Host], options: JoinOptions) -> str:
    """Where other hosts can reach this one to join. Raises ConfigError."""
    address = options.address or own_address(hosts)
    for anywhere in ANYWHERE if address is None else ():
        with suppress(OSError):
            address = address or source_address(anywhere)
    if address is None:
        raise ConfigError(
            "This machine has no default route, by which others could reach it; name its address "
            "with --at."
        )
    return address


def open_to_hosts(deployment: Deployment, address: str) -> Deployment:
    """The deployment of a cluster that hosts can join at an address of this machine."""
    hosts = (
        replace(host, address=address) if host.local and host.address == LOOPBACK else host
        for host in deployment.hosts
    )
    return replace(deployment, open_to=address, hosts=tuple(hosts))
