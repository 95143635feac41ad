"""How Triton's attention kernel is launched on which GPU, and which GPUs it is for.

`make check-gpu-code` compiles the kernel for every architecture named here, and fails if a launch
takes more shared memory than a program may have, or spills registers.
"""

from __future__ import annotations

from typing import NamedTuple

Capability = tuple[int, int]

# CUDA's compute capability of the oldest GPUs: Triton compiles no matrix product for sm_75.
OLDEST: Capability = (8, 0)
# KiB of shared memory that a program may have, from the CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability"; other GPUs have at least LEAST_SHARED_KIB.
SHARED_KIB: dict[Capability, int] = {
    (8, 0): 163,  # A100
    (8, 6): 99,  # RTX 3090
    (8, 9): 99,  # RTX 4090
    (9, 0): 227,  # H100
    (10, 0): 227,  # B200
    (12, 0): 99,  # RTX 5090
}
LEAST_SHARED_KIB = 99
HOPPER: Capability = (9, 0)
# GPUs whose tensor cores read operands from shared memory, which takes fewer registers.
ASYNCHRONOUS: tuple[Capability, ...] = (HOPPER, (10, 0))


class Launch(NamedTuple):
    """Of `kernels.attend`: how many rows and query heads of a KV head a program computes at most,
    how many keys it processes together, its warps, and the stages of its loop that overlap."""

    rows: int
    heads: int
    keys: int
    warps: int
    stages: int


def tile_rows(capability: Capability) -> tuple[int, ...]:
    """The numbers of rows that launches on a GPU have."""
    return (8, 16) if capability == HOPPER else (8,)


def attend_launch(capability: Capability, itemsize: int, width: int, group: int) -> Launch:
    """The launch for numbers of `itemsize` bytes, K and V of up to `width` numbers per head (a
    power of two), and `group` query heads for each KV head."""
    stages = 3 if SHARED_KIB.get(capability, LEAST_SHARED_KIB) > LEAST_SHARED_KIB else 2
    if itemsize == 4:
        # Without tensor cores a program's time, code and registers grow with its products.
        return Launch(8, heads=4 if width <= 128 else 2, keys=16, warps=8, stages=stages)
    if capability == HOPPER and width <= 128 and group <= 8:
        # Of 24 on an H200 the fastest for groups of 4, and nearly so for 8 (docs/gpus.md): 64 pairs
        # of a row and a head, which four warps multiply at once.
        rows = 8 if group > 4 else 16
        return Launch(rows, heads=64 // rows, keys=64, warps=4, stages=stages)
    heads = 16 if width <= (128 if capability in ASYNCHRONOUS else 64) else 8
    # The sums of more than four heads, of eight rows each, need the registers of eight warps.
    if min(group, heads) > 4:
        return Launch(8, heads, keys=32, warps=8, stages=stages)
    return Launch(8, heads, keys=64 if width <= 128 else 32, warps=4, stages=stages)


def capability_error(capability: Capability) -> str | None:
    """Why the kernels are not for a GPU, as a clause; None: they are."""
    if capability >= OLDEST:
        return None
    had, needed = ("".join(map(str, each)) for each in (capability, OLDEST))
    return f"its kernels need a GPU of sm_{needed} or newer, and this one is of sm_{had}"
