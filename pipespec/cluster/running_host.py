"""The agent of one host, as its launcher sees it: started, told what to do, heard, ended."""

from __future__ import annotations

import json
import math
import os
import pickle
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from pipespec.cluster import ssh
from pipespec.cluster.agent import SIGN_OF_LIFE_S, Setup, make_directory
from pipespec.cluster.agent_lock import PATIENCE_S
from pipespec.cluster.supervisor import Job, how_it_ended
from pipespec.cluster.torchrun import RESULTS, last_line
from pipespec.config.hosts import Host

AGENT = "pipespec.cluster.agent"
# Seconds between two tries to start the agent of a host that was lost.
_RETRY_S = 1.0
# Seconds for which the connection to a host may be silent: a link that comes back in time finds
# the workers and their weights alive.
_CUT_S = 25
# Seconds after which a silent agent is taken for cut off, and for which one must have been heard
# again before its workers count as hanging rather than as not yet back.
_SILENT_S, _BACK_S = 2.0, 5.0


@dataclass(frozen=True)
class Death:
    """A worker was ended by a signal, and replaced.

    `how` names the signal; `pid` is None where a whole host was lost.
    """

    worker: str
    how: str
    pid: int | None


class Phase(Enum):
    """What an agent has said last: nothing, that it has no worker yet, that it has, that it lost
    a supervisor and ends."""

    SILENT = auto()
    PREPARING = auto()
    WORKING = auto()
    LOST = auto()


def _phase(message: dict[str, Any]) -> Phase:
    if "preparing" in message:
        return Phase.PREPARING
    return Phase.LOST if "lost" in message else Phase.WORKING


class RunningHost:
    """The agent of one host, and what it tells."""

    def __init__(
        self,
        host: Host,
        modules: tuple[str, ...],
        lock: str | None,
        deaths: queue.SimpleQueue[Death],
    ) -> None:
        self.host = host
        # What the workers returned (on this machine), or the sentence that says what failed.
        self.outcome: list[Any] | str = "the ranks were stopped before their work was done."
        self._job: Job | None = None
        self._modules, self._lock = modules, lock
        self._deaths = deaths
        self._on_log: Callable[[str, str], None] | None = None
        self._stopped = False
        self._changing = threading.RLock()  # two threads start and stop it
        self._reached = False  # whether an agent of the host ever said a word
        self._start()

    def _start(self) -> None:
        self._told: dict[str, Any] | None = None  # the agent's last word
        self._began = self._heard = time.monotonic()
        self._back = -math.inf  # when it was heard again after a silence
        self._phase = Phase.SILENT
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it ends with the host
        self._directory: Path | None = None
        try:
            self._agent = self._spawn()
            self._ended = threading.Thread(target=self._listen, args=(self._agent,), daemon=True)
            self._ended.start()
        except BaseException:  # a signal, too: what was spawned hears nobody, and ends
            self._remove_files()
            raise
        self._writing = threading.Lock()
        self._send(self._setup())

    def _setup(self) -> Setup:
        return Setup(
            directory=None if self._directory is None else str(self._directory),
            preload=self._modules,
            num_workers=len(self.host.devices),
            address=self.host.address,
            interface=self.host.interface,
            lock=self._lock,
            remote=not self.host.local,
        )

    def _spawn(self) -> subprocess.Popen[bytes]:
        if self.host.local:  # other hosts make one of their own
            self._directory = make_directory()
        options: dict[str, Any] = {"start_new_session": True}
        if self.host.local:
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            options["env"] = {**os.environ, "PYTHONPATH": path}
        return ssh.popen(
            self.host,
            AGENT,
            alive_count=_CUT_S,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            **options,
        )

    def run(self, job: Job, on_log: Callable[[str, str], None] | None) -> None:
        """Tell the agent what its workers are to do."""
        self._on_log = on_log
        with self._changing:
            self._job = job
            self._send(job)
            if not self.host.local:
                agent = self._agent
                threading.Thread(target=self._sign_of_life, args=(agent,), daemon=True).start()

    def _send(self, what: Setup | Job) -> None:
        stdin = self._agent.stdin
        assert stdin is not None
        try:
            with self._writing:
                pickle.dump(what, stdin)
                stdin.flush()
        except BrokenPipeError:
            pass  # The agent is gone already; wait() says why.
        except BaseException:
            self.stop()
            raise

    @property
    def _restarts(self) -> bool:
        return self._job is not None and self._job.restart

    @property
    def running(self) -> bool:
        """Whether anything of the host still runs; a lost one that will be mended counts."""
        if self._stopped:
            return False
        return self._here or (self._restarts and self._lost)

    @property
    def _here(self) -> bool:
        # The end of what the agent tells comes after its own end, and may say what to make of it;
        # what it has told makes waiting for its helpers needless.
        known = not self._restarts or self._told is not None
        return self._ended.is_alive() and not (known and self._agent.poll() is not None)

    @property
    def _lost(self) -> bool:
        """Whether the agent, or the connection to it, ended without an outcome."""
        # Once all that it told is read: its last word may be the outcome.
        over = self._phase is Phase.LOST or not self._ended.is_alive()
        return self._reached and over and self._told is None

    @property
    def failed(self) -> bool:
        """Whether the host ended before its work did."""
        return not self.running and not (self._told and "ended" in self._told)

    def join(self, timeout: float) -> None:
        """Wait for the end of the host, up to `timeout` seconds."""
        self._ended.join(timeout)

    def tell(self, message: dict[str, Any]) -> None:
        """Send the agent a line."""
        stdin = self._agent.stdin
        assert stdin is not None
        with self._writing, suppress(OSError, ValueError):  # It is gone, or hung up on.
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()

    @property
    def preparing(self) -> bool:
        """Whether its agent is being started, or will be at once: no worker can be there yet."""
        begun = self._phase is not Phase.WORKING and self.host.local
        return self._phase is Phase.PREPARING or begun

    def kill(self, number: int, since: float) -> bool:
        """End a worker that has hung since then, unless the host is, or was just, cut off."""
        if self.preparing:
            return False
        back = time.monotonic() - self._back > _BACK_S
        if self.host.local or (self._heard > since and back):
            self.tell({"kill": number})
            return True
        return False

    def mend(self) -> None:
        """Start the agent of a lost host again; one that still runs there ends first."""
        with self._changing:
            if self._stopped or not self._lost or time.monotonic() - self._began < _RETRY_S:
                return
            self._end_processes()
            self._remove_files()
            for worker in self.host.workers:
                self._deaths.put(Death(worker, "its host was lost", None))
            self._start()
            assert self._job is not None, "a host is mended while it runs"
            self.run(self._job, self._on_log)

    def settle(self) -> None:
        """Read the outcome of a host that has ended, and end what it left."""
        if not self._stopped:
            self._end_processes()
            self.outcome = self._read_outcome()

    def hang_up(self) -> None:
        """Ask the agent to end."""
        assert self._agent.stdin is not None
        with self._writing, suppress(OSError):  # It ended before it had read its job.
            self._agent.stdin.close()

    def stop(self) -> None:
        """End every worker and helper and remove their files; harmless when called again."""
        with self._changing:
            if not self._stopped:
                self._stopped = True
                self._end_processes()
                self._remove_files()

    def _listen(self, agent: subprocess.Popen[bytes]) -> None:
        assert agent.stdout is not None
        for line in agent.stdout:
            message = json.loads(line)
            self._reached = True
            now = time.monotonic()
            if now - self._heard > _SILENT_S:
                self._back = now
            self._heard = now
            self._phase = _phase(message)
            if "died" in message:
                worker = self.host.workers[message["died"]]
                self._deaths.put(Death(worker, message["how"], message["pid"]))
            elif "log" in message:
                if self._on_log is not None:
                    self._on_log(self.host.workers[message["log"]], message["line"])
            elif message and self._phase is Phase.WORKING:
                self._told = message

    def _sign_of_life(self, agent: subprocess.Popen[bytes]) -> None:
        while agent.poll() is None and not self._stopped:
            self.tell({})
            time.sleep(SIGN_OF_LIFE_S)

    def _end_processes(self) -> None:
        assert self._agent.stdout is not None
        if self._job is None and self.host.local:
            self._signal_group(signal.SIGKILL)  # nothing has begun; it would import to the end
        self.hang_up()
        try:
            self._agent.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            self._agent.wait()
        self._ended.join(PATIENCE_S)
        self._signal_group(signal.SIGKILL)
        self._ended.join()
        self._agent.stdout.close()

    def _remove_files(self) -> None:
        self._log.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _signal_group(self, number: signal.Signals) -> None:
        # While the pipe is held the group has a process, so its id cannot be another's.
        if self._ended.is_alive():
            with suppress(ProcessLookupError):  # The last process ended just now.
                os.killpg(self._agent.pid, number)

    def _read_outcome(self) -> list[Any] | str:
        if self._told is not None and "failed" in self._told:
            return str(self._told["failed"])
        if self._told is not None:
            if self._directory is None:
                return []
            return list(pickle.loads((self._directory / RESULTS).read_bytes()))
        self._log.seek(0)
        said = self._log.read()
        if not self.host.local:
            return str(
                ssh.failure(self.host, "pipespec.cluster.agent", self._agent.returncode, said)
            )
        ended = how_it_ended(self._agent.returncode)
        host = socket.gethostname()
        return f"the launcher of the ranks on host {host} ({ended}): {last_line(said)}"
