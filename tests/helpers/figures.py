"""Figures of decoded prompts that a test makes up."""

from typing import Any

from pipespec.extras.bench.figures import BenchResult, RequestResult

LABELS = {"emulated": False, "synthetic": False, "lossy": False, "seed": None}
STATS = {"steps": 8, "tokens_per_step": 0.5, "hit_rate": 0.25, "rows_per_step": 4.0}


def request(
    token_ms: list[float],
    token_ids: list[int] | None = None,
    *,
    name: str = "q",
    benchmark: str = "b",
    stats: dict[str, Any] | None = None,
    **more: Any,
) -> RequestResult:
    """A request whose tokens came at these times."""
    return RequestResult(
        id=name,
        benchmark=benchmark,
        prompt_ids=[1, 2, 3],
        token_ids=[7] * len(token_ms) if token_ids is None else token_ids,
        text="",
        finish_reason="length",
        ttft_ms=token_ms[0],
        token_ms=token_ms,
        stats=STATS | (stats or {}),
        **more,
    )


def result(*token_ids: list[int], between_ms: float = 10.0) -> BenchResult:
    """Answers of these tokens, each so long after the one before."""
    times = [[5.0 + between_ms * n for n in range(len(ids))] for ids in token_ids]
    return BenchResult(list(map(request, times, token_ids)), 1.0, 1, LABELS)
