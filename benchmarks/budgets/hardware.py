"""Times of repeated work on a device, the device's limits, and the floors that follow from them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.common.experiment import provenance

WARM_UPS, LEAST_RUNS, MOST_RUNS = 2, 5, 100
Figures = dict[str, dict[str, float]]


def now_ms(device: torch.device) -> float:
    """The time once the device has finished its queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter_ns() / 1e6


def repeat(once: Callable[[], dict[str, float]], seconds: float) -> Figures:
    """Median and quartiles of each time that `once` measures, milliseconds."""
    for _ in range(WARM_UPS):
        once()
    found: list[dict[str, float]] = []
    end = time.perf_counter() + seconds
    while len(found) < LEAST_RUNS or (time.perf_counter() < end and len(found) < MOST_RUNS):
        found.append(once())
    figures = {}
    for name in found[0]:
        quarter, median, three = np.percentile([each[name] for each in found], [25, 50, 75])
        figures[name] = {
            "median": float(median),
            "quartile_1": float(quarter),
            "quartile_3": float(three),
            "runs": len(found),
        }
    return figures


def limits(
    device: torch.device, dtype: torch.dtype, *, copy: int, matmul: int, seconds: float
) -> dict[str, Any]:
    """The device's bandwidth of a copy, GB/s read plus written, and matrix rate, Tflop/s.

    `copy` bytes are copied, square matrices of `matmul` rows multiplied, for `seconds` each.
    """
    source = torch.ones(copy // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(2, matmul, matmul, device=device) / 8).to(dtype)

    def times(run: Callable[[], object]) -> dict[str, float]:
        def once() -> dict[str, float]:
            start = now_ms(device)
            run()
            return {"ms": now_ms(device) - start}

        return repeat(once, seconds)["ms"]

    copied = times(lambda: target.copy_(source))
    multiplied = times(lambda: a @ b)
    return {
        "bandwidth_gb_s": 2 * source.nbytes / copied["median"] / 1e6,
        "copy_bytes": source.nbytes,
        "copy_ms": copied,
        "matmul_tflop_s": 2 * matmul**3 / multiplied["median"] / 1e9,
        "matmul_size": matmul,
        "matmul_ms": multiplied,
    }


def with_floor(cell: dict[str, Any], total: str, limit: dict[str, Any]) -> dict[str, Any]:
    """The cell with its floors, milliseconds, and its time over the higher one."""
    by_bytes = (cell["weight_bytes"] + cell["kv_bytes"]) / limit["bandwidth_gb_s"] / 1e6
    by_flops = cell["operations"] / limit["matmul_tflop_s"] / 1e9
    floor = max(by_bytes, by_flops)
    return cell | {
        "floor_bytes_ms": by_bytes,
        "floor_flops_ms": by_flops,
        "floor_ms": floor,
        "floor_by": "bytes" if by_bytes > by_flops else "flops",
        "ratio": cell["ms"][total]["median"] / floor,
    }


def name_of(device: torch.device) -> str:
    if device.type == "cpu":
        return str(provenance()["hardware"])
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device.type if name is None else name(device))
