"""A worker of a host that nobody starts over SSH: `launch/torchrun.sh` runs this.

    torchrun --nproc-per-node=DEVICES -m pipespec.cluster.join HOSTS.yaml HOST INVITATION

The invitation is what `pipespec up` wrote when it began to wait: how to reach the cluster's
Redis, and the settings. Whoever holds it can take part, so it is for this user's eyes alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pipespec.cluster.agent import choose_interface
from pipespec.cluster.supervisor import WORKER
from pipespec.config.hosts import Host, HostsFile, load_hosts
from pipespec.errors import ConfigError
from pipespec.system.outcome import concluded
from pipespec.system.reading import Unreadable, build, read_json

USAGE = "usage: python -m pipespec.cluster.join [--count] HOSTS.yaml HOST [INVITATION]"


@dataclass(frozen=True)
class Invitation:
    """What a worker must know to take part. `overrides` made the cluster."""

    url: str = field(repr=False)
    namespace: str
    secret: str = field(repr=False)
    overrides: tuple[str, ...]

    def write(self, path: Path) -> None:
        """Write it where only this user can read it."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)

    @classmethod
    def read(cls, path: Path) -> Invitation:
        """Raises ConfigError, without a word of the secrets in the file."""
        try:
            return build(cls, read_json(path, pipe=True))
        except Unreadable as error:
            raise ConfigError(
                f"{path} is no invitation ({error}); copy the one that `pipespec up` wrote."
            ) from None


def main(argv: Sequence[str]) -> int:
    """Print how many workers a host has, or be one of them; the exit code."""
    counting = argv[:1] == ["--count"]
    words = argv[1:] if counting else argv
    if len(words) != (2 if counting else 3):
        raise ConfigError(USAGE)
    hosts_file = load_hosts(words[0])
    host = host_of(hosts_file, words[0], words[1])
    if counting:
        print(len(host.devices))
        return 0
    invitation = Invitation.read(Path(words[2]))
    os.environ[WORKER] = host.workers[int(os.environ["LOCAL_RANK"])]
    choose_interface(host.address, host.interface)

    from pipespec.cluster.deployment import ControllerAddress, decide
    from pipespec.cluster.worker import run_worker
    from pipespec.config.compose import compose

    settings = [text for text in invitation.overrides if not text.startswith("cluster=")]
    deployment = decide(compose([f"cluster={words[0]}", *settings]))
    where = ControllerAddress(invitation.url, invitation.namespace, secret=invitation.secret)
    run_worker(deployment, where, {name: b for b in hosts_file.hosts for name in b.workers})
    return 0


def host_of(hosts_file: HostsFile, path: str, name: str) -> Host:
    """The host of that name. Raises ConfigError."""
    for host in hosts_file.hosts:
        if host.name == name:
            return host
    known = ", ".join(host.name for host in hosts_file.hosts)
    raise ConfigError(f"{path} has no host {name!r}; it has {known}.")


if __name__ == "__main__":
    sys.exit(concluded(lambda: main(sys.argv[1:])))
