"""What `pipespec status` makes of what a cluster says."""

from __future__ import annotations

from typing import Any

import pytest

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


WRONG = "attention=triton is not used: it is wrong."


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (
            [
                how(),
                how("triton", 16),
                how("static", 64, compiled=True, refused=[WRONG]),
                how("triton", 16),
            ],
            (
                "attention: sdpa (rank 0); triton, graphs of 16 rows (ranks 1, 3); "
                f"static, graphs of 64 rows, compiled (rank 2). rank 2: {WRONG}"
            ),
        ),
        (
            [how(), how("sdpa", 16, 64), how(devices=4)],
            (
                "attention: sdpa (rank 0); sdpa, graphs of 16 and 64 rows (rank 1); "
                "sdpa, 4 devices together (rank 2)."
            ),
        ),
    ],
)
def test_ranks_that_compute_alike_share_a_line(ranks: list[dict[str, Any]], said: str) -> None:
    assert computing(dict(enumerate(ranks))) == said


def test_usual_values_are_not_shown() -> None:
    assert computing({}) is None
    assert computing({0: how(), 1: how()}) is None
    assert computing({0: how(), 1: how(refused=["It is old."])}) is not None
