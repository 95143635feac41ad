"""What runs on each host: the agent, the fork server, and its workers.

    agent ── fork server ─┬─ worker (host/0)
                          └─ worker (host/1)

The *agent* talks with the launcher of the cluster and imports no torch. The *fork server*
(`fork_server.py`) imports once what all workers need, forks them, and watches them.

The agent reads from standard input the launcher's version, one line, its setup and its job; then
lines that are signs of life. The end of standard input, or on a host behind SSH SILENCE_S without a
line, ends the host. To standard output go JSON objects, one per line: from the agent
{"preparing": true}; from the fork server
{"died": number, "pid": ..., "how": ..., "hung": ...}, {"log": number, "line": ...}, as a sign of
life {"present": numbers of the workers that run}, and at last {"ended": true} or
{"failed": sentence}. If the fork server ends without that, the agent writes {"failed": sentence},
or {"lost": sentence} if it was ended by a signal and the host may be started again; if it cannot
begin, {"refused": clause}. All processes of the host hold that output, so it ends when the last of
them is gone."""

from __future__ import annotations

import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO, NoReturn, cast

from pipespec.cluster.host_link.agent_lock import PATIENCE_S, sole_agent
from pipespec.cluster.processes.fork_server import (
    WorkerJob,
    how_it_ended,
    last_line,
    send_message,
)
from pipespec.errors import HostFailed, PipespecError
from pipespec.system.cores import SHARES_CORES, num_cores
from pipespec.system.files import PREFIX
from pipespec.system.network_interfaces import interface_with, interfaces, resolve
from pipespec.system.resource_limits import require_resources
from pipespec.system.versions import has_own_protocol, own_version

# Seconds without a message from the launcher after which a host behind SSH ends.
SILENCE_S = 40.0
CHUNK_BYTES = 2**16
# Seconds between two signs of life.
SIGN_OF_LIFE_S = 1.0
FORK_SERVER = "pipespec.cluster.processes.fork_server"
# The file for the standard error of the fork server.
_LOG = "fork_server.log"
_leftovers: list[Path] = []  # to be removed when the agent ends


class EndRequested(Exception):
    """A signal, or the end of standard input, asks for the end."""


@dataclass(frozen=True)
class AgentSetup:
    """What the agent must know before the fork server can import. `directory` has all files of this
    host; None: the agent makes and removes one. `preload`: modules to import once for all workers.
    Batches use `interface`, or the one that has `address`. `lock` names the lock that one agent of
    the host holds; an older holder is ended. `remote`: the launcher is at the other end of an SSH
    connection; `restarted`: the cluster runs already, and the host may have another version by
    now."""

    directory: str | None
    preload: tuple[str, ...]
    num_workers: int
    address: str
    interface: str | None = None
    lock: str | None = None
    remote: bool = False
    restarted: bool = False


def main() -> None:
    try:
        _main(sys.stdin.buffer)
    except PipespecError as error:
        send_message({"refused": str(error)})
        _remove_leftovers()
    except BaseException:  # noqa: BLE001 - the launcher reads the last line of it
        traceback.print_exc()
        _remove_leftovers()
    finally:
        sys.stderr.flush()
        os._exit(1)  # threads still listen


def _main(stdin: BinaryIO) -> NoReturn:
    launcher = stdin.readline().decode(errors="replace").strip()
    if not has_own_protocol(launcher):  # nothing else that it sends need mean the same here
        check_version(launcher)
    require_resources()
    setup: AgentSetup = pickle.load(stdin)
    if not setup.restarted:
        check_version(launcher)
    directory = Path(setup.directory) if setup.directory else Path(tempfile.mkdtemp(prefix=PREFIX))
    if setup.directory is None:
        _leftovers.append(directory)
    with sole_agent(setup.lock, directory) as lock:
        if lock is not None:
            _leftovers.append(lock)
        _set_environment(setup, directory)
        send_message({"preparing": True})
        signal.signal(signal.SIGTERM, _on_signal)
        server: subprocess.Popen[bytes] | None = None
        try:
            with open(directory / _LOG, "wb") as log:
                # Its standard input ends when this process is gone.
                server = subprocess.Popen(
                    [sys.executable, "-m", FORK_SERVER], stdin=subprocess.PIPE, stderr=log
                )
            # It imports while the launcher decides.
            _send_to_server(server, setup.preload)
            job = _job_from(stdin, server, directory / _LOG)
            _send_to_server(server, (str(directory), job))
            limit_s = SILENCE_S if setup.remote else None
            threading.Thread(target=_listen, args=(stdin, limit_s), daemon=True).start()
            code = server.wait()
        except (EndRequested, EOFError):  # the launcher has found something wrong, or is gone
            if server is not None:
                _end(server)
            # A launcher that was killed cannot remove its directory.
            shutil.rmtree(directory, ignore_errors=True)
            _remove_leftovers()
            os._exit(1)
        if code:
            reason = last_line((directory / _LOG).read_bytes())
            sentence = f"the fork server on host {job.host} ({how_it_ended(code)}): {reason}"
            send_message({"lost" if code < 0 else "failed": sentence})
        _remove_leftovers()
        os._exit(0)


def check_version(launcher: str) -> None:
    if launcher != (own := own_version()):
        raise HostFailed(
            f"pipespec there is {own}, but that of the launcher is {launcher}; install the same on "
            "all hosts"
        )


def _on_signal(number: int, _: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise EndRequested


def _job_from(stdin: BinaryIO, server: subprocess.Popen[bytes], log: Path) -> WorkerJob:
    """The launcher's job. Raises HostFailed if the fork server ends before it is there."""

    def check(*_: object) -> None:
        if (code := server.poll()) is not None:
            reason = last_line(log.read_bytes())
            raise HostFailed(f"the fork server ended too early ({how_it_ended(code)}): {reason}")

    signal.signal(signal.SIGCHLD, check)
    try:
        check()
        return cast(WorkerJob, pickle.load(stdin))
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _send_to_server(server: subprocess.Popen[bytes], message: object) -> None:
    assert server.stdin is not None
    with suppress(BrokenPipeError):  # it has ended; its exit code is read soon
        pickle.dump(message, server.stdin)
        server.stdin.flush()


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


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
    # `torch.cuda.is_available` asks NVML, so that no import makes the fork server use CUDA.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # Whatever a killed process leaves is removed with the directory.
    environment["TMPDIR"] = tempfile.tempdir = str(directory)
    choose_interface(setup.address, setup.interface)


def choose_interface(address: str, name: str | None) -> None:
    found = interface_with(resolve(address), interfaces())
    interface = name or (found.name if found else None)
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface


def _listen(stdin: BinaryIO, limit_s: float | None) -> None:
    """End the host with its launcher, or once that is silent for so long."""
    with suppress(OSError):
        while select.select([stdin], [], [], limit_s)[0] and os.read(stdin.fileno(), CHUNK_BYTES):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def _remove_leftovers() -> None:
    for path in _leftovers:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


if __name__ == "__main__":
    # What the workers run is pickled by this module's name.
    from pipespec.cluster.processes.agent import main as imported_main

    imported_main()
