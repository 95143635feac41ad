"""Start the ranks of a cluster on this machine, and end them whatever happens.

    this process ── agent ── fork server ── rank 0 .. rank n

The *agent* runs torchrun's elastic launcher in its main thread, where that launcher's signal
handlers must live, and keeps its log out of the terminal. The *fork server* imports torch, the
models and the entrypoint once; the ranks are forked from it, so that seventeen of them start
almost as fast as one. It stays a process of one thread without a CUDA context, as forking needs.

Nobody survives: the agent's standard input is a pipe that nobody writes to, and its end (closed
by us, or by the kernel when we are killed) ends the agent and with it the ranks. A rank whose
agent is killed ends itself. All processes of the tree hold the agent's standard output, so the
end of that pipe tells that the last of them is gone. They form a session of their own: Ctrl-C
reaches this process alone, and one signal to the group ends what hangs.
"""

from __future__ import annotations

import gc
import io
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver, parent_process
from pathlib import Path
from typing import Any, NoReturn

from pipespec.errors import ConfigError, RankFailed

LOOPBACK = "127.0.0.1"
# What almost every rank needs and what takes longest to import (numpy.ma: for `np.unique`).
PRELOAD = ("torch.distributed", "transformers.modeling_utils", "numpy.ma")

# Seconds until the processes that do not end when asked to are killed.
_PATIENCE = 5.0
# Seconds for which a rank that lost a neighbour leaves the agent time to notice the neighbour.
_LINGER = 3.0
# The longest name of a Unix socket, in bytes; macOS has the smallest limit.
_MAX_SOCKET = 103
# Seconds between two looks of the agent at its ranks.
_MONITOR_INTERVAL = 0.1


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


def launch(
    entrypoint: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    num_ranks: int,
    port: int = 0,
    preload: Sequence[str] = PRELOAD,
) -> LocalCluster:
    """Run `entrypoint(*args)` in `num_ranks` processes and return while they start.

    `entrypoint` is a function of an importable module (not of `__main__`); it and `args` must
    pickle. Each rank finds RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment.
    `preload` names modules to import once for all ranks, next to the entrypoint's own.

        with launch(run_rank, (config,), num_ranks=5) as cluster:
            ...             # the ranks run meanwhile
            cluster.wait()

    Raises:
        ConfigError: the port is in use.
    """
    assert num_ranks > 0
    assert entrypoint.__module__ != "__main__", "the ranks must be able to import the entrypoint"
    check_port(port)
    return LocalCluster(entrypoint, tuple(args), num_ranks, port, (*preload, entrypoint.__module__))


class LocalCluster:
    """The running ranks. Leaving the `with` block ends those that still run."""

    def __init__(
        self,
        entrypoint: Callable[..., Any],
        args: tuple[Any, ...],
        num_ranks: int,
        port: int,
        preload: tuple[str, ...],
    ) -> None:
        job = pickle.dumps((entrypoint, args, num_ranks, port))
        self.num_ranks = num_ranks
        self._directory = _make_directory()
        with (self._directory / "agent.log").open("wb") as log:
            self._agent = subprocess.Popen(
                [sys.executable, "-c", "from pipespec.launch import _agent; _agent()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(num_ranks, self._directory),
                start_new_session=True,
            )
        self._ended = threading.Thread(target=self._agent.stdout.read, daemon=True)  # type: ignore[union-attr]
        self._ended.start()
        self._stopped = False
        self._outcome: list[Any] | str = "the ranks were stopped before their work was done."
        try:
            pickle.dump((str(self._directory), preload), self._agent.stdin)  # type: ignore[arg-type]
            self._agent.stdin.write(job)  # type: ignore[union-attr]
            self._agent.stdin.flush()  # type: ignore[union-attr]
        except BrokenPipeError:
            pass  # The agent is gone already; wait() says why.
        except BaseException:
            self.stop()
            raise

    def poll(self) -> bool:
        """Whether the ranks still run.

        Raises:
            RankFailed: a rank ended before its work did; all others have been ended too.
        """
        if self._ended.is_alive() and self._agent.poll() is None:
            return True
        self.wait()
        return False

    def wait(self, timeout: float | None = None) -> list[Any]:
        """What the ranks returned, rank 0's first, once they and all helpers are gone.

        `timeout` is in seconds.

        Raises:
            RankFailed: a rank ended before its work did; all others have been ended too.
            TimeoutError: the ranks still run.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._ended.is_alive() and self._agent.poll() is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"The ranks still run after {timeout} s.")
            self._ended.join(_MONITOR_INTERVAL)
        if not self._stopped:
            self._end_processes()
            self._outcome = self._read_outcome()
        self.stop()
        if isinstance(self._outcome, str):
            raise RankFailed(self._outcome)
        return self._outcome

    def stop(self) -> None:
        """End every rank and helper and remove their files; harmless when called again."""
        if not self._stopped:
            self._stopped = True
            self._end_processes()
            shutil.rmtree(self._directory, ignore_errors=True)

    def _end_processes(self) -> None:
        assert self._agent.stdin is not None
        assert self._agent.stdout is not None
        with suppress(BrokenPipeError):  # The agent ended before it had read its job.
            self._agent.stdin.close()
        try:
            self._agent.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            self._agent.wait()
        # Spare us the fork server's teardown; multiprocessing's resource tracker, which removes
        # leaked semaphores, ignores this signal.
        self._signal_group(signal.SIGTERM)
        self._ended.join(_PATIENCE)
        self._signal_group(signal.SIGKILL)
        self._ended.join()
        self._agent.stdout.close()

    def _signal_group(self, number: signal.Signals) -> None:
        # While the pipe is held the group has a process, so its id cannot be another's.
        if self._ended.is_alive():
            with suppress(ProcessLookupError):  # The last process ended just now.
                os.killpg(self._agent.pid, number)

    def _read_outcome(self) -> list[Any] | str:
        """What the ranks returned, or the sentence that says what failed."""
        outcome = self._directory / "outcome"
        if outcome.exists():
            return pickle.loads(outcome.read_bytes())
        ended = _how_it_ended(self._agent.returncode)
        reason = _last_line(self._directory / "agent.log")
        return f"the launcher of the ranks on host {socket.gethostname()} ({ended}): {reason}"

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def _make_directory() -> Path:
    """A private directory in which the fork server's socket can have its name."""
    base = tempfile.gettempdir()
    name = os.path.join(base, "pipespec-12345678", "pymp-12345678", "listener-12345678")
    return Path(
        tempfile.mkdtemp(prefix="pipespec-", dir=base if len(name) < _MAX_SOCKET else "/tmp")
    )


def _environment(num_ranks: int, directory: Path) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    environment = dict(os.environ)
    # Several ranks share the cores. OpenBLAS keeps idle threads from import on, and a process
    # with threads must not fork.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_ranks)))
    environment["OPENBLAS_NUM_THREADS"] = "1"
    # `torch.cuda.is_available` asks NVML, so that no import makes the fork server use CUDA.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # Whatever a killed process leaves is removed with the directory.
    environment["TMPDIR"] = str(directory)
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    for _, interface in socket.if_nameindex():
        if interface in ("lo", "lo0"):
            environment["GLOO_SOCKET_IFNAME"] = interface
    return environment


# --- in the agent ---------------------------------------------------------------------------


def _agent() -> None:
    """The agent's main: read the job from standard input, run the ranks, leave the outcome."""
    stdin = sys.stdin.buffer
    directory, preload = pickle.load(stdin)
    # The fork server imports while this process does.
    forkserver.set_forkserver_preload(list(preload))
    forkserver.ensure_running()
    entrypoint, args, num_ranks, port = pickle.load(stdin)
    # Until the elastic launcher installs its own handler.
    signal.signal(signal.SIGTERM, lambda *_: _leave_nothing(directory))
    threading.Thread(target=_end_with_launcher, args=(stdin,), daemon=True).start()
    outcome = _run_ranks(Path(directory), entrypoint, args, num_ranks, port)
    # Written in one go: a launcher that finds it finds all of it.
    partial = Path(directory, "outcome.partial")
    partial.write_bytes(pickle.dumps(outcome))
    partial.rename(Path(directory, "outcome"))
    # Half a second of dismantling torch would serve nobody.
    gc.collect()
    os._exit(0)


def _end_with_launcher(stdin: io.BufferedReader) -> None:
    stdin.read()
    # The elastic launcher's handler ends the ranks; the second signal never meets it.
    os.kill(os.getpid(), signal.SIGTERM)


def _run_ranks(
    directory: Path,
    entrypoint: Callable[..., Any],
    args: tuple[Any, ...],
    num_ranks: int,
    port: int,
) -> list[Any] | str:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=directory.name,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:{port}",
        rdzv_configs={"is_host": True},
        local_addr=LOOPBACK,
        max_restarts=0,
        monitor_interval=_MONITOR_INTERVAL,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(str(directory / "logs"), redirects=Std.ALL),
        shutdown_timeout=int(_PATIENCE) - 2,
    )
    try:
        results = elastic_launch(config, _rank)(str(directory), entrypoint, args)
        return [results[rank] for rank in range(num_ranks)]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _blame(directory, rank, failure.exitcode)
    except SignalException:
        _leave_nothing(str(directory))


def _leave_nothing(directory: str) -> NoReturn:
    # Nobody reads the outcome, and a launcher that was killed cannot remove its directory.
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def _blame(directory: Path, rank: int, exitcode: int) -> str:
    """The sentence about the rank that failed first.

    `rank` is the first one that the agent saw end. If it raised, so may others have done before
    it within the agent's interval: the earliest of those that did not merely lose a neighbour
    is to blame.
    """
    raised = [json.loads(path.read_text()) for path in directory.glob("raised-*.json")]
    if any(record["rank"] == rank for record in raised):
        first = min(raised, key=lambda record: (record["lost_neighbour"], record["time"]))
        if first["rank"] != rank:
            rank, exitcode = first["rank"], 1
        reason = first["line"]
    else:
        (log,) = directory.glob(f"logs/*/attempt_0/{rank}/stderr.log")
        reason = _last_line(log)
    return f"rank {rank} on host {socket.gethostname()} ({_how_it_ended(exitcode)}): {reason}"


def _how_it_ended(exitcode: int) -> str:
    return f"exit code {exitcode}" if exitcode >= 0 else signal.Signals(-exitcode).name


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    # The interpreter follows a crash's cause with the stacks of its threads.
    crashes = [line for line in lines if line.startswith("Fatal Python error")]
    return (crashes or lines or ["it left no message."])[-1]


# --- in the ranks ---------------------------------------------------------------------------


def _rank(directory: str, entrypoint: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    agent = parent_process()
    assert agent is not None
    threading.Thread(target=_end_with_agent, args=(agent.sentinel,), daemon=True).start()
    try:
        return entrypoint(*args)
    except Exception as error:
        lost_neighbour = isinstance(error, RankFailed)
        record = {
            "rank": int(os.environ["RANK"]),
            "time": time.monotonic_ns(),
            "lost_neighbour": lost_neighbour,
            "line": _one_line(error),
        }
        Path(directory, f"raised-{record['rank']}.json").write_text(json.dumps(record))
        if lost_neighbour:
            time.sleep(_LINGER)
        raise


def _one_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])


def _end_with_agent(sentinel: int) -> None:
    connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
