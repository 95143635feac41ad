"""Start the members of a cluster on its boxes, and end them whatever happens.

    this process ─┬─ agent of this machine ── ...          (pipespec.cluster.agent)
                  └─ ssh ── agent of another box ── ...

Nobody survives: an agent's standard input is a pipe that nobody else writes to, and its end
(closed by us, by the kernel when we are killed, or by SSH) ends the agent and with it the box.
All processes of this machine hold their agent's standard output, so the end of that pipe tells
that the last of them is gone. They form a session of their own: Ctrl-C reaches this process
alone, and one signal to the group ends what hangs.
"""

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pipespec.cluster import ssh
from pipespec.cluster.agent import SIGN_OF_LIFE_S, Setup, last_line, make_directory
from pipespec.cluster.agent_lock import PATIENCE_S
from pipespec.cluster.supervisor import Job, how_it_ended
from pipespec.config.hosts import LOCAL, Box, this_machine
from pipespec.errors import ConfigError, RankFailed
from pipespec.system.interfaces import LOOPBACK

AGENT = "pipespec.cluster.agent"
# What almost every rank needs and what takes longest to import.
PRELOAD = ("pipespec.cluster.warm",)
# Seconds between two looks at who ended.
_MONITOR_S = 0.1
# Seconds between two tries to start the agent of a box that was lost.
_RETRY_S = 1.0
# Seconds for which the connection to a box may be silent: a link that comes back in time finds
# the members and their weights alive.
_CUT_S = 25
# Seconds after which a silent agent is taken for cut off, and for which one must have been heard
# again before its members count as hanging rather than as not yet back.
_SILENT_S, _BACK_S = 2.0, 5.0


def check_port(port: int) -> None:
    """Raise ConfigError unless the ranks can meet at this port; 0 stands for any free one."""
    if not 0 <= port <= 65535:
        raise ConfigError(
            f"transport.port={port} is no port; choose one of 1..65535, or 0 for any."
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen()
        except OSError as error:
            raise ConfigError(
                f"transport.port={port} cannot be used ({os.strerror(error.errno or 0)}); "
                "choose another port, or 0 for any free one."
            ) from error


@dataclass(frozen=True)
class Death:
    """A member was ended by a signal, and replaced.

    `how` names the signal; `pid` is None where a whole box was lost.
    """

    member: str
    how: str
    pid: int | None


def launch(
    entrypoint: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    num_ranks: int,
    preload: Sequence[str] = PRELOAD,
) -> Cluster:
    """Run `entrypoint(*args)` in `num_ranks` processes here, and return while they start.

    `entrypoint` is a function of an importable module (not of `__main__`); it and `args` must
    pickle. Each rank finds RANK, LOCAL_RANK and WORLD_SIZE in its environment. `preload` names
    modules to import once for all ranks, next to the entrypoint's own.

        with launch(run_rank, (config,), num_ranks=5) as cluster:
            ...             # the ranks run meanwhile
            cluster.wait()
    """
    assert num_ranks > 0
    module, function = entrypoint.__module__, entrypoint.__qualname__
    assert module != "__main__", "the ranks must be able to import the entrypoint"
    devices = ["cpu"] * num_ranks
    cluster = Cluster([this_machine(devices)], (*preload, module))
    cluster.run(f"{module}:{function}", args)
    return cluster


class Cluster:
    """The running members. Leaving the `with` block ends those that still run.

    Their agents start at once and import `modules`, which takes longest; what the members are to
    do may be decided meanwhile, and is said with `run`.

    Args:
        boxes: where they run, one member per device.
        modules: to import once for all members of a box.
        name: with the names of the boxes, what no two clusters share.
    """

    def __init__(
        self, boxes: Sequence[Box], modules: Sequence[str] = PRELOAD, *, name: str | None = None
    ) -> None:
        self.deaths: queue.SimpleQueue[Death] = queue.SimpleQueue()
        self.members = tuple(member for box in boxes for member in box.members)
        self._boxes: list[RunningBox] = []
        try:
            for box in boxes:
                lock = None if name is None or box.local else f"{name}-{box.name}"
                self._boxes.append(RunningBox(box, tuple(modules), lock, self.deaths))
        except BaseException:
            self.stop()
            raise

    def run(
        self,
        entrypoint: str,
        args: Sequence[Any] = (),
        *,
        restart: bool = False,
        on_log: Callable[[str, str], None] | None = None,
    ) -> None:
        """Have every member run `entrypoint(*args)`, and return while they begin.

        Args:
            entrypoint: as "module:function"; it is not imported here.
            restart: whether a member that a signal ended, or a box that was lost, is started
                again; else it ends the cluster.
            on_log: called with the member's name and a line that it wrote.
        """
        packed = pickle.dumps(tuple(args))
        for box in self._boxes:
            names = box.box.members
            job = Job(entrypoint, packed, names, _titles(box.box), restart, on_log is not None)
            box.run(job, on_log)

    def poll(self) -> bool:
        """Whether the members still run.

        Raises:
            RankFailed: a member ended before its work did; all others have been ended too.
        """
        if all(box.running for box in self._boxes):
            return True
        self.wait()
        return False

    def wait(self, timeout: float | None = None) -> list[Any]:
        """What the members of this machine returned, once they and all helpers are gone.

        `timeout` is in seconds.

        Raises:
            RankFailed: a member ended before its work did; all others have been ended too.
            TimeoutError: the members still run.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while any(box.running for box in self._boxes) and not any(
            box.failed for box in self._boxes
        ):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"The ranks still run after {timeout} s.")
            next((box for box in self._boxes if box.running), self._boxes[0]).join(_MONITOR_S)
        for box in self._boxes:
            if not box.running:
                box.settle()
        failed = next((box.outcome for box in self._boxes if isinstance(box.outcome, str)), None)
        self.stop()
        if failed is not None:
            raise RankFailed(failed)
        return [result for box in self._boxes for result in box.outcome]

    def kill(self, member: str, since: float) -> bool:
        """End a member that has hung since a moment of the monotonic clock; its supervisor starts
        another. False: not now, its box may be cut off."""
        for box in self._boxes:
            if member in box.box.members:
                return box.kill(box.box.members.index(member), since)
        return False

    def mend(self) -> None:
        """Start the agents anew of boxes that were lost."""
        for box in self._boxes:
            box.mend()

    def stop(self) -> None:
        """End every member and helper and remove their files; harmless when called again."""
        for box in self._boxes:
            box.hang_up()
        for box in self._boxes:
            box.stop()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def _titles(box: Box) -> tuple[str, ...]:
    """What messages call the members: on one machine a member is a rank."""
    if box.name == LOCAL:
        return tuple(f"rank {number}" for number in range(len(box.devices)))
    return box.members


class RunningBox:
    """The agent of one box, and what it tells."""

    def __init__(
        self,
        box: Box,
        modules: tuple[str, ...],
        lock: str | None,
        deaths: queue.SimpleQueue[Death],
    ) -> None:
        self.box = box
        # What the members returned (on this machine), or the sentence that says what failed.
        self.outcome: list[Any] | str = "the ranks were stopped before their work was done."
        self._job: Job | None = None
        self._modules, self._lock = modules, lock
        self._deaths = deaths
        self._on_log: Callable[[str, str], None] | None = None
        self._stopped = False
        self._changing = threading.RLock()  # two threads start and stop it
        self._reached = False  # whether an agent of the box ever said a word
        self._start()

    def _start(self) -> None:
        self._told: dict[str, Any] | None = None  # the agent's last word
        self._began = self._heard = time.monotonic()
        self._back = -math.inf  # when it was heard again after a silence
        # Other boxes make one of their own.
        self._directory = make_directory() if self.box.local else None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it ends with the box
        setup = Setup(
            directory=None if self._directory is None else str(self._directory),
            preload=self._modules,
            num_members=len(self.box.devices),
            address=self.box.address,
            interface=self.box.interface,
            lock=self._lock,
            remote=not self.box.local,
        )
        options: dict[str, Any] = {"start_new_session": True}
        if self.box.local:
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            options["env"] = {**os.environ, "PYTHONPATH": path}
        self._agent = ssh.popen(
            self.box,
            AGENT,
            alive_count=_CUT_S,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            **options,
        )
        self._ended = threading.Thread(target=self._listen, args=(self._agent,), daemon=True)
        self._ended.start()
        self._writing = threading.Lock()
        self._send(setup)

    def run(self, job: Job, on_log: Callable[[str, str], None] | None) -> None:
        """Tell the agent what its members are to do."""
        self._on_log = on_log
        with self._changing:
            self._job = job
            self._send(job)
            if not self.box.local:
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
        """Whether anything of the box still runs; a lost one that will be mended counts."""
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
        return self._reached and not self._ended.is_alive() and self._told is None

    @property
    def failed(self) -> bool:
        """Whether the box ended before its work did."""
        return not self.running and not (self._told and "ended" in self._told)

    def join(self, timeout: float) -> None:
        """Wait for the end of the box, up to `timeout` seconds."""
        self._ended.join(timeout)

    def tell(self, message: dict[str, Any]) -> None:
        """Send the agent a line."""
        stdin = self._agent.stdin
        assert stdin is not None
        with self._writing, suppress(OSError, ValueError):  # It is gone, or hung up on.
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()

    def kill(self, number: int, since: float) -> bool:
        """End a member that has hung since then, unless the box is, or was just, cut off."""
        back = time.monotonic() - self._back > _BACK_S
        if self.box.local or (self._heard > since and back):
            self.tell({"kill": number})
            return True
        return False

    def mend(self) -> None:
        """Start the agent of a lost box again; one that still runs there ends first."""
        with self._changing:
            if self._stopped or not self._lost or time.monotonic() - self._began < _RETRY_S:
                return
            self._end_processes()
            self._remove_files()
            for member in self.box.members:
                self._deaths.put(Death(member, "its box was lost", None))
            self._start()
            assert self._job is not None, "a box is mended while it runs"
            self.run(self._job, self._on_log)

    def settle(self) -> None:
        """Read the outcome of a box that has ended, and end what it left."""
        if not self._stopped:
            self._end_processes()
            self.outcome = self._read_outcome()

    def hang_up(self) -> None:
        """Ask the agent to end."""
        assert self._agent.stdin is not None
        with self._writing, suppress(OSError):  # It ended before it had read its job.
            self._agent.stdin.close()

    def stop(self) -> None:
        """End every member and helper and remove their files; harmless when called again."""
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
            if "died" in message:
                member = self.box.members[message["died"]]
                self._deaths.put(Death(member, message["how"], message["pid"]))
            elif "log" in message:
                if self._on_log is not None:
                    self._on_log(self.box.members[message["log"]], message["line"])
            elif message and "lost" not in message:
                self._told = message

    def _sign_of_life(self, agent: subprocess.Popen[bytes]) -> None:
        while agent.poll() is None and not self._stopped:
            self.tell({})
            time.sleep(SIGN_OF_LIFE_S)

    def _end_processes(self) -> None:
        assert self._agent.stdout is not None
        if self._job is None and self.box.local:
            self._signal_group(signal.SIGKILL)  # nothing has begun; it would import to the end
        self.hang_up()
        try:
            self._agent.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            self._agent.wait()
        # Spare us the fork server's teardown; multiprocessing's resource tracker, which removes
        # leaked semaphores, ignores this signal.
        self._signal_group(signal.SIGTERM)
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
            return list(pickle.loads((self._directory / "results").read_bytes()))
        self._log.seek(0)
        said = self._log.read()
        if not self.box.local:
            return str(
                ssh.failure(self.box, "pipespec.cluster.agent", self._agent.returncode, said)
            )
        ended = how_it_ended(self._agent.returncode)
        host = socket.gethostname()
        return f"the launcher of the ranks on host {host} ({ended}): {last_line(said)}"
