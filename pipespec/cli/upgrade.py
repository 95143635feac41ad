"""`pipespec upgrade`: replace the processes of a running cluster's hosts by a newer version."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from pipespec.client import upgrade_status
from pipespec.client.registry import entry, held
from pipespec.client.upgrade_status import HostUpgrade, UpgradePhase, UpgradeStatus
from pipespec.console.arguments import finish, overrides
from pipespec.console.terminal import write
from pipespec.errors import ConfigError, PipespecError, print_error

if TYPE_CHECKING:
    from pipespec.cluster.host_replacement import Replaced
    from pipespec.cluster.session import ClusterSession
    from pipespec.console.arguments import Commands

# Seconds between two looks at the status, and within which a launcher begins.
LOOK_S = 0.1
BEGINS_WITHIN_S = 30.0


def add(commands: Commands) -> None:
    """Describe the command."""
    command = commands.add_parser(
        "upgrade",
        help="replace the processes of a cluster's hosts by the version that is installed now",
        description="After pipespec was upgraded on the hosts of a cluster that is up, or `python` "
        "or `env` of its hosts file was set to a newer installation: replace the processes of one "
        "host after another, while requests go on with the same text. A version of another "
        "protocol is refused before anything ends. The launcher and a server stay as they are.",
    )
    command.add_argument("name", nargs="?", metavar="NAME", help="which (the only one)")
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Ask the launcher of a cluster for an upgrade, and report how it goes."""
    if overrides(rest, arguments.known_options):
        raise ConfigError(
            f"`pipespec upgrade` takes one name and no settings, but got {rest[0]!r}."
        )
    found = entry(arguments.name)
    name = found.name
    if not found.owner.here:
        host = found.cluster.host if found.cluster else found.owner.machine
        raise ConfigError(
            f"The cluster {name!r} was started on {host}; run `pipespec upgrade {name}` there."
        )
    if found.cluster is None:
        raise ConfigError(f"The cluster {name!r} is still loading; ask again when it is ready.")
    status = upgrade_status.read(name)
    if status is not None and status.phase == UpgradePhase.RUNNING:
        raise ConfigError(f"The cluster {name!r} is being upgraded; ask again when that is over.")
    upgrade_status.write(name, UpgradeStatus())
    status = _await_end(name, quiet=arguments.json)
    if status.problem is not None:
        raise PipespecError(status.problem)
    if arguments.json:
        fields = {"name": name, "hosts": [asdict(each) for each in status.done]}
        write(json.dumps(fields) + "\n")
    elif not status.done:
        write(f"All hosts of {name} run the version that is installed there.\n")
    return 0


def _await_end(name: str, *, quiet: bool) -> UpgradeStatus:
    """The status of an upgrade once it is over; hosts are reported as they are replaced. Raises
    PipespecError."""
    begun_by, reported = time.monotonic() + BEGINS_WITHIN_S, 0
    while True:
        status = upgrade_status.read(name)
        alive = held(name) is not None
        if not alive:
            upgrade_status.remove(name)
            raise PipespecError(f"The cluster {name!r} has ended; see `pipespec status`.")
        if status is None:
            raise PipespecError(
                f"The upgrade of {name!r} was given up; the log of its launcher says why."
            )
        for each in () if quiet else status.done[reported:]:
            write(f"{each.host} runs {each.version}, after {each.seconds:.1f} s.\n")
        reported = len(status.done)
        if status.phase == UpgradePhase.OVER:
            upgrade_status.remove(name)
            return status
        if status.phase == UpgradePhase.ASKED and time.monotonic() > begun_by:
            upgrade_status.remove(name)
            raise PipespecError(
                f"The launcher of {name!r} does not begin; it is of a version without upgrades, or "
                f"hangs: end it with `pipespec down {name}`, and start the cluster again."
            )
        time.sleep(LOOK_S)


def carry_out_if_asked(name: str, cluster: ClusterSession) -> None:
    """Do what a command has asked for, if one has, as the launcher of the cluster. A status that
    cannot be read or written ends the upgrade, not the cluster."""
    try:
        if upgrade_status.is_asked(name):
            _carry_out(name, cluster)
    except ConfigError as error:
        print_error(f"{name}: the upgrade ends: {error}")
        upgrade_status.remove(name)


def _carry_out(name: str, cluster: ClusterSession) -> None:
    status = UpgradeStatus(UpgradePhase.RUNNING)
    upgrade_status.write(name, status)

    def on_replaced(host: Replaced) -> None:
        nonlocal status
        done = (*status.done, HostUpgrade(host.host, host.version, host.seconds))
        status = UpgradeStatus(UpgradePhase.RUNNING, done)
        upgrade_status.write(name, status)
        print_error(f"{name}: {host.host} runs {host.version}")

    problem = None
    try:
        cluster.replace_hosts(on_replaced)
    except PipespecError as error:  # one that has ended is reported by whoever watches it
        problem = str(error)
        print_error(f"{name}: {problem}")
    except BaseException:  # a signal asks for the end
        upgrade_status.remove(name)
        raise
    upgrade_status.write(name, UpgradeStatus(UpgradePhase.OVER, status.done, problem))
