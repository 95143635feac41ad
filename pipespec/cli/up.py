"""`pipespec up`: start a cluster that stays up for many requests."""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from pipespec.cli.arguments import STDIN, finish, overrides
from pipespec.cli.detach import detached
from pipespec.cli.terminal import progress, standard_input, write
from pipespec.client.registry import (
    DATA,
    INVITATION,
    Owner,
    RunningCluster,
    check_name,
    claim,
    folder,
    kept_folder,
    publish,
    remove_data,
)
from pipespec.client.settings import group
from pipespec.errors import ConfigError, PipespecError, tell
from pipespec.system.reading import Unreadable, parse_json

if TYPE_CHECKING:
    from pipespec.cli.arguments import Commands
    from pipespec.client.served import ServedModel
    from pipespec.cluster.deployment import ControllerAddress, Deployment
    from pipespec.cluster.session import ClusterSession
    from pipespec.config.schema import Config
    from pipespec.planning.partition import Placement

DEFAULT_NAME = "default"
# How often the ranks are looked at.
LOOK_S = 0.1
# Settings that say where requests are kept.
KEEPING = ("controller.url=", "controller.data=", "controller=")


def add(commands: Commands) -> None:
    """Describe the command."""
    command = commands.add_parser(
        "up",
        show_settings=True,
        help="start a cluster that stays up for many requests",
        usage="pipespec up [--name NAME] [--detach] [--json] [-] [SETTING=VALUE ...]",
        description="Start a cluster and keep it until Ctrl-C or `pipespec down`. "
        "`pipespec generate --on NAME` and `pipespec bench --on NAME` ask it, several at the same "
        "time if need be: requests queue. With - more settings are read from standard input, one "
        "per line or as a JSON list, so that a password among them shows in no list of processes. "
        "If it dies, it goes on with what was unfinished when it is started again under its name.",
    )
    command.add_argument("--name", help=f"what to call it ({DEFAULT_NAME}, or that of hosts.yaml)")
    command.add_argument(
        "--detach", action="store_true", help="return when it is ready; it goes on by itself"
    )
    command.add_argument(
        "--measure",
        action="store_true",
        help="with a hosts file: measure its hosts first, and place layers and draft accordingly",
    )
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Start a cluster; stay with it, or return when it is ready."""
    settings = overrides(rest, arguments.known_options, stdin_allowed=True)
    if STDIN in rest:
        settings += read_settings()
    if any(text.startswith("trace=") for text in settings):
        raise ConfigError(
            "`pipespec up` writes no trace; leave trace=FILE to `pipespec generate` without --on."
        )
    name = default_name(settings) if arguments.name is None else arguments.name
    check_name(name)
    if arguments.detach:
        running = detached(name, settings, measure=arguments.measure)
        write(announcement(running, as_json=arguments.json))
        return 0
    return stay(name, settings, as_json=arguments.json, measure=arguments.measure)


def read_settings() -> list[str]:
    """Settings from standard input. Raises ConfigError."""
    try:
        return parse_settings(standard_input())
    except Unreadable as error:
        raise ConfigError(
            f"The settings on standard input cannot be read: {error}; write one per line, or a "
            "JSON list of texts."
        ) from None


def parse_settings(text: str) -> list[str]:
    """Settings: one per line, or a JSON list. Raises Unreadable."""
    if not text:  # whoever was to write them may have died
        raise Unreadable("it is empty")
    if not text.lstrip().startswith("["):
        return [line.strip() for line in text.splitlines() if line.strip()]
    settings = parse_json(text)
    if not all(isinstance(setting, str) for setting in settings):
        raise Unreadable('they must be texts, as in ["feed=level"]')
    return settings


def default_name(settings: Sequence[str]) -> str:
    """What a cluster is called that nobody named: as its host file, if it has one."""
    for text in settings:
        key, _, value = text.partition("=")
        if key == "cluster" and value.endswith((".yaml", ".yml")):
            from pipespec.config.hosts import load_hosts

            return load_hosts(value).name
    return DEFAULT_NAME


def stay(name: str, settings: Sequence[str], *, as_json: bool, measure: bool) -> int:
    """Run a cluster until a signal asks for its end.

    With `measure` the hosts of its hosts file are measured first.
    """
    with claim(name):
        from pipespec.config.compose import compose

        config = compose(settings)

        from pipespec.client.served import ServedModel
        from pipespec.cluster import session
        from pipespec.cluster.deployment import decide
        from pipespec.cluster.store import require_same_model

        ready = False
        try:
            with keeping(name, config, settings) as (kept, on_ready):
                deployment = decide(kept, placed(kept) if measure else None)
                if config.controller.data is None:
                    require_same_model(
                        deployment, f"run `pipespec down {name}`, or choose another --name"
                    )
                with (
                    progress("loading") as (on_loaded,),
                    session.prepare(deployment, stays=True) as agents,
                ):
                    served = ServedModel.of(deployment)
                    with (
                        invited(name, deployment, settings) as on_begun,
                        session.start(deployment, agents, on_loaded, on_log, on_begun) as cluster,
                    ):
                        running = running_cluster(name, cluster, served, settings)
                        publish(running)
                        on_ready()
                        ready = True
                        write(announcement(running, as_json=as_json))
                        watch(name, cluster)
        except KeyboardInterrupt:
            # Once it is up, this is how it is meant to end.
            if not ready:
                raise
    return 0


@contextmanager
def keeping(
    name: str, config: Config, settings: Sequence[str]
) -> Iterator[tuple[Config, Callable[[], None]]]:
    """The configuration, with a folder beside the entry for the data of the private Redis unless
    the settings say where requests are kept; and what is to be called once the cluster is up.

    What dies leaves the folder to the next cluster of that name. An orderly end removes it, and
    so does a start that fails, if the folder is of that start.
    """
    if any(text.startswith(KEEPING) for text in settings):
        yield config, lambda: None
        return
    data = folder() / (name + DATA)
    begun = data.exists()

    def begin() -> None:
        nonlocal begun
        begun = True

    controller = replace(config.controller, data=str(data))
    try:
        yield replace(config, controller=controller), begin
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or not begun:
            remove_data(name)
        raise


def watch(name: str, cluster: ClusterSession) -> NoReturn:
    """Log the faults of a cluster until a signal asks for its end.

    Raises PipespecError when its ranks have ended, RankFailed when one could not be replaced.
    """
    told = 0
    while cluster.poll():
        for fault in cluster.faults[told:]:
            on_log(name, f"epoch {fault.epoch} ended: {fault.reason}")
        told = len(cluster.faults)
        time.sleep(LOOK_S)
    raise PipespecError(f"The ranks of the cluster {name!r} ended by themselves.")


def running_cluster(
    name: str, cluster: ClusterSession, served: ServedModel, settings: Sequence[str]
) -> RunningCluster:
    """The registry's entry of a cluster of this process, made by `settings`."""
    return RunningCluster(
        name=name,
        url=cluster.elsewhere,
        namespace=cluster.namespace,
        epoch=cluster.epoch,
        owner=Owner.this(),
        host=socket.gethostname(),
        # Those of the controller may hold a password, and `url` says it all.
        overrides=tuple(text for text in settings if group(text) != "controller"),
        served=served,
        num_ranks=cluster.deployment.num_ranks,
        started=time.time(),
    )


@contextmanager
def invited(
    name: str, deployment: Deployment, settings: Sequence[str]
) -> Iterator[Callable[[ControllerAddress], None] | None]:
    """What writes the invitation for hosts that are started by hand; it lasts as long as they."""
    path = folder() / (name + INVITATION)
    waiting = [host.name for host in deployment.hosts if host.by_hand]

    def begin(where: ControllerAddress) -> None:
        from pipespec.cluster.join import Invitation

        kept = tuple(text for text in settings if group(text) != "controller")
        with kept_folder():
            Invitation(where.url, where.namespace, where.secret, kept).write(path)
        file = deployment.config.cluster.hosts
        on_log(
            name,
            f"waiting for {', '.join(waiting)}: run `launch/torchrun.sh {file} HOST {path}` there",
        )

    if not waiting:
        yield None
        return
    try:
        yield begin
    finally:
        path.unlink(missing_ok=True)


def placed(config: Config) -> Placement:
    """Who should hold what, by measured figures. Raises ConfigError, HostFailed."""
    if config.cluster.hosts is None:
        raise ConfigError("--measure needs a hosts file; pass cluster=HOSTS.yaml.")
    from pipespec.config.hosts import load_hosts
    from pipespec.planning.partition import plan_slices, reason
    from pipespec.planning.placement import problem
    from pipespec.survey.gather import gather

    hosts_file = load_hosts(config.cluster.hosts)
    if config.cluster.split is not None:
        hosts_file = replace(hosts_file, split=tuple(config.cluster.split))
    with progress("measuring") as (on_host,):
        placement = plan_slices(problem(hosts_file, gather(hosts_file, config, on_host), config))
    for rank, worker in enumerate(placement.workers_by_rank):
        piece = placement.layers[rank - 1] if rank else None
        holds = "the draft" if piece is None else f"layers {piece.start} to {piece.stop - 1}"
        on_log(worker, f"rank {rank}, {holds}: {reason(placement, rank)}")
    return placement


def on_log(who: str, line: str) -> None:
    """A line of a worker, or of the whole cluster, for the log."""
    tell(f"{who}: {line}")


def announcement(running: RunningCluster, *, as_json: bool) -> str:
    """What is printed once a cluster is ready."""
    if as_json:
        told = {
            "name": running.name,
            "host": running.host,
            "pid": running.owner.pid,
            "num_ranks": running.num_ranks,
            "context": running.served.context,
        }
        return json.dumps(told) + "\n"
    return (
        f"The cluster {running.name!r} is ready: {running.num_ranks} ranks, context "
        f"{running.served.context} tokens. Ask it with `pipespec generate --on {running.name} "
        f"--prompt TEXT`; end it with `pipespec down {running.name}`.\n"
    )
