"""What `pipespec status` makes of what a cluster says."""

from __future__ import annotations

from typing import Any

from pipespec.cli.status import computing


def how(attention: str = "sdpa", *graph_rows: int, **changes: Any) -> dict[str, Any]:
    return {
        "devices": 1,
        "attention": attention,
        "graph_rows": list(graph_rows),
        "compiled": False,
        "refused": [],
        **changes,
    }


def test_ranks_that_compute_alike_share_a_line() -> None:
    ranks = {
        0: how(),
        1: how("triton", 16, 64),
        2: how("static", 64, compiled=True, refused=["attention=triton is not used: it is wrong."]),
        3: how("triton", 16, 64),
    }
    assert computing(ranks) == (
        "attention: sdpa (rank 0); triton, graphs of 16 and 64 rows (ranks 1, 3); "
        "static, graphs of 64 rows, compiled (rank 2). "
        "rank 2: attention=triton is not used: it is wrong."
    )


def test_devices_of_a_tensor_parallel_stage_are_shown() -> None:
    assert computing({0: how(), 1: how(devices=4)}) == (
        "attention: sdpa (rank 0); sdpa, 4 devices together (rank 1)."
    )


def test_usual_values_are_not_shown() -> None:
    assert computing({}) is None
    assert computing({0: how(), 1: how()}) is None
    assert computing({0: how(), 1: how(refused=["It is old."])}) is not None
