"""Waiting for what another process brings about."""

import asyncio
import time
from collections.abc import Callable

# A loaded machine takes its time to import torch.
PATIENCE_S = 120.0


def until(
    condition: Callable[[], object], seconds: float = PATIENCE_S, what: str = "it did not happen"
) -> None:
    """Wait until a condition holds; fail after so many seconds, saying `what`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} within {seconds:g} s"
        time.sleep(0.02)


async def soon(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """`until` for a test within an event loop, which goes on meanwhile."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {seconds:g} s"
        await asyncio.sleep(0)
