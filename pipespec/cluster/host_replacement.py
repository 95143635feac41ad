"""Replaces the processes of a running cluster's hosts by a newer version, one host after another.

The agent of a host ends with its workers and is started again, with the pipespec that is installed
there now. To the rest of the cluster the host was lost and has come back: an epoch ends, the other
workers keep their weights, and requests go on where they were. The launcher is not replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipespec.cluster import ssh
from pipespec.cluster.deployment import Deployment
from pipespec.cluster.worker_group import WorkerGroup
from pipespec.config.hosts import Host, load_hosts
from pipespec.errors import ConfigError, HostFailed
from pipespec.system.versions import has_own_protocol, own_version

if TYPE_CHECKING:
    from pipespec.cluster.session import ClusterSession

MODULE = "pipespec.cluster.installed_version"
TIMEOUT_S = 120.0  # torch is imported
# Seconds between two checks whether an agent has reported its version.
LOOK_S = 0.05


@dataclass(frozen=True)
class Replaced:
    """A host whose processes were replaced, the version that they have now, and the seconds from
    the end of the old ones until all ranks had joined again."""

    host: str
    version: str
    seconds: float


def replace_hosts(
    session: ClusterSession, agents: WorkerGroup, on_replaced: Callable[[Replaced], None]
) -> None:
    """Replace every host on which another version is installed than it runs; the head's comes last.

    Hosts that are started by hand, or that have joined, stay as they are. `python` and `env` of a
    host are read from the hosts file anew.

    Raises:
        ConfigError: the hosts file no longer describes these hosts.
        HostFailed: a host has no version that can be in one cluster with the others, and nothing
            was replaced; or one has not come back.
        RankFailed: the cluster has ended.
    """
    hosts = current_hosts(session.deployment)
    installed = installed_versions(hosts)
    for host in hosts:
        version = installed[host.name]
        if agents.version(host.name) == version:
            continue
        session.await_complete()
        epoch = session.epoch
        computes = set(host.workers) & set(session.state.assignment.everyone)
        began = time.monotonic()
        agents.replace(host)
        while agents.version(host.name) is None:
            session.check()
            if computes and computes.isdisjoint(session.state.assignment.everyone):
                raise HostFailed(
                    f"{host.name}: its new processes have not come back, and the cluster goes on "
                    "without them; run `pipespec doctor` on the hosts file"
                )
            time.sleep(LOOK_S)
        session.await_complete(after=epoch if computes else -1)
        on_replaced(Replaced(host.name, version, time.monotonic() - began))


def current_hosts(deployment: Deployment) -> list[Host]:
    """The hosts that the launcher starts, the head's last, with `python` and `env` as the hosts
    file says now. Raises ConfigError."""
    file = deployment.config.cluster.hosts
    known = tuple(host for host in deployment.hosts if host not in deployment.joined)
    if file is not None:
        now = {host.name: host for host in load_hosts(file).hosts}
        lacking = [host.name for host in known if host.name not in now]
        if lacking:
            raise ConfigError(
                f"{file} no longer has the host {lacking[0]}; keep the hosts of a cluster that is "
                "up, and change only `python` and `env`."
            )
        known = tuple(
            replace(host, python=now[host.name].python, env=now[host.name].env) for host in known
        )
    head = deployment.workers[0]
    return sorted(
        (host for host in known if not host.by_hand), key=lambda host: head in host.workers
    )


def installed_versions(hosts: Sequence[Host]) -> Mapping[str, str]:
    """The version on each host, by its name. Raises HostFailed, also where it is of another
    protocol."""

    def ask(run: ssh.RunModule, host: Host) -> str:
        version = run(host, MODULE, timeout=TIMEOUT_S).decode(errors="replace").strip()
        if not has_own_protocol(version):
            raise HostFailed(
                f"{host.name}: pipespec there is {version}, but the cluster's is {own_version()}, "
                "and versions of different protocols cannot be in one cluster, so no host was "
                "replaced; end the cluster once its requests have finished, and start it again"
            )
        return version

    return dict(zip((host.name for host in hosts), ssh.ask_hosts(hosts, ask), strict=True))
