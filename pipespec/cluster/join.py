"""A member of a box that nobody starts over SSH: `launch/torchrun.sh` runs this.

    torchrun --nproc-per-node=DEVICES -m pipespec.cluster.join HOSTS.yaml BOX INVITATION

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
from pipespec.cluster.supervisor import MEMBER
from pipespec.config.hosts import Box, Hosts, load_hosts
from pipespec.errors import ConfigError
from pipespec.system.outcome import concluded
from pipespec.system.reading import Unreadable, build, read_json

USAGE = "usage: python -m pipespec.cluster.join [--count] HOSTS.yaml BOX [INVITATION]"


@dataclass(frozen=True)
class Invitation:
    """What a member must know to take part. `overrides` made the cluster."""

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
    """Print how many members a box has, or be one of them; the exit code."""
    counting = argv[:1] == ["--count"]
    words = argv[1:] if counting else argv
    if len(words) != (2 if counting else 3):
        raise ConfigError(USAGE)
    hosts = load_hosts(words[0])
    box = box_of(hosts, words[0], words[1])
    if counting:
        print(len(box.devices))
        return 0
    invitation = Invitation.read(Path(words[2]))
    os.environ[MEMBER] = box.members[int(os.environ["LOCAL_RANK"])]
    choose_interface(box.address, box.interface)

    from pipespec.cluster import deployment
    from pipespec.cluster.member import run_member
    from pipespec.config.compose import compose

    settings = [text for text in invitation.overrides if not text.startswith("cluster=")]
    plan = deployment.plan(compose([f"cluster={words[0]}", *settings]))
    where = deployment.ControllerAddress(
        invitation.url, invitation.namespace, secret=invitation.secret
    )
    run_member(plan, where, {name: b for b in hosts.boxes for name in b.members})
    return 0


def box_of(hosts: Hosts, path: str, name: str) -> Box:
    """The box of that name. Raises ConfigError."""
    for box in hosts.boxes:
        if box.name == name:
            return box
    known = ", ".join(box.name for box in hosts.boxes)
    raise ConfigError(f"{path} has no box {name!r}; it has {known}.")


if __name__ == "__main__":
    sys.exit(concluded(lambda: main(sys.argv[1:])))
