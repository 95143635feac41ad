"""`pipespec up`: start a cluster that stays up for many requests."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from signal import SIGINT, Signals
from typing import NoReturn

from pipespec.cli import host_admission
from pipespec.cli.cache import checked, with_weights
from pipespec.cli.detach import DEFAULT_NAME, cluster_of, detached
from pipespec.cli.host_admission import HostAdmission
from pipespec.cli.invite import JoinOptions, add_join_options, invitation_to, sentences
from pipespec.client.local_cluster import running_cluster
from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import (
    DATA,
    INVITATION,
    Owner,
    RunningCluster,
    claim,
    folder,
    kept_folder,
    log_line,
    log_of,
    publish,
    remove_data,
)
from pipespec.client.request_settings import group
from pipespec.cluster import session
from pipespec.cluster.decide import decide, require_room
from pipespec.cluster.deployment.checks import loading
from pipespec.cluster.deployment.deployment import ControllerAddress, Deployment
from pipespec.cluster.diagnostics.measure_hosts import measure_hosts
from pipespec.cluster.join.manual_host import Invitation
from pipespec.cluster.processes.fault_stats import Fault
from pipespec.cluster.redis_setup import require_same_model
from pipespec.cluster.session import ClusterSession
from pipespec.config.compose import compose
from pipespec.config.hosts import HostsFile, load_hosts
from pipespec.config.schema import Config
from pipespec.console.arguments import AddParser, finish
from pipespec.console.terminal import progress, write
from pipespec.errors import ConfigError, PipespecError, print_error
from pipespec.placement.costs import Problem
from pipespec.placement.measurements import problem
from pipespec.placement.slices import Placement, plan_slices, reason
from pipespec.system.end_signals import Terminated, raise_swallowed
from pipespec.system.versions import own_version

# How often the ranks are checked.
LOOK_S = 0.1
# Settings that determine where requests are stored.
KEEPING = ("controller.url=", "controller.data=", "controller=")


def add(add_parser: AddParser) -> None:
    command = add_parser(
        show_settings=True,
        usage="pipespec up [--name NAME] [--detach] [--invite] [--json] [-] [HOSTS.yaml] "
        "[MODEL] [SETTING=VALUE ...]",
        description="Start a cluster here, or over SSH on the hosts of a hosts file, and keep it "
        "until Ctrl-C or `pipespec down`. Its log goes to standard error. `generate --on NAME` and "
        "`bench --on NAME` send requests to it, also several at a time. With - more settings are "
        "read from standard input, by line or as a JSON list, so that no list of processes shows "
        "passwords. If it dies, start it again under its name: it finishes what it began.",
    )
    command.add_argument("--name", help=f"its name ({DEFAULT_NAME}, or that of hosts.yaml)")
    command.add_argument(
        "--detach",
        action="store_true",
        help="return when it is ready; it runs on in the background",
    )
    command.add_argument(
        "--measure",
        action="store_true",
        help="with a hosts file: measure its hosts first, and place layers and draft accordingly",
    )
    add_join_options(command)
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Start a cluster; stay with it, or return when it is ready."""
    name, settings = cluster_of(arguments, rest, "up")
    join_options = JoinOptions.of(arguments)
    if arguments.detach:
        flags = ["--measure"] * arguments.measure + (
            [] if join_options is None else join_options.flags
        )
        running = detached(name, settings, flags)
        announce(running, as_json=arguments.json, join_options=join_options)
        return 0
    return stay(arguments, name, settings, join_options)


def stay(
    arguments: argparse.Namespace,
    name: str,
    settings: Sequence[str],
    join_options: JoinOptions | None,
) -> int:
    """Run a cluster until a signal asks for its end. With --measure the hosts of its hosts file are
    measured first, and with `join_options`, by which other hosts join, always."""
    with claim(name) as note:
        config = compose(settings)
        if arguments.measure and config.cluster.hosts is None:
            raise ConfigError("--measure needs a hosts file; pass cluster=HOSTS.yaml.")

        ready = False
        try:
            with (
                storing_requests(name, config, settings) as (kept, on_ready),
                planned(kept, note, measure=arguments.measure, join_options=join_options) as (
                    deployment,
                    admission,
                ),
            ):
                if config.controller.data is None and (folder() / (name + DATA)).exists():
                    require_same_model(
                        deployment, f"run `pipespec down {name}`, or choose another --name"
                    )
                deployment = checked(deployment, stays=True)
                deployment = with_weights(deployment)
                with (
                    progress(loading(deployment), of_bytes=True) as (on_loaded,),
                    session.start_agents(deployment, stays=True) as agents,
                ):
                    served = ModelInfo.of(deployment)
                    with (
                        invited(name, deployment, settings, note) as on_begun,
                        session.start_cluster(
                            deployment, agents, on_loaded, on_log, on_begun
                        ) as cluster,
                    ):
                        running = running_cluster(name, cluster, served, settings)
                        if admission is not None:
                            running = replace(running, joins_through=admission.server.path)
                            admission.begin(cluster)
                        publish(running)
                        on_ready()
                        ready = True
                        announce(running, as_json=arguments.json, join_options=join_options)
                        watch(name, cluster)
        except KeyboardInterrupt as asked:
            # A cluster that is up ends with a signal.
            if not ready:
                raise
            number = asked.number if isinstance(asked, Terminated) else SIGINT
            on_log(name, f"{Signals(number).name} has ended the cluster")
    return 0


@contextmanager
def storing_requests(
    name: str, config: Config, settings: Sequence[str]
) -> Iterator[tuple[Config, Callable[[], None]]]:
    """Yields the configuration and a function to call once the cluster is up. Unless the settings
    say where requests are stored, the private Redis keeps them in a folder beside the registry
    entry. A cluster that dies leaves it to the next one of that name; an orderly end removes it,
    and so does a failed start that has made it."""
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
    """Log the faults of a cluster until a signal asks for its end. Raises PipespecError when its
    ranks have ended, RankFailed when one could not be replaced."""
    logged: Sequence[Fault] = ()
    while cluster.poll():
        raise_swallowed()
        faults = cluster.faults
        for fault in faults[max(len(logged) - 1, 0) :]:
            if fault not in logged[-1:]:  # of the newest one the cause may be found later
                on_log(name, f"epoch {fault.epoch} ended: {fault.reason}")
        logged = faults
        time.sleep(LOOK_S)
    raise PipespecError(f"The ranks of the cluster {name!r} ended by themselves.")


@contextmanager
def invited(
    name: str,
    deployment: Deployment,
    settings: Sequence[str],
    note: Callable[[str | None], None],
) -> Iterator[Callable[[ControllerAddress], None] | None]:
    """Yields a function that writes the invitation for hosts that are started by hand, or None if
    there are none. The file is removed after the block."""
    path = folder() / (name + INVITATION)
    waiting = [host.name for host in deployment.hosts if host.by_hand]

    def begin(where: ControllerAddress) -> None:
        file = deployment.config.cluster.hosts
        waits_for = f"{', '.join(waiting)}: run `launch/torchrun.sh {file} HOST {path}` there"
        note(waits_for)
        kept = tuple(text for text in settings if group(text) != "controller")
        with kept_folder():
            Invitation(where.url, where.namespace, where.secret, kept, own_version()).write(path)
        on_log(name, f"waiting for {waits_for}")

    if not waiting:
        yield None
        return
    try:
        yield begin
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def planned(
    config: Config,
    note: Callable[[str | None], None],
    *,
    measure: bool,
    join_options: JoinOptions | None,
) -> Iterator[tuple[Deployment, HostAdmission | None]]:
    """The deployment of a cluster, and what admits hosts. Raises ConfigError, HostFailed."""
    if join_options is None or join_options.hosts == 1:
        require_room(config)
    if join_options is None:
        placement = None
        if measure:
            assert config.cluster.hosts is not None  # as `stay` checks
            problem = measured_problem(config, load_hosts(config.cluster.hosts))
            placement = plan_slices(problem)
            explain(placement)
        yield decide(config, placement), None
        return
    hosts_file = host_admission.hosts_of(config)
    address = host_admission.address_for_others(hosts_file.hosts, join_options)
    alone = host_admission.open_to_hosts(decide(config), address)  # errors before measuring
    problem = measured_problem(config, hosts_file)
    if join_options.hosts == 1:  # before others are there, the layers may not fit
        alone = alone.laid_out(plan_slices(problem))
    admission = host_admission.HostAdmission(join_options, alone, on_log)
    with admission.server:
        if join_options.hosts > 1:
            count = join_options.hosts - len(alone.hosts)
            note(f"{count} more hosts, for which `pipespec up` has printed the commands")
        deployment = admission.await_hosts(alone, problem)
        note(None)
        explain(deployment.placement)
        yield deployment, admission


def measured_problem(config: Config, hosts_file: HostsFile) -> Problem:
    """What is to be laid out, by measured figures. Raises ConfigError, HostFailed."""
    with progress("measuring") as (on_host,):
        return problem(hosts_file, measure_hosts(hosts_file, config, on_host), config)


def explain(placement: Placement) -> None:
    for rank, worker in enumerate(placement.workers_by_rank):
        piece = placement.layers[rank - 1] if rank else None
        holds = "the draft" if piece is None else f"layers {piece.start} to {piece.stop - 1}"
        on_log(worker, f"rank {rank}, {holds}: {reason(placement, rank)}")


def on_log(source: str, line: str) -> None:
    print_error(log_line(source, line))


def announce(running: RunningCluster, *, as_json: bool, join_options: JoinOptions | None) -> None:
    log = None if running.owner == Owner.this() else log_of(running.name)  # here, it is in the log
    invitation = None if join_options is None or join_options.silent else invitation_to(running)
    if as_json:
        fields = {
            "name": running.name,
            "host": running.host,
            "pid": running.owner.pid,
            "num_ranks": running.num_ranks,
            "context": running.served.context,
            **({} if log is None else {"log": str(log)}),
            **({} if invitation is None else {"invitation": invitation}),
        }
        write(json.dumps(fields) + "\n")
        return
    write(
        f"The cluster {running.name!r} is ready: {running.num_ranks} ranks, context "
        f"{running.served.context} tokens. Send requests with `pipespec generate --on "
        f"{running.name} --prompt TEXT`; end it with `pipespec down {running.name}`."
        f"{'' if log is None else f' Its log is {log}.'}\n"
    )
    if invitation is not None:
        write(sentences(invitation))
