"""Both transports keep one contract; the processes of the distributed one are real."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipespec.core import NUM_COLUMNS, Batch
from pipespec.errors import RankFailed
from pipespec.system.interfaces import LOOPBACK
from pipespec.transport.distributed import (
    DistributedTransport,
    host_meeting,
    join_meeting,
)
from pipespec.transport.protocol import Transport
from pipespec.transport.threads import thread_transports
from tests.helpers.matrix import some_of

HIDDEN, MAX_ROWS = 16, 8
SHAPES = [3, 0, 8, 1, 1, 0, 8]
PATIENCE = 60


def batch_at(step: int, rank: int) -> Batch:
    """What `rank` sends at `step`: rank 0 sends no hidden states."""
    rows = SHAPES[step % len(SHAPES)]
    table = np.full((rows, NUM_COLUMNS), step * 100 + rank, np.int64)
    hidden = torch.full((rows, HIDDEN), float(step * 100 + rank)) if rank else None
    return Batch(step, table, hidden, released=(step,), stop=step == len(SHAPES))


def run_pipeline(transport: Transport, last_rank: int) -> list[str]:
    """Each rank checks what comes in against `batch_at` and sends its own; returns what differed.

    What was sent is overwritten at once, and what was received is looked at only after the
    batch behind it has come.
    """
    torch.set_num_threads(1)
    differing, received = [], []
    for step in range(len(SHAPES) + 1):
        if transport.rank > 0:
            received.append(transport.recv())
        if transport.rank < last_rank:
            batch = batch_at(step, transport.rank)
            transport.send(batch)
            batch.rows[:] = -1
            if batch.hidden is not None:
                batch.hidden.fill_(-1)
    for step, got in enumerate(received):
        want = batch_at(step, transport.rank - 1)
        same = (got.step, got.released, got.stop) == (want.step, want.released, want.stop)
        same = same and np.array_equal(got.rows, want.rows)
        same = same and (got.hidden is None) == (want.hidden is None)
        if not same or (want.hidden is not None and not torch.equal(got.hidden, want.hidden)):
            differing.append(f"rank {transport.rank} step {step}: {got}")
    transport.close()
    return differing


def connect(num_ranks: int, place: str, *, spins: bool = False) -> DistributedTransport:
    return DistributedTransport.connect(
        ["cpu"] * num_ranks,
        meeting=join_meeting(place),
        rank=int(os.environ["RANK"]),
        epoch=1,
        secret="",
        max_rows=MAX_ROWS,
        hidden_size=HIDDEN,
        dtype=torch.float32,
        spins=spins,
    )


# --- entrypoints of ranks ---------------------------------------------------------------------


def pipeline_rank(num_ranks: int, place: str, spins: bool) -> list[str]:
    return run_pipeline(connect(num_ranks, place, spins=spins), num_ranks - 1)


def rank_that_is_woken(place: str) -> str:
    """Rank 1 waits for a batch that never comes, until another thread closes its links."""
    transport = connect(2, place, spins=True)
    if transport.rank == 0:
        transport.send(Batch(0))
        with pytest.raises(RuntimeError):
            dist.recv(torch.empty(1), 1)
        return ""
    transport.recv()
    threading.Timer(0.2, transport.abort).start()
    with pytest.raises(RankFailed) as raised:
        transport.recv()
    transport.close()
    return str(raised.value)


def rank_that_stops_and_leaves(place: str) -> list[int]:
    """Rank 0 is gone long before rank 1 looks at what it sent."""
    transport = connect(2, place)
    if transport.rank == 0:
        transport.send(batch_at(0, 0))
        transport.send(Batch(1, stop=True))
        transport.close()
        return []
    # Not a wait for something to happen: the time in which rank 0 closes its connection.
    time.sleep(1)
    first, second = transport.recv(), transport.recv()
    transport.close()
    return [first.step, second.step, int(second.stop)]


def rank_whose_predecessor_leaves(place: str) -> str:
    transport = connect(2, place)
    if transport.rank == 0:
        transport.close()
        return ""
    with pytest.raises(RankFailed) as raised:
        transport.recv()
    transport.close()
    return str(raised.value)


def as_rank(rank: int, entrypoint: Callable, *arguments: object) -> object:
    os.environ["RANK"] = str(rank)
    return entrypoint(*arguments)


def in_processes(entrypoint: Callable, *arguments: object, num_ranks: int) -> list:
    """What an entrypoint returns in a process per rank, forked from one that has imported this."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(num_ranks, context, max_tasks_per_child=1) as pool:
        ranks = [pool.submit(as_rank, rank, entrypoint, *arguments) for rank in range(num_ranks)]
        return [rank.result(PATIENCE) for rank in ranks]


# --- the contract ----------------------------------------------------------------------------


@pytest.fixture
def place(address: str | None) -> Iterator[str]:
    """Where the ranks of a test meet: in a file without an address."""
    meeting = host_meeting(address)
    yield meeting.place
    meeting.close()


@pytest.mark.parametrize(
    ("num_ranks", "address", "spins"), some_of([2, 4], [None, LOOPBACK], [False, True])
)
def test_batches_arrive_in_order_and_unchanged_between_processes(num_ranks, place, spins):
    told = in_processes(pipeline_rank, num_ranks, place, spins, num_ranks=num_ranks)
    assert told == [[]] * num_ranks


def test_batches_arrive_in_order_and_unchanged_between_threads():
    transports = thread_transports(4)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run_pipeline, transports, [3] * 4)) == [[]] * 4


LOST = "Rank 1 lost its link to rank 0"


@pytest.mark.parametrize(
    ("entrypoint", "expected", "address"),
    [
        (rank_that_stops_and_leaves, [0, 1, 1], None),
        (rank_that_is_woken, LOST, LOOPBACK),
        (rank_whose_predecessor_leaves, LOST, None),
        pytest.param(rank_whose_predecessor_leaves, LOST, LOOPBACK, marks=pytest.mark.long),
    ],
)
def test_ends_between_processes(entrypoint: Callable, expected, place):
    result = in_processes(entrypoint, place, num_ranks=2)[1]
    if isinstance(expected, str):
        assert result.startswith(expected)
        assert "\n" not in result
        assert "gloo/" not in result, "a place in gloo's source helps nobody"
    else:
        assert result == expected


def test_only_this_user_can_open_a_meeting_in_a_file_and_nothing_of_it_stays():
    meeting = host_meeting()
    file = Path(meeting.place.removeprefix("file:"))
    assert file.parent.stat().st_mode & 0o077 == 0
    meeting.store.set("a", "b")
    assert join_meeting(meeting.place).store.get("a") == b"b"
    meeting.close()
    assert not file.parent.exists()


def in_a_thread(call: Callable) -> tuple[threading.Thread, list]:
    outcome: list = []

    def run() -> None:
        try:
            outcome.append(call())
        except RankFailed as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def test_a_link_between_threads_holds_one_batch():
    first, second = thread_transports(2)
    first.send(Batch(0))
    thread, _ = in_a_thread(lambda: first.send(Batch(1)))
    assert second.recv().step == 0
    assert second.recv().step == 1
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize("waits_in", ["recv", "send"])
def test_closing_wakes_the_neighbour_thread_that_waits(waits_in):
    transports = thread_transports(3)
    if waits_in == "recv":
        thread, outcome = in_a_thread(transports[2].recv)
    else:
        transports[0].send(Batch(0))
        thread, outcome = in_a_thread(lambda: transports[0].send(Batch(1)))
    transports[1].close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert isinstance(outcome[0], RankFailed)
    assert "rank 1 ended" in str(outcome[0])


def test_what_a_thread_sent_before_it_closed_still_arrives():
    first, second = thread_transports(2)
    first.send(Batch(7))
    first.close()
    assert second.recv().step == 7
    with pytest.raises(RankFailed, match="rank 0 ended"):
        second.recv()
