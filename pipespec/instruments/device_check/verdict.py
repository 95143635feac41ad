"""What the findings of the check say: what is wrong, and what is fastest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# The batch by which ways to compute are compared.
ROWS = "64"


def faults(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong in the findings of a part, as clauses."""
    if "failed" in found:
        yield found["failed"]
    if name == "attention":
        for backend, by_type in found.get("backends", {}).items():
            for dtype, by_shape in by_type.items():
                if dtype != "not_available":
                    yield from (
                        f"{backend}, {dtype}, {shape}: {wrong}"
                        for shape, wrong in by_shape.items()
                        if wrong is not None and shape != "not_available"
                    )
    if name == "packed_weights":
        yield from (f"{kind}: {why}" for kind, why in found.get("kinds", {}).items() if why)
    if name == "graphs":
        for model, how in found.get("models", {}).items():
            yield from (f"{model}: {sentence}" for sentence in how["refused"])
    if name in ("compile", "draft", "stage"):
        yield from found.get("refused", [])


def fastest(found: Mapping[str, Any]) -> str:
    """What is fastest on the device, in one sentence."""
    stage = found.get("stage", {})
    times: Mapping[str, Any] = stage.get("ms", {})
    if not times:
        return f"No stage could be timed: {stage.get('failed', 'no attention backend works')}."
    contexts = list(next(iter(times.values())))
    context = contexts[len(contexts) // 2]
    took = {name: by_context[context][ROWS] for name, by_context in times.items()}
    best = min(took, key=took.__getitem__)
    ratio = took[best] / stage["floor_ms"][context]
    others = ", ".join(f"{name} {ms:.2f}" for name, ms in took.items() if name != best)
    return (
        f"Fastest here is {best}: {took[best]:.2f} ms for {ROWS} rows behind {context} tokens "
        f"({stage['model']}), {ratio:.2f} times what reading weights and KV takes"
        f"{f'; {others}' if others else ''}."
    )
