"""What runs on each host: the agent, torchrun, and the supervisors of its workers.

    agent ── torchrun ─┬─ supervisor ── worker (host/0)
                       └─ supervisor ── worker (host/1)

The *agent* talks with the launcher of the cluster and imports no torch. *torchrun*'s elastic
launcher has a process of its own (`torchrun.py`), from which all others are forked. What it treats
as a rank is a *supervisor*, which forks the worker, and another one when a signal has ended it.

The agent reads from standard input the launcher's version, one line, its setup and its job; then
lines that are signs of life. The end of standard input, or on a host behind SSH SILENCE_S without a
line, ends the host. It writes JSON objects to standard output, one per line: {"preparing": true}
until it has forked a worker, {"imported": bytes}, by torchrun before it reads the job,
{"died": number, "pid": ..., "how": ..., "hung": ...}, {"log": number, "line": ...}, as a sign of
life {"present": numbers of the workers that run}, and at last {"failed": sentence}, {"lost":
sentence}, {"ended": true}, or {"refused": clause} if it cannot begin. All processes of the host
hold that output, so it ends when the last of them is gone."""

from __future__ import annotations

import json
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NoReturn, cast

import psutil

from pipespec.cluster.host_link.agent_lock import PATIENCE_S, sole_agent
from pipespec.cluster.processes.torchrun import (
    MONITOR_S,
    OUTCOME,
    WorkerJob,
    how_it_ended,
    last_line,
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
TORCHRUN = "pipespec.cluster.processes.torchrun"
# The file for the standard error of torchrun.
_LOG = "torchrun.log"
_NOT_RUNNING = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
_leftovers: list[Path] = []  # to be removed when the agent ends


class EndRequested(Exception):
    """A signal, or the end of standard input, asks for the end."""


@dataclass(frozen=True)
class AgentSetup:
    """What the agent must know before torchrun can import. `directory` has all files of this host;
    None: the agent makes and removes one. `preload`: modules to import once for all workers.
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
        _send_message({"refused": str(error)})
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
        _send_message({"preparing": True})
        signal.signal(signal.SIGTERM, _on_signal)
        torchrun: subprocess.Popen[bytes] | None = None
        try:
            with open(directory / _LOG, "wb") as log:
                # Its standard input ends when this process is gone.
                torchrun = subprocess.Popen(
                    [sys.executable, "-m", TORCHRUN], stdin=subprocess.PIPE, stderr=log
                )
            # It imports while the launcher decides.
            _send_to_torchrun(torchrun, setup.preload)
            job = _job_from(stdin, torchrun, directory / _LOG)
            _send_to_torchrun(torchrun, (str(directory), job))
            reporter = _Reporter(directory, job)
            listen = partial(_listen, stdin, SILENCE_S if setup.remote else None)
            for run in (listen, reporter.run):
                threading.Thread(target=_run_or_end, args=(run,), daemon=True).start()
            code = torchrun.wait()
        except (EndRequested, EOFError):  # the launcher has found something wrong, or is gone
            if torchrun is not None:
                _end(torchrun)
            # The outcome is not read, and a launcher that was killed cannot remove its directory.
            shutil.rmtree(directory, ignore_errors=True)
            _remove_leftovers()
            os._exit(1)
        reporter.stop()
        _send_message(_outcome(directory, job, code))
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


def _job_from(stdin: BinaryIO, torchrun: subprocess.Popen[bytes], log: Path) -> WorkerJob:
    """The launcher's job. Raises HostFailed if torchrun ends before it is there."""

    def check(*_: object) -> None:
        if (code := torchrun.poll()) is not None:
            reason = last_line(log.read_bytes())
            raise HostFailed(f"torchrun ended too early ({how_it_ended(code)}): {reason}")

    signal.signal(signal.SIGCHLD, check)
    try:
        check()
        return cast(WorkerJob, pickle.load(stdin))
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _send_to_torchrun(torchrun: subprocess.Popen[bytes], message: object) -> None:
    assert torchrun.stdin is not None
    with suppress(BrokenPipeError):  # it has ended; its exit code is read soon
        pickle.dump(message, torchrun.stdin)
        torchrun.stdin.flush()


def _end(torchrun: subprocess.Popen[bytes]) -> None:
    torchrun.terminate()
    try:
        torchrun.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        torchrun.kill()
        torchrun.wait()


def _outcome(directory: Path, job: WorkerJob, code: int) -> dict[str, Any]:
    """The outcome that torchrun has written, or a message of its failure if it has written none."""
    try:
        found: dict[str, Any] = json.loads((directory / OUTCOME).read_bytes())
        return found
    except FileNotFoundError:
        reason = last_line((directory / _LOG).read_bytes())
        sentence = f"torchrun on host {job.host} ({how_it_ended(code)}): {reason}"
        return {"lost" if code < 0 else "failed": sentence}


def _send_message(message: dict[str, Any]) -> None:
    with suppress(OSError):  # The launcher is gone; standard input ends then.
        os.write(1, json.dumps(message).encode() + b"\n")


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
    # `torch.cuda.is_available` asks NVML, so that no import makes torchrun's process use CUDA.
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
    while select.select([stdin], [], [], limit_s)[0] and os.read(stdin.fileno(), CHUNK_BYTES):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _run_or_end(run: Callable[[], None]) -> None:
    """A thread without which this host must not go on, as nobody would hear of its workers."""
    try:
        run()
    except BaseException:  # noqa: BLE001 - the launcher reads the last line of it
        traceback.print_exc()
        os.kill(os.getpid(), signal.SIGTERM)


class _Reporter:
    def __init__(self, directory: Path, job: WorkerJob) -> None:
        self._directory = directory
        self._job = job
        self._read: dict[Path, int] = {}  # bytes of the logs that were passed on
        self._done = threading.Event()
        self._over = threading.Event()

    def run(self) -> None:
        last_sent_at, begun = time.monotonic(), False
        while True:
            last = self._done.wait(MONITOR_S)
            for path in sorted(self._directory.glob("died-*.json")):
                _send_message(json.loads(path.read_text()))
                path.unlink()
            if self._job.logs:
                for path in sorted(self._directory.glob("logs/*/attempt_0/*/*.log")):
                    self._send_log(path, last)
            if time.monotonic() - last_sent_at > SIGN_OF_LIFE_S:
                last_sent_at = time.monotonic()
                begun = begun or any(self._directory.glob("*.pid"))
                _send_message({"present": self._present()} if begun else {"preparing": True})
            if last:
                self._over.set()
                return

    def _present(self) -> list[int]:
        found = []
        for path in self._directory.glob("*.pid"):
            with suppress(FileNotFoundError, psutil.Error):  # it has just ended
                if psutil.Process(int(path.read_text())).status() not in _NOT_RUNNING:
                    found.append(int(path.stem))
        return found

    def stop(self) -> None:
        self._done.set()
        self._over.wait(PATIENCE_S)

    def _send_log(self, path: Path, last: bool) -> None:
        with path.open("rb") as log:
            log.seek(self._read.get(path, 0))
            text = log.read()
        whole = len(text) if last else text.rfind(b"\n") + 1
        self._read[path] = self._read.get(path, 0) + whole
        for line in text[:whole].decode(errors="replace").splitlines():
            _send_message({"log": int(path.parent.name), "line": line})


def _remove_leftovers() -> None:
    for path in _leftovers:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


if __name__ == "__main__":
    # What the workers run is pickled by this module's name.
    from pipespec.cluster.processes.agent import main as imported_main

    imported_main()
