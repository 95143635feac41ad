"""The agent of one host, as its launcher sees it: starts it, sends its job, reads its messages."""

from __future__ import annotations

import logging
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pipespec.cluster.host_link import programs
from pipespec.cluster.host_link.agent_lock import PATIENCE_S
from pipespec.cluster.processes.agent import SIGN_OF_LIFE_S, AgentSetup
from pipespec.cluster.processes.fault_stats import FaultKind
from pipespec.cluster.processes.forked_workers import WorkerJob, how_it_ended, last_line
from pipespec.config.hosts import Host
from pipespec.system.versions import own_version

AGENT = "pipespec.cluster.processes.agent"
# Seconds between two tries to start the agent of a host that was lost.
_RETRY_S = 1.0
# Seconds for which the connection to a host may be silent: a link that comes back in time finds
# the workers and their weights alive.
_CUT_S = 25

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerDeath:
    """A worker was ended by a signal, by its agent if it hung (WORKER_SILENT), and replaced.
    `how` says why; `pid` is None where a whole host was lost."""

    worker: str
    how: str
    pid: int | None
    kind: FaultKind = FaultKind.WORKER_ENDED

    def of(self, pids: Mapping[str, int]) -> bool:
        return self.worker in pids and self.pid in (None, pids[self.worker])


class AgentHandle:
    """The agent of one host, and what it has reported. Its listener, a thread per agent, writes
    `reached`, `ended_at`, how far it is and the result; `signs` changes for a worker whenever the
    agent has seen its process run. The session's thread and the recovery's both start and stop
    agents, under one lock; only the recovery restarts lost agents."""

    def __init__(
        self,
        host: Host,
        modules: tuple[str, ...],
        lock: str | None,
        deaths: queue.SimpleQueue[WorkerDeath],
    ) -> None:
        self.host = host
        self.guest = False  # whether it has joined, so that its end does not end the others
        self._job: WorkerJob | None = None
        self._modules, self._lock = modules, lock
        self._deaths = deaths
        self._on_log: Callable[[str, str], None] | None = None
        self._stopped = False
        self._changing = threading.RLock()  # two threads start and stop it
        self.reached = False  # whether an agent of the host ever sent a message
        self.signs = dict.fromkeys(host.workers, 0)
        self._refusal = ""  # the last sentence with which a restarted agent refused
        self._start()

    def _start(self, *, restarted: bool = False) -> None:
        self._result: dict[str, Any] | None = None  # its outcome, as a message
        self.ended_at = math.inf  # when that was, or when its last message was read
        self._began = time.monotonic()
        self._restarted = restarted
        self._refused = False  # whether it cannot start again
        self._answered = False  # whether it sent another message
        self._works = False  # whether it has forked workers
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it ends with the host
        try:
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            self._agent = programs.start_module(
                self.host,
                AGENT,
                alive_count=_CUT_S,
                stderr=self._log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path},
            )
            self._listener = threading.Thread(target=self._listen, args=(self._agent,), daemon=True)
            self._listener.start()
        except BaseException:  # a signal, too: the process reads the end of its input, and ends
            self._log.close()
            raise
        self._writing = threading.Lock()
        setup = AgentSetup(
            preload=self._modules,
            num_workers=len(self.host.devices),
            address=self.host.address,
            interface=self.host.interface,
            lock=self._lock,
            remote=not self.host.local,
            restarted=restarted,
        )
        self._write(f"{own_version()}\n".encode() + pickle.dumps(setup))

    def start_workers(self, job: WorkerJob, on_log: Callable[[str, str], None] | None) -> None:
        self._on_log = on_log
        with self._changing:
            self._job = job
            self._write(pickle.dumps(job))
            if not self.host.local:
                agent = self._agent
                threading.Thread(
                    target=self._send_signs_of_life, args=(agent,), daemon=True
                ).start()

    def _write(self, data: bytes) -> None:
        stdin = self._agent.stdin
        assert stdin is not None
        try:
            with self._writing:
                stdin.write(data)
                stdin.flush()
        except (BrokenPipeError, ConnectionResetError):
            pass  # The agent has ended already; wait() reports why.
        except BaseException:
            self.stop()
            raise

    @property
    def running(self) -> bool:
        """Whether anything of the host still runs; a lost one that will be restarted counts."""
        if self._stopped:
            return False
        return self._agent_runs or (self._job is not None and self._lost)

    @property
    def _agent_runs(self) -> bool:
        # An agent's last messages are read after its end, and may hold its outcome. Once that is
        # known, its helpers need not be waited for.
        known = self._job is None or self._result is not None
        return self._listener.is_alive() and not (known and self._agent.poll() is not None)

    @property
    def _lost(self) -> bool:
        """Whether the agent, or the connection to it, ended without an outcome."""
        # Once all messages are read: the last one may be the outcome.
        over = self._refused or not self._listener.is_alive()
        return self.reached and over and self._result is None

    @property
    def failed(self) -> bool:
        """Whether the host ended before its work did, or has reported why it will."""
        if self._result is None:
            if self.running:
                return False
            self._listener.join(PATIENCE_S)  # its last message may not have been read
        return self._result is None or "ended" not in self._result

    def join(self, timeout: float) -> None:
        self._listener.join(timeout)

    @property
    def preparing(self) -> bool:
        """Whether its agent starts, or will start at once: no worker can be running yet."""
        return not self._works and (self._answered or self.host.local)

    def restart_if_lost(self) -> None:
        """Start the agent of a lost host again. One that still runs there ends first."""
        with self._changing:
            if self._stopped or self._job is None or not self._lost:
                return
            if time.monotonic() - self._began < _RETRY_S:
                return
            self._end_processes()
            self._log.close()
            if self._answered:  # else they died before, and there were no others
                for worker in self.host.workers:
                    self._deaths.put(WorkerDeath(worker, "its host was lost", None))
            self._start(restarted=True)
            self.start_workers(self._job, self._on_log)

    def why(self) -> str:
        """The sentence of a host that has failed; nothing of it runs then."""
        if self._stopped:
            return "the ranks were stopped before their work was done."
        if self._result is None:
            self._end_processes()
            return self._ending()
        if "refused" in self._result:
            return f"{self.host.name}: {self._result['refused']}"
        return str(self._result["failed"])

    def close_stdin(self) -> None:
        assert self._agent.stdin is not None
        with self._writing, suppress(OSError):  # It ended before it had read its job.
            self._agent.stdin.close()

    def stop(self, patience_s: float = PATIENCE_S) -> None:
        """End every worker and helper; harmless when called again. An agent that has not ended
        after `patience_s` seconds is killed."""
        with self._changing:
            if not self._stopped:
                self._stopped = True
                self._end_processes(patience_s)
                self._log.close()

    def _listen(self, agent: programs.Program) -> None:
        assert agent.stdout is not None
        for line in agent.stdout:
            if (message := programs.message_in(line)) is None:
                continue
            self.reached = True
            if "refused" in message and self._restarted:
                self._note_refusal(message["refused"])
                continue
            self._answered = True
            self._works = "preparing" not in message
            if "died" in message:
                worker = self.host.workers[message["died"]]
                kind = FaultKind.WORKER_SILENT if message["hung"] else FaultKind.WORKER_ENDED
                self._deaths.put(WorkerDeath(worker, message["how"], message["pid"], kind))
            elif "present" in message:
                for number in message["present"]:
                    self.signs[self.host.workers[number]] += 1
            elif "log" in message:
                if self._on_log is not None:
                    self._on_log(self.host.workers[message["log"]], message["line"])
            elif message and self._works:
                self._result, self.ended_at = message, time.monotonic()
        self.ended_at = min(self.ended_at, time.monotonic())

    def _note_refusal(self, reason: str) -> None:
        """The host of a cluster that runs cannot start its workers now: it counts as lost, and is
        tried again, while others may take its place."""
        self._refused = True
        if reason != self._refusal:
            self._refusal = reason
            log.warning("%s cannot start again: %s", self.host.name, reason)

    def _send_signs_of_life(self, agent: programs.Program) -> None:
        stdin = agent.stdin
        assert stdin is not None
        while agent.poll() is None and not self._stopped:
            with self._writing, suppress(OSError, ValueError):  # It is gone, or hung up on.
                stdin.write(b"\n")
                stdin.flush()
            time.sleep(SIGN_OF_LIFE_S)

    def _end_processes(self, patience_s: float = PATIENCE_S) -> None:
        assert self._agent.stdout is not None
        if self._job is None and self.host.local:
            self._signal_group(signal.SIGKILL)  # nothing has begun; it would import to the end
        self.close_stdin()
        try:
            self._agent.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            self._agent.wait()
        self._listener.join(patience_s)
        self._signal_group(signal.SIGKILL)
        self._listener.join()
        self._agent.stdout.close()

    def _signal_group(self, number: signal.Signals) -> None:
        # While the pipe is held the group has a process, so its id cannot be another's.
        if self._listener.is_alive() and isinstance(self._agent, subprocess.Popen):
            with suppress(ProcessLookupError):  # The last process ended just now.
                os.killpg(self._agent.pid, number)

    def _ending(self) -> str:
        self._log.seek(0)
        output = self._log.read()
        if not self.host.local:
            return str(programs.failure(self.host, AGENT, self._agent.wait(), output))
        ended = how_it_ended(self._agent.wait())
        return f"the launcher of the ranks on host {self.host.name} ({ended}): {last_line(output)}"
