"""A worker of a host that is started by hand, not over SSH: `launch/torchrun.sh` runs this.

    torchrun --nproc-per-node=N -m pipespec.cluster.join.manual_host HOSTS.yaml HOST INVITATION

`pipespec up` writes the invitation: the URL of the cluster's Redis, and the settings. Any process
that has it can join, so only this user may read it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from mmap import mmap
from pathlib import Path

from pipespec.cluster.processes.agent import check_version, choose_interface
from pipespec.cluster.processes.torchrun import WORKER
from pipespec.config.hosts import Host, HostsFile, load_hosts
from pipespec.controller.membership import Membership
from pipespec.errors import ConfigError, ControllerError, PipespecError
from pipespec.system import liveness
from pipespec.system.exit_codes import exit_code_of
from pipespec.system.process_identity import die_with_parent
from pipespec.system.validation import Unreadable, from_fields, read_json

USAGE = "usage: python -m pipespec.cluster.join.manual_host [--count] HOSTS.yaml HOST [INVITATION]"


@dataclass(frozen=True)
class Invitation:
    """What a worker needs to join. `overrides` are the cluster's settings, `version` that of its
    pipespec (`pipespec.system.versions`)."""

    url: str = field(repr=False)
    namespace: str
    secret: str = field(repr=False)
    overrides: tuple[str, ...]
    version: str

    def write(self, path: Path) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)

    @classmethod
    def read(cls, path: Path) -> Invitation:
        """Raises ConfigError, whose message shows none of the secrets in the file."""
        try:
            return from_fields(cls, read_json(path, pipe=True))
        except Unreadable as error:
            raise ConfigError(
                f"{path} is no invitation ({error}); copy the one that `pipespec up` wrote."
            ) from None


def main(argv: Sequence[str]) -> int:
    """Print how many workers a host has, or run one of them; returns the exit code."""
    counting = argv[:1] == ["--count"]
    arguments = argv[1:] if counting else argv
    if len(arguments) != (2 if counting else 3):
        raise ConfigError(USAGE)
    hosts_file = load_hosts(arguments[0])
    host = host_of(hosts_file, arguments[0], arguments[1])
    if counting:
        print(len(host.devices))
        return 0
    invitation = Invitation.read(Path(arguments[2]))
    worker = os.environ[WORKER] = host.workers[int(os.environ["LOCAL_RANK"])]
    watch_this_process()
    try:
        check_version(invitation.version)
        join_cluster(arguments[0], hosts_file, host, invitation)
    except PipespecError as error:
        url, namespace = invitation.url, invitation.namespace
        with suppress(ControllerError), Membership(url, namespace) as shared:
            shared.report_failed_start(worker, str(error))
        raise
    return 0


def watch_this_process() -> None:
    """Have a child end this process if it makes no progress; torchrun starts another."""
    memory, worker = mmap(-1, liveness.SIZE), os.getpid()
    die_with_us = die_with_parent(worker)
    if os.fork() == 0:
        die_with_us()
        for ending in (signal.SIGINT, signal.SIGTERM):  # they are for the worker
            signal.signal(ending, signal.SIG_IGN)
        watch = liveness.Watch(memory, worker)
        while (reason := watch.look()) is None:
            time.sleep(liveness.LOOK_S)
        print(f"{os.environ[WORKER]}: {reason}", file=sys.stderr, flush=True)
        os.kill(worker, signal.SIGKILL)
        os._exit(0)
    liveness.progress.share(memory)


def join_cluster(path: str, hosts_file: HostsFile, host: Host, invitation: Invitation) -> None:
    choose_interface(host.address, host.interface)

    from pipespec.cluster.decide import decide
    from pipespec.cluster.deployment.deployment import ControllerAddress
    from pipespec.cluster.ranks.worker import run_worker
    from pipespec.config.compose import compose

    named = ("cluster=", "cluster.hosts=")  # the launcher's own path of the file
    settings = [text for text in invitation.overrides if not text.startswith(named)]
    deployment = decide(compose([f"cluster={path}", *settings]), ask_hosts=False)
    where = ControllerAddress(invitation.url, invitation.namespace, secret=invitation.secret)
    run_worker(deployment, where, {name: b for b in hosts_file.hosts for name in b.workers})


def host_of(hosts_file: HostsFile, path: str, name: str) -> Host:
    for host in hosts_file.hosts:
        if host.name == name:
            return host
    known = ", ".join(host.name for host in hosts_file.hosts)
    raise ConfigError(f"{path} has no host {name!r}; it has {known}.")


if __name__ == "__main__":
    sys.exit(exit_code_of(main, sys.argv[1:]))
