"""The workers of a host that is started by hand, Slurm or Kubernetes, not over SSH:
`launch/torchrun.sh` runs this, which becomes torchrun, which runs this again for each worker.

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
from pipespec.cluster.processes.forked_workers import WORKER
from pipespec.config.hosts import Host, load_hosts
from pipespec.controller.membership import Membership
from pipespec.errors import ConfigError, ControllerError, PipespecError, print_error
from pipespec.system import liveness
from pipespec.system.exit_codes import exit_code_of
from pipespec.system.files import write_atomically
from pipespec.system.process_identity import die_with_parent
from pipespec.system.validation import Unreadable, from_fields, read_json

MODULE = "pipespec.cluster.join.manual_host"
USAGE = f"usage: python -m {MODULE} HOSTS.yaml HOST INVITATION"
# Its own kinds of rendezvous listen on every address, and unpickle what they are sent.
TORCHRUN = (
    *("-m", "torch.distributed.run", "--nnodes=1", "--rdzv-backend=pipespec"),
    *("--log-dir=/dev/null", "--max-restarts=10", "--monitor-interval=0.2"),
)
LOOK_S = 0.5


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
        write_atomically(path, json.dumps(asdict(self)).encode())

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
    """Become torchrun with the workers of a host, or be one of them; returns the exit code."""
    if len(argv) != 3:
        raise ConfigError(USAGE)
    path, name, file = argv
    hosts = {host.name: host for host in load_hosts(path).hosts}
    if name not in hosts:
        raise ConfigError(f"{path} has no host {name!r}; it has {', '.join(hosts)}.")
    host = hosts[name]
    if (number := os.environ.get("LOCAL_RANK")) is None:
        await_invitation(Path(file))
        workers = (f"--nproc-per-node={len(host.devices)}", "-m", MODULE, *argv)
        os.execv(sys.executable, [sys.executable, *TORCHRUN, *workers])
    invitation = Invitation.read(Path(file))
    worker = os.environ[WORKER] = host.workers[int(number)]
    watch_this_process()
    try:
        check_version(invitation.version)
        join_cluster(path, host, invitation)
    except PipespecError as error:
        url, namespace = invitation.url, invitation.namespace
        with suppress(ControllerError), Membership(url, namespace) as shared:
            shared.report_failed_start(worker, str(error))
        raise
    return 0


def await_invitation(path: Path) -> None:
    """Hosts of a job start at the same time, so the first one may write it later."""
    if not path.exists():
        print_error(f"{path} is not there yet; waiting for `pipespec up` to write it")
    while not path.exists():
        time.sleep(LOOK_S)


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


def join_cluster(path: str, host: Host, invitation: Invitation) -> None:
    choose_interface(host.address, host.interface)

    from pipespec.cluster.decide import decide
    from pipespec.cluster.deployment.checks import require_fit
    from pipespec.cluster.deployment.deployment import ControllerAddress
    from pipespec.cluster.ranks.worker import run_worker
    from pipespec.config.compose import compose

    named = ("cluster=", "cluster.hosts=")  # the launcher's own path of the file
    settings = [text for text in invitation.overrides if not text.startswith(named)]
    deployment = decide(compose([f"cluster={path}", *settings]), ask_hosts=False)
    require_fit(deployment)
    where = ControllerAddress(invitation.url, invitation.namespace, secret=invitation.secret)
    run_worker(deployment, where)


if __name__ == "__main__":
    sys.exit(exit_code_of(main, sys.argv[1:]))
