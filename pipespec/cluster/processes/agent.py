"""What runs on each host: the agent, and the workers that it forks.

    agent ─┬─ worker (host/0)
           └─ worker (host/1)

The *agent* reads from standard input the launcher's version, one line, and its setup; it imports
what the workers need, and reads its job; then lines that are signs of life. The end of standard
input, or on a host behind SSH SILENCE_S without a line, ends the host. It writes JSON objects to
standard output, one per line: {"preparing": true}, {"died": number, "pid": ..., "how": ...,
"hung": ...}, {"log": number, "line": ...}, as a sign of life {"present": numbers of the workers
that run}, and at last {"ended": true}, {"failed": sentence}, or {"refused": clause} if it cannot
begin. All processes of the host hold that output, so it ends when the last of them is gone."""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import BinaryIO, NoReturn

from pipespec.cluster.host_link.agent_lock import sole_agent
from pipespec.cluster.processes.forked_workers import WorkerJob, run_workers, send_message
from pipespec.errors import HostFailed, PipespecError
from pipespec.system.cores import SHARES_CORES, num_cores
from pipespec.system.files import TemporaryFolder
from pipespec.system.network_interfaces import interface_with, interfaces, resolve
from pipespec.system.versions import has_own_protocol, own_version

# Seconds without a message from the launcher after which a host behind SSH ends.
SILENCE_S = 40
# Seconds between two signs of life, and between two looks for the launcher while modules are
# imported.
SIGN_OF_LIFE_S, LOOK_S = 1.0, 0.5
# Seconds within which the folder of this host is removed.
REMOVING_S = 2.0


class EndRequested(BaseException):
    """A signal asks for the end; what is imported must not catch it."""


@dataclass(frozen=True)
class AgentSetup:
    """What the agent must know before it imports. `preload`: modules to import once for all
    workers. Batches use `interface`, or the one that has `address`. `lock` names the lock that one
    agent of the host holds; an older holder is ended. `remote`: the launcher is at the other end of
    an SSH connection; `restarted`: the cluster runs already, and the host may have another version
    by now."""

    preload: tuple[str, ...]
    num_workers: int
    address: str
    interface: str | None = None
    lock: str | None = None
    remote: bool = False
    restarted: bool = False


def main() -> None:
    code = 1
    try:
        code = _main(sys.stdin.buffer)
    except PipespecError as error:
        send_message({"refused": str(error)})
    except BaseException:  # noqa: BLE001 - the launcher reads the last line of it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # skips half a second of dismantling torch


def _main(stdin: BinaryIO) -> int:
    """The exit code. Raises PipespecError if this host cannot begin."""
    launcher = stdin.readline().decode(errors="replace").strip()
    if not has_own_protocol(launcher):  # nothing else that it sends need mean the same here
        check_version(launcher)
    setup: AgentSetup = pickle.load(stdin)
    if not setup.restarted:
        check_version(launcher)
    with ExitStack() as stack:
        stack.enter_context(sole_agent(setup.lock))
        # The workers hold it too: it is removed with the last of them, whatever ends them.
        scratch = TemporaryFolder()
        stack.callback(scratch.close, REMOVING_S)
        _set_environment(setup, scratch.folder)
        send_message({"preparing": True})
        for ending in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(ending, _on_signal)
        try:
            _import(setup.preload, stdin)
            job: WorkerJob = pickle.load(stdin)
            # SIGALRM ends a host whose launcher is silent, also while a message cannot be sent.
            rearm = partial(signal.alarm, SILENCE_S if setup.remote else 0)
            rearm()
            try:
                outcome = run_workers(scratch.folder, job, stdin.fileno(), rearm)
            except OSError as error:  # such as no memory for a process
                outcome = {"failed": f"the agent of host {job.host} cannot go on ({error})"}
        except (EndRequested, EOFError):  # the launcher has found something wrong, or is gone
            return 1
        send_message(outcome)
        return 0


def _import(modules: Sequence[str], stdin: BinaryIO) -> None:
    """Import what all workers need, while the launcher decides. Raises EndRequested when it is
    gone."""
    hung_up = select.poll()
    hung_up.register(stdin, getattr(select, "POLLRDHUP", 0))

    def look(*_: object) -> None:
        if hung_up.poll(0):
            raise EndRequested

    signal.signal(signal.SIGALRM, look)
    signal.siginterrupt(signal.SIGALRM, False)  # libraries need not know of it
    signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
    # What is imported stays: no collection of garbage need visit it, here or in the workers, whose
    # memory it would copy.
    gc.disable()
    for module in modules:
        with suppress(Exception):  # the worker imports it again, and reports what is wrong
            import_module(module)
    gc.freeze()
    gc.enable()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, _on_signal)
    sys.stdout.flush()
    os.write(1, b"\n")  # a module may have left a line of its own unfinished


def check_version(launcher: str) -> None:
    if launcher != (own := own_version()):
        raise HostFailed(
            f"pipespec there is {own}, but that of the launcher is {launcher}; install the same on "
            "all hosts"
        )


def _on_signal(number: int, _: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise EndRequested


def _set_environment(setup: AgentSetup, directory: Path) -> None:
    environment = os.environ
    # Until a worker knows its rank, and with it its share of the cores. OpenBLAS keeps idle threads
    # from import on, and a process with threads must not fork.
    if "OMP_NUM_THREADS" not in environment:
        environment["OMP_NUM_THREADS"] = str(max(1, num_cores() // setup.num_workers))
        environment[SHARES_CORES] = "yes"
    environment["OPENBLAS_NUM_THREADS"] = "1"
    # Threads of OpenMP that poll for work take the cores of other ranks.
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    # `torch.cuda.is_available` asks NVML, so that no import makes this process use CUDA.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # Whatever a killed process leaves is removed with it.
    environment["TMPDIR"] = tempfile.tempdir = str(directory)
    choose_interface(setup.address, setup.interface)


def choose_interface(address: str, name: str | None) -> None:
    found = interface_with(resolve(address), interfaces())
    interface = name or (found.name if found else None)
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface


if __name__ == "__main__":
    # What the workers run is pickled by this module's name.
    from pipespec.cluster.processes.agent import main as imported_main

    imported_main()
