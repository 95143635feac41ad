"""Figures of decoded prompts that a test makes up."""

from __future__ import annotations

from pipespec.extras.bench.figures import BenchResult, RequestResult

LABELS = {"emulated": False, "synthetic": False, "lossy": False, "seed": None}


def result(*token_ids: list[int], between_ms: float = 10.0) -> BenchResult:
    """Answers of these tokens, each so long after the one before."""
    stats = {"steps": 8, "tokens_per_step": 0.5, "hit_rate": 0.25, "rows_per_step": 4.0}
    requests = [
        RequestResult(
            *(str(i), "b", [1], ids, "", "length", 5.0),
            token_ms=[5.0 + between_ms * n for n in range(len(ids))],
            stats=stats,
        )
        for i, ids in enumerate(token_ids)
    ]
    return BenchResult(requests, 1.0, 1, LABELS)
