"""What runs on each host: the agent, torchrun, and the supervisors of its workers.

    agent ── torchrun ─┬─ supervisor ── worker (host/0)
                       └─ supervisor ── worker (host/1)

The *agent* talks with whoever started the cluster and imports no torch. *torchrun*'s elastic
launcher has a process of its own (`pipespec.cluster.torchrun`), from which all others are forked.
What it takes for a rank is a *supervisor* (`pipespec.cluster.supervisor`): it forks the worker
that does the work, and, in a cluster that mends itself, forks another when a signal has ended it;
the others of the host go on.

The agent reads its job from standard input, then one JSON object per line: {"kill": number} ends
a worker, anything else says that the launcher lives. The end of standard input, or on a host
behind SSH SILENCE_S without a line, ends the agent and with it the host. It writes one JSON object
per line to standard output: {"preparing": true} until it has forked a worker, then
{"died": number, "pid": ..., "how": ...} and {"log": number, "line": ...}, and at last
{"failed": sentence}, {"lost": sentence} or {"ended": true}; {} says that it lives. All processes of
the host hold that standard output, so its end tells that the last of them is gone.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NoReturn

from pipespec.cluster.agent_lock import PATIENCE_S, alone
from pipespec.cluster.supervisor import Job, how_it_ended
from pipespec.cluster.torchrun import MONITOR_S, OUTCOME, last_line
from pipespec.system.interfaces import holding, interfaces, resolve
from pipespec.system.scratch import PREFIX

# Seconds without a word from the launcher after which a host behind SSH gives up.
SILENCE_S = 40.0
# Seconds between two signs of life.
SIGN_OF_LIFE_S = 1.0
TORCHRUN = "pipespec.cluster.torchrun"
# The file for what torchrun has to say, where it does not reach its outcome.
_LOG = "torchrun.log"
_leftovers: list[Path] = []  # to be removed when the agent ends


class Ended(Exception):
    """A signal, or the end of standard input, asks for the end."""


@dataclass(frozen=True)
class Setup:
    """What the agent must know before torchrun can import.

    Attributes:
        directory: where everything of this host lies; None: the agent makes and removes one.
        preload: modules to import once for all workers.
        address: of the host, for the interface that carries the batches.
        interface: its name, if that address does not tell.
        lock: what no two agents of a host may share; the older one is ended.
        remote: whether the launcher is at the other end of an SSH connection.
    """

    directory: str | None
    preload: tuple[str, ...]
    num_workers: int
    address: str
    interface: str | None = None
    lock: str | None = None
    remote: bool = False


def make_directory() -> Path:
    """A directory that only this user can open."""
    return Path(tempfile.mkdtemp(prefix=PREFIX))


def main() -> None:
    """Read the job from standard input, run the workers, leave the outcome."""
    try:
        _main(sys.stdin.buffer)
    except BaseException:  # noqa: BLE001 - the launcher reads the last line of it
        traceback.print_exc()
        _tidy()
    finally:
        sys.stderr.flush()
        os._exit(1)  # threads still listen


def _main(stdin: BinaryIO) -> NoReturn:
    setup: Setup = pickle.load(stdin)
    directory = Path(setup.directory) if setup.directory else make_directory()
    if setup.directory is None:
        _leftovers.append(directory)
    with alone(setup.lock, directory) as lock:
        if lock is not None:
            _leftovers.append(lock)
        _prepare(setup, directory)
        _tell({"preparing": True})
        signal.signal(signal.SIGTERM, _on_signal)
        torchrun: subprocess.Popen[bytes] | None = None
        try:
            torchrun = _start(directory)
            # It imports while the launcher decides.
            _hand(torchrun, setup.preload)
            job: Job = pickle.load(stdin)
            _hand(torchrun, (str(directory), job))
            listener = _Listener(stdin, directory, patient=not setup.remote)
            threading.Thread(target=listener.run, daemon=True).start()
            teller = _Teller(directory, job)
            threading.Thread(target=teller.run, daemon=True).start()
            code = torchrun.wait()
        except (Ended, EOFError):  # the launcher has found something wrong, or is gone
            if torchrun is not None:
                _end(torchrun)
            # Nobody reads the outcome, and a launcher that was killed cannot remove its directory.
            shutil.rmtree(directory, ignore_errors=True)
            _tidy()
            os._exit(1)
        teller.stop()
        _tell(_outcome(directory, job, code))
        _tidy()
        os._exit(0)


def _on_signal(number: int, _: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise Ended


def _start(directory: Path) -> subprocess.Popen[bytes]:
    """torchrun's process; the end of its standard input tells it that this one is gone."""
    with open(directory / _LOG, "wb") as log:
        return subprocess.Popen([sys.executable, "-m", TORCHRUN], stdin=subprocess.PIPE, stderr=log)


def _hand(torchrun: subprocess.Popen[bytes], what: object) -> None:
    assert torchrun.stdin is not None
    with suppress(BrokenPipeError):  # it has ended; how, is seen soon
        pickle.dump(what, torchrun.stdin)
        torchrun.stdin.flush()


def _end(torchrun: subprocess.Popen[bytes]) -> None:
    """Have it end its supervisors."""
    torchrun.terminate()
    try:
        torchrun.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        torchrun.kill()
        torchrun.wait()


def _outcome(directory: Path, job: Job, code: int) -> dict[str, Any]:
    """What torchrun has left, or what to say if it left nothing."""
    try:
        found: dict[str, Any] = json.loads((directory / OUTCOME).read_bytes())
        return found
    except FileNotFoundError:
        said = last_line((directory / _LOG).read_bytes())
        sentence = f"torchrun on host {socket.gethostname()} ({how_it_ended(code)}): {said}"
        return {"lost" if job.restart and code < 0 else "failed": sentence}


def _tell(message: dict[str, Any]) -> None:
    with suppress(OSError):  # The launcher is gone; standard input says so too.
        os.write(1, json.dumps(message).encode() + b"\n")


def _prepare(setup: Setup, directory: Path) -> None:
    """The environment of every process of this host."""
    cores = len(os.sched_getaffinity(0))
    environment = os.environ
    # Several workers share the cores. OpenBLAS keeps idle threads from import on, and a process
    # with threads must not fork.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // setup.num_workers)))
    environment["OPENBLAS_NUM_THREADS"] = "1"
    # `torch.cuda.is_available` asks NVML, so that no import makes torchrun's process use CUDA.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # Whatever a killed process leaves is removed with the directory.
    environment["TMPDIR"] = tempfile.tempdir = str(directory)
    choose_interface(setup.address, setup.interface)


def choose_interface(address: str, name: str | None) -> None:
    """Let torch.distributed use the interface of that name, or the one that has the address."""
    found = holding(resolve(address), interfaces())
    interface = name or (found.name if found else None)
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface


class _Listener:
    """Does what the launcher says."""

    def __init__(self, stdin: BinaryIO, directory: Path, *, patient: bool) -> None:
        self._stdin = stdin
        self._directory = directory
        self._heard = time.monotonic()
        if not patient:
            threading.Thread(target=self._watch, daemon=True).start()

    def run(self) -> None:
        for line in self._stdin:
            self._heard = time.monotonic()
            number = json.loads(line).get("kill")
            with suppress(FileNotFoundError, ProcessLookupError):
                if number is not None:
                    os.kill(int((self._directory / f"{number}.pid").read_text()), signal.SIGKILL)
        self._end()

    def _watch(self) -> None:
        while time.monotonic() - self._heard < SILENCE_S:
            time.sleep(SIGN_OF_LIFE_S)
        self._end()

    def _end(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class _Teller:
    """Tells the launcher what happens on this host."""

    def __init__(self, directory: Path, job: Job) -> None:
        self._directory = directory
        self._job = job
        self._read: dict[Path, int] = {}  # bytes of the logs that were passed on
        self._done = threading.Event()
        self._over = threading.Event()

    def run(self) -> None:
        spoke, begun = time.monotonic(), False
        while True:
            last = self._done.wait(MONITOR_S)
            for path in sorted(self._directory.glob("died-*.json")):
                _tell(json.loads(path.read_text()))
                path.unlink()
            if self._job.logs:
                for path in sorted(self._directory.glob("logs/*/attempt_0/*/*.log")):
                    self._pass_on(path, last)
            if time.monotonic() - spoke > SIGN_OF_LIFE_S:
                spoke = time.monotonic()
                begun = begun or any(self._directory.glob("*.pid"))
                _tell({} if begun else {"preparing": True})
            if last:
                self._over.set()
                return

    def stop(self) -> None:
        """Tell the rest."""
        self._done.set()
        self._over.wait(PATIENCE_S)

    def _pass_on(self, path: Path, last: bool) -> None:
        with path.open("rb") as log:
            log.seek(self._read.get(path, 0))
            text = log.read()
        whole = len(text) if last else text.rfind(b"\n") + 1
        self._read[path] = self._read.get(path, 0) + whole
        for line in text[:whole].decode(errors="replace").splitlines():
            _tell({"log": int(path.parent.name), "line": line})


def _tidy() -> None:
    """Remove what this agent made itself."""
    for path in _leftovers:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


if __name__ == "__main__":
    # What the workers run is pickled by this module's name.
    from pipespec.cluster.agent import main as imported_main

    imported_main()
