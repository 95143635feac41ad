"""Hop time of one batch between two processes over gloo, in the clear, sealed, and beside a bare
gloo message.

    python -m benchmarks.budgets.transport_hop [--rounds 300] [--repeats 3] [--pause-ms 40]

A hop is the time from just before `send` in one process to just after `recv` in the other, by
the clock that the processes of one machine share. `bare` sends the hidden states alone into a
posted buffer of exactly their size. The three take turns, and the fastest repeat's median is
shown beside the 90th percentile over all repeats. `seal_and_open` is the median time of encrypting
and decrypting the message of a batch, on one core. With `--pause-ms` the processes sleep before
every message, as ranks do while a stage computes; the figures then include waking up.
"""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common import experiment
from pipespec.cluster.worker_group import launch
from pipespec.core import NUM_COLUMNS, Batch
from pipespec.transport.distributed import DistributedTransport
from pipespec.transport.encryption import KEY_BYTES, Seal
from pipespec.transport.transport import LinkKind
from pipespec.transport.wire import Wire

MAX_ROWS = 64
SHAPES = [(rows, hidden) for hidden in (128, 8192) for rows in (1, 64)]
DTYPES = {128: torch.float32, 8192: torch.bfloat16}
KINDS = {"batch": LinkKind(), "sealed": LinkKind(sealed=True)}
BARE_TAG, TURN_TAG = 8, 9


def measure(rounds: int, repeats: int, pause_ms: float) -> dict[tuple, list[int]]:
    """The entrypoint of both ranks: for each series, when its messages were sent (rank 0) or
    received (rank 1), in nanoseconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    series = {}
    for rows, hidden_size in SHAPES:
        hidden = torch.zeros(rows, hidden_size, dtype=DTYPES[hidden_size])
        for repeat in range(repeats):
            for name in KINDS:
                key = name, rows, hidden_size, repeat
                series[key] = hops_of_batches(hidden, rounds, pause_ms, key)
            series["bare", rows, hidden_size, repeat] = hops_of_tensors(hidden, rounds, pause_ms)
    dist.destroy_process_group()
    return series


def hops_of_batches(
    hidden: torch.Tensor, rounds: int, pause_ms: float, key: tuple[str, int, int, int]
) -> list[int]:
    name = "/".join(map(str, key))
    transport = DistributedTransport.connect(
        ["cpu", "cpu"],
        store=dist.PrefixStore(name, dist.distributed_c10d._get_default_store()),
        rank=dist.get_rank(),
        epoch=1,
        secret="of a benchmark",
        max_rows=MAX_ROWS,
        hidden_size=hidden.shape[1],
        dtype=hidden.dtype,
        links=[KINDS[key[0]]],
    )
    table = np.zeros((len(hidden), NUM_COLUMNS), np.int64)
    times = []
    for step in range(rounds):
        if transport.rank == 0:
            time.sleep(pause_ms / 1e3)
            times.append(time.monotonic_ns())
            transport.send(Batch(step, table, hidden, stop=step == rounds - 1))
        else:
            transport.recv()
            times.append(time.monotonic_ns())
        take_turns()
    transport.close()
    return times


def seal_and_open_us(hidden: torch.Tensor, rounds: int) -> float:
    """The time to seal and open the message of a batch, in microseconds."""
    torch.set_num_threads(1)
    table = np.zeros((len(hidden), NUM_COLUMNS), np.int64)
    message = Wire(1, MAX_ROWS, hidden.shape[1], hidden.dtype).pack(Batch(0, table, hidden))
    sender, receiver = Seal(bytes(KEY_BYTES), 0), Seal(bytes(KEY_BYTES), 0)
    times = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        opened = receiver.open(sender.seal(message))
        times.append(time.perf_counter_ns() - start)
        assert len(opened) == len(message)
    return float(np.median(times)) / 1000


def hops_of_tensors(hidden: torch.Tensor, rounds: int, pause_ms: float) -> list[int]:
    buffer = torch.empty_like(hidden)
    times = []
    for _ in range(rounds):
        if dist.get_rank() == 0:
            take_turns()
            time.sleep(pause_ms / 1e3)
            times.append(time.monotonic_ns())
            dist.send(hidden, 1, tag=BARE_TAG)
        else:
            work = dist.irecv(buffer, 0, tag=BARE_TAG)
            take_turns()
            work.wait()
            times.append(time.monotonic_ns())
    return times


def take_turns() -> None:
    """Rank 0 waits until rank 1 arrives, which by then has posted its next buffer."""
    turn = torch.zeros(1)
    if dist.get_rank() == 0:
        dist.recv(turn, 1, tag=TURN_TAG)
    else:
        dist.send(turn, 0, tag=TURN_TAG)


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pause-ms", type=float, default=0.0, help="before every message (0)")
    options = experiment.parse(parser, rounds=30, repeats=1)
    given = (options.rounds, options.repeats, options.pause_ms)
    with launch(measure, given, num_ranks=2, preload=()) as cluster:
        left, received = cluster.wait()
    rows = []
    for num_rows, hidden_size in SHAPES:
        size = num_rows * hidden_size * DTYPES[hidden_size].itemsize
        row: dict[str, float] = {"rows": num_rows, "hidden": hidden_size, "bytes": size}
        for kind in (*KINDS, "bare"):
            keys = [(kind, num_rows, hidden_size, repeat) for repeat in range(options.repeats)]
            hops = np.array([np.subtract(received[key], left[key]) for key in keys]) / 1000
            row[kind] = float(np.median(hops, axis=1).min())
            row[f"{kind}_p90"] = float(np.percentile(hops, 90))
        hidden = torch.zeros(num_rows, hidden_size, dtype=DTYPES[hidden_size])
        row["seal_and_open"] = seal_and_open_us(hidden, options.rounds)
        rows.append(row | {"ratio": row["batch"] / row["bare"]})
    title = f"A hop between two processes, {options.pause_ms:g} ms idle before each; µs"
    experiment.publish(options, title, rows, unit="µs")


if __name__ == "__main__":
    # The ranks must be able to import what they run, which `__main__` does not allow.
    from benchmarks.budgets.transport_hop import main as imported_main

    imported_main()
