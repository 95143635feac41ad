"""Ranks as processes: how a cluster ends, and that nothing of it stays."""

import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed import FileStore

from pipespec.cluster.processes.agent import AgentSetup
from pipespec.cluster.processes.forked_workers import WorkerJob
from pipespec.cluster.processes.worker_group import WorkerGroup
from pipespec.config.hosts import own_name, this_machine
from pipespec.core import Batch
from pipespec.errors import OutOfSlots, RankFailed
from pipespec.system.versions import own_version
from pipespec.transport.distributed import DistributedTransport
from tests.helpers.processes import is_alive
from tests.helpers.waiting import until
from tools.rig.launch import launch, own_rank, results_of

PATIENCE = 60
# The promise to the user, from the death of a rank to the error.
LIMIT_S = 10
# From a failure that a rank can tell to the error.
TOLD_S = 3


def connect(num_ranks: int, place: str) -> DistributedTransport:
    return DistributedTransport(
        ["cpu"] * num_ranks,
        store=FileStore(place),
        rank=own_rank(),
        epoch=1,
        secret="",
        max_rows=4,
        max_columns=8,
        dtype=torch.float32,
    )


def describe(place: str) -> None:
    print("to nobody's terminal")
    print("nor this", file=sys.stderr)
    Path(place, str(own_rank())).write_text(str(torch.get_num_threads()))


def raise_in(rank: int, num_ranks: int, place: str) -> None:
    """One rank runs out of slots while its neighbours wait for batches."""
    transport = connect(num_ranks, place)
    if transport.rank == rank:
        raise OutOfSlots("Stage 2 needs 9 KV slots and has 4; raise kv.slots.\nsecond line")
    if transport.rank:
        transport.recv()
        transport.recv()
    else:
        transport.send(Batch(0))
        signal.pause()


def wait_for_batches(num_ranks: int, meeting: str, place: str) -> None:
    """Every rank tells its pid and waits, rank 0 for a file that never comes."""
    transport = connect(num_ranks, place)
    Path(meeting, f"{transport.rank}.partial").write_text(str(os.getpid()))
    Path(meeting, f"{transport.rank}.partial").rename(Path(meeting, str(transport.rank)))
    if transport.rank == 0:
        signal.pause()
    transport.recv()


def raise_beside_a_long_call(meeting: str) -> None:
    """Rank 1 raises while rank 0 is in a call of C that holds the interpreter's lock."""
    if own_rank() == 1:
        until(lambda: Path(meeting, "0").exists())
        raise OutOfSlots("Stage 1 has no slots.")
    Path(meeting, "0").touch()
    ctypes.PyDLL(None).sleep(PATIENCE)


def leave_with(code: int) -> None:
    if own_rank() == 1:
        print("the last words", file=sys.stderr, flush=True)
        os._exit(code)
    signal.pause()


def end_with_a_signal() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def pids_at(meeting: Path, num_ranks: int) -> list[int]:
    """The ranks' pids, once all of them have told theirs."""
    until(lambda: all((meeting / str(rank)).exists() for rank in range(num_ranks)))
    return [int((meeting / str(rank)).read_text()) for rank in range(num_ranks)]


def workers_of(agent: psutil.Process) -> list[psutil.Process]:
    """The children of an agent but what removes its folder."""
    return [child for child in agent.children() if child.name() not in ("sh", "rm")]


def unused(names: set[str]) -> set[str]:
    """Those of the files in shared memory that no process has mapped: others run tests too."""
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        with suppress(OSError):
            text = maps.read_text()
            names = {name for name in names if f"/dev/shm/{name}" not in text}
    return names


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path, monkeypatch):  # noqa: ARG001 - tmp_path must not come to lie in it
    """After every test: no child, no file, no thread of the launcher."""
    directory = tempfile.mkdtemp(dir="/tmp")
    monkeypatch.setenv("TMPDIR", directory)
    monkeypatch.setattr(tempfile, "tempdir", directory)
    before = set(psutil.Process().children(recursive=True))
    semaphores = set(os.listdir("/dev/shm"))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before
    until(lambda: not os.listdir(directory))  # those of processes that were killed, soon
    os.rmdir(directory)
    until(lambda: unused(set(os.listdir("/dev/shm")) - semaphores) == set())


@pytest.fixture
def place(tmp_path) -> str:
    """The file in which the ranks of a test meet."""
    return str(tmp_path / "store")


@pytest.fixture
def meeting(tmp_path):
    (tmp_path / "meeting").mkdir()
    return tmp_path / "meeting"


def test_ranks_know_their_place(tmp_path, meeting, monkeypatch, capfd):
    """Also where something that they do not need cannot be imported, or prints as it is."""
    (tmp_path / "damaged.py").write_text("def")
    (tmp_path / "talkative.py").write_text("print('loading'); print(3); print('{', flush=True)")
    monkeypatch.syspath_prepend(tmp_path)
    preload = ("damaged", "talkative")
    with launch(describe, (str(meeting),), num_ranks=3, preload=preload) as cluster:
        cluster.wait(PATIENCE)
        assert not cluster.poll()
    threads = [int((meeting / str(number)).read_text()) for number in range(3)]
    assert all(each <= max(1, os.cpu_count() // 3) for each in threads)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "rank", [0, *(pytest.param(rank, marks=pytest.mark.long) for rank in (1, 2))]
)
def test_the_rank_that_raised_is_blamed_with_its_own_sentence(rank, place, capfd):
    with (
        launch(raise_in, (rank, 3, place), num_ranks=3, preload=()) as cluster,
        pytest.raises(RankFailed) as raised,
    ):
        cluster.wait(PATIENCE)
    assert str(raised.value) == (
        f"rank {rank} on host {socket.gethostname()} (exit code 1): "
        "OutOfSlots: Stage 2 needs 9 KV slots and has 4; raise kv.slots."
    )
    assert capfd.readouterr() == ("", "")


@pytest.mark.long
def test_a_rank_that_leaves_without_a_word_is_blamed_with_its_last_line():
    with (
        launch(leave_with, (7,), num_ranks=2, preload=()) as cluster,
        pytest.raises(RankFailed, match=r"rank 1 on host .*\(exit code 7\): the last words$"),
    ):
        cluster.wait(PATIENCE)


def test_failure_is_reported_within_three_seconds_while_another_rank_is_in_a_long_call(meeting):
    entrypoint = raise_beside_a_long_call
    with launch(entrypoint, (str(meeting),), num_ranks=2, preload=()) as cluster:
        until(lambda: (meeting / "0").exists())
        began = time.monotonic()
        with pytest.raises(RankFailed, match="Stage 1 has no slots"):
            cluster.wait(PATIENCE)
        assert time.monotonic() - began < TOLD_S


def test_the_death_of_what_started_them_ends_the_ranks(meeting, place):
    """The recovery starts the host again."""
    with launch(wait_for_batches, (2, str(meeting), place), num_ranks=2, preload=()) as cluster:
        pids = pids_at(meeting, 2)
        agent = psutil.Process(os.getsid(pids[0]))  # it leads the ranks' session
        assert {child.pid for child in workers_of(agent)} == set(pids)
        assert agent.num_threads() == 1  # a process with threads must not fork
        agent.kill()
        until(lambda: not any(map(is_alive, pids)), LIMIT_S)
        assert cluster.poll()


def test_results_of_a_rank_that_a_signal_ends_are_not_waited_for():
    with pytest.raises(RankFailed, match=f"{own_name()}/0 was ended: SIGKILL"):
        results_of(end_with_a_signal, (), num_ranks=1)


def test_the_death_of_the_agent_before_there_is_a_job_is_told_at_once():
    with WorkerGroup([this_machine(["cpu"])], ()) as cluster:
        (agent,) = psutil.Process().children()
        agent.kill()
        with pytest.raises(RankFailed, match=r"the launcher of the ranks on host .*\(SIGKILL\)"):
            until(lambda: not cluster.poll(), LIMIT_S)


AGENT = f"""
import sys
sys.path[:0] = {sys.path!r}
from pipespec.cluster.processes import agent
agent.SILENCE_S = 2
agent.main()
"""


@pytest.mark.parametrize(
    "code", ["time.sleep(60)", "print('x' * 2**18, flush=True); time.sleep(1)"]
)
def test_a_host_whose_launcher_is_silent_ends_also_while_it_cannot_write(code):
    setup = AgentSetup((), 1, "127.0.0.1", remote=True)
    args = pickle.dumps((f"import time\nwhile True: {code}",))
    job = WorkerJob("builtins:exec", args, ("a/0",), ("a/0",), "a", logs=True)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", AGENT], stdin=pipe, stdout=pipe) as agent:
        agent.stdin.write(f"{own_version()}\n".encode() + pickle.dumps(setup) + pickle.dumps(job))
        agent.stdin.flush()
        until(lambda: workers_of(psutil.Process(agent.pid)), PATIENCE)
        (worker,) = workers_of(psutil.Process(agent.pid))
        assert agent.wait(LIMIT_S) == 1
        until(lambda: not is_alive(worker.pid), LIMIT_S)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(pytest.param(each, marks=pytest.mark.long) for each in (signal.SIGTERM, signal.SIGKILL)),
    ],
)
def test_a_signal_to_the_launching_process_ends_everything(number, meeting, place):
    # As `launch` does, but for the import of the entrypoint, which takes seconds.
    script = f"""
        import sys
        sys.path[:0] = {sys.path!r}
        from pipespec.cluster.processes.worker_group import WorkerGroup
        from pipespec.config.hosts import this_machine
        where = {(2, str(meeting), place)!r}
        run = "{__name__}:{wait_for_batches.__name__}"
        with WorkerGroup([this_machine(["cpu"] * 2)], ()) as cluster:
            cluster.start_workers(run, where)
            cluster.wait()
    """
    user = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stderr=subprocess.PIPE, text=True
    )
    try:
        pids = pids_at(meeting, 2)
        tree = psutil.Process(user.pid).children(recursive=True)
        assert set(pids) < {process.pid for process in tree}
        user.send_signal(number)
        _, errors = user.communicate(timeout=PATIENCE)
    finally:
        user.kill()  # its ranks end with it
    assert user.returncode == -number
    # What ends by the launcher's death alone takes a moment longer.
    until(lambda: not any(is_alive(process.pid) for process in tree), LIMIT_S)
    until(lambda: os.listdir(tempfile.gettempdir()) == [], LIMIT_S)
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in errors
        assert "torch" not in errors
