"""Dequantising on a CPU, compiled by Numba.

PyTorch has no single operation for it, and ten that each read and write all weights take ten times
as long. The loops are such that a compiler makes vector instructions of them: over neighbours in
memory, with constant shifts, and of a length that it does not know, as it would unroll them
otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
import torch
from torch import Tensor

# Not all of Numba's pools of threads may be used by two threads at once.
_alone = threading.Lock()
Function = TypeVar("Function", bound=Callable[..., Any])


def _compiled(function: Function, *, parallel: bool = False) -> Function:
    """The function, compiled when it is first called, and stored where a folder can be written."""
    compiled: Function
    try:
        compiled = numba.njit(nogil=True, parallel=parallel, cache=True)(function)
    except RuntimeError:  # there is no such folder
        compiled = numba.njit(nogil=True, parallel=parallel)(function)
    return compiled


_parallel = partial(_compiled, parallel=True)


@_compiled
def _add_pairs_of_bits(high: Any, codes: Any) -> None:
    n = len(codes) // 4
    for i in range(n):
        some = high[i]
        codes[i] |= (some & 3) << 4
        codes[n + i] |= ((some >> 2) & 3) << 4
        codes[2 * n + i] |= ((some >> 4) & 3) << 4
        codes[3 * n + i] |= (some >> 6) << 4


def _adder_of_bits(shift: int) -> Callable[[Any, Any], None]:
    @_compiled
    def add(high: Any, codes: Any) -> None:
        n = len(codes) // 8
        for i in range(n):
            some = high[i]
            codes[i] |= (some & 1) << shift
            codes[n + i] |= ((some >> 1) & 1) << shift
            codes[2 * n + i] |= ((some >> 2) & 1) << shift
            codes[3 * n + i] |= ((some >> 3) & 1) << shift
            codes[4 * n + i] |= ((some >> 4) & 1) << shift
            codes[5 * n + i] |= ((some >> 5) & 1) << shift
            codes[6 * n + i] |= ((some >> 6) & 1) << shift
            codes[7 * n + i] |= (some >> 7) << shift

    return add


_add_third_bits, _add_fifth_bits = _adder_of_bits(2), _adder_of_bits(4)


@_compiled
def _unpack(low: Any, high: Any, low_bits: int, codes: Any) -> None:
    """Set the codes of a row, given its planes; a `high` of no bytes: there is none."""
    count = len(codes)
    if low_bits == 8:
        for i in range(count):
            codes[i] = low[i]
    elif low_bits == 4:
        n = count // 2
        for i in range(n):
            codes[i] = low[i] & 15
            codes[n + i] = low[i] >> 4
    else:
        n = count // 4
        for i in range(n):
            codes[i] = low[i] & 3
            codes[n + i] = (low[i] >> 2) & 3
            codes[2 * n + i] = (low[i] >> 4) & 3
            codes[3 * n + i] = low[i] >> 6
    if 4 * len(high) == count:
        _add_pairs_of_bits(high, codes)
    elif len(high) and low_bits == 4:
        _add_fifth_bits(high, codes)
    elif len(high):
        _add_third_bits(high, codes)


@_compiled
def _multiply_factors(large: Any, small: Any, table: Any, halves: Any, products: Any) -> None:
    """Set the scales, or offsets, of the groups of a row; factors of no length are 1."""
    groups = len(products)
    for i in range(groups):
        products[i] = table[small[i]] if len(small) else np.float32(1)
    if len(large):
        of_block = groups // len(large)
        for block in range(len(large)):
            factor = halves[large[block]]
            for i in range(block * of_block, (block + 1) * of_block):
                products[i] *= factor


@_compiled
def _scale(codes: Any, first: Any, scales: Any, offsets: Any, group: int, weights: Any) -> None:
    for i in range(len(scales)):
        scale, offset = scales[i], offsets[i]
        for j in range(group):
            number = np.float32(np.int32(codes[i * group + j]) + first)
            weights[i * group + j] = number * scale + offset


@_compiled
def _scale_fp4(codes: Any, scales: Any, group: int, weights: Any) -> None:
    for i in range(len(scales)):
        scale = scales[i]
        for j in range(group):
            code: Any = np.int32(codes[i * group + j])
            size: Any = code & 7  # 0 to 7 are 0, 1, 2, 3, 4, 6, 8, 12
            above_4, above_6 = max(size, 4) - 4, max(size, 6) - 6
            number = (size + above_4 + 2 * above_6) * (1 - (code >> 2 & 2))
            weights[i * group + j] = np.float32(number) * scale


@_compiled
def _round(weights: Any, rounded: Any) -> None:
    """Set the nearest bfloat16 of the bits of finite numbers."""
    for i in range(len(weights)):
        odd = (weights[i] >> 16) & 1
        rounded[i] = (weights[i] + 0x7FFF + odd) >> 16


@_compiled
def _dequantise_row(blocks: Any, row: int, weights: Any) -> None:
    codes = np.empty(len(weights), np.uint8)
    scales = np.empty(len(weights) // blocks.group, np.float32)
    _unpack(blocks.low[row], blocks.high[row], blocks.low_bits, codes)
    _multiply_factors(
        blocks.scale_large[row], blocks.scale_small[row], blocks.scale_table, blocks.halves, scales
    )
    if blocks.is_fp4:
        _scale_fp4(codes, scales, blocks.group, weights)
        return
    offsets = np.zeros(len(scales), np.float32)
    if blocks.offset_large.shape[1]:
        _multiply_factors(
            blocks.offset_large[row],
            blocks.offset_small[row],
            blocks.offset_table,
            blocks.halves,
            offsets,
        )
    _scale(codes, blocks.first, scales, offsets, blocks.group, weights)


@_parallel
def _dequantise_to_float32(blocks: Any, start: int, weights: Any) -> None:
    for i in numba.prange(len(weights)):
        _dequantise_row(blocks, start + i, weights[i])


@_parallel
def _dequantise_to_bfloat16(blocks: Any, start: int, weights: Any) -> None:
    for i in numba.prange(len(weights)):
        numbers = np.empty(weights.shape[1], np.float32)
        _dequantise_row(blocks, start + i, numbers)
        _round(numbers.view(np.uint32), weights[i])


@_compiled
def _scale_fp8(code: Any, number: Any, scale: Any) -> Any:
    """The weight of a code, whose magnitude as if it were a normal number of exponent -7 or more is
    `number`; those of exponent -7 are subnormal, and were a half of the true ones and 2 ** -7."""
    number = min(number, number + number - np.float32(2**-6))
    return number * scale * np.float32(1 - ((np.int32(code) >> 6) & 2))


@_compiled
def _dequantise_fp8_row(codes: Any, scales: Any, width: int, weights: Any) -> None:
    """Codes are E4M3 without NaN."""
    bits = weights.view(np.uint32)
    for i in range(len(codes)):
        bits[i] = ((codes[i] & 0x7F) << 20) + (120 << 23)
    for i in range(len(scales)):
        scale = scales[i]
        some, numbers = codes[i * width : (i + 1) * width], weights[i * width : (i + 1) * width]
        for j in range(len(some)):
            numbers[j] = _scale_fp8(some[j], numbers[j], scale)


@_parallel
def _fp8_to_float32(
    codes: Any, scales: Any, height: int, width: int, start: int, weights: Any
) -> None:
    for i in numba.prange(len(weights)):
        row = start + i
        _dequantise_fp8_row(codes[row], scales[row // height], width, weights[i])


@_parallel
def _fp8_to_bfloat16(
    codes: Any, scales: Any, height: int, width: int, start: int, weights: Any
) -> None:
    for i in numba.prange(len(weights)):
        row = start + i
        found = np.empty(weights.shape[1], np.float32)
        _dequantise_fp8_row(codes[row], scales[row // height], width, found)
        _round(found.view(np.uint32), weights[i])


class Blocks(NamedTuple):
    """A matrix in blocks, in planes, as the compiled code takes it.

    Attributes:
        low, high: `[out, bytes]` uint8, the planes of the codes; no bytes: there is none.
        low_bits: of a code in the lower plane.
        first, is_fp4: what codes stand for (`gguf_blocks.BlockKind`).
        scale_large, scale_small, scale_table: the factors of the scales; no columns: they are 1.
        offset_large, offset_small, offset_table: those of the offsets; no columns of large ones:
            there are no offsets.
        halves: the number of each 16-bit float by its bits.
        group: neighbours with one scale.
    """

    low: np.ndarray
    high: np.ndarray
    low_bits: int
    first: np.int32
    is_fp4: bool
    scale_large: np.ndarray
    scale_small: np.ndarray
    scale_table: np.ndarray
    offset_large: np.ndarray
    offset_small: np.ndarray
    offset_table: np.ndarray
    halves: np.ndarray
    group: int


@cache
def halves() -> np.ndarray:
    """The number of each 16-bit float, float32 by its bits."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def dequantise_blocks(blocks: Blocks, start: int, weights: Tensor) -> None:
    """Set `weights` `[rows, in]`, float32 or bfloat16, to the rows of a matrix from this one on."""
    _fill(weights, _dequantise_to_float32, _dequantise_to_bfloat16, blocks, start)


def dequantise_fp8(
    codes: np.ndarray, scales: np.ndarray, height: int, width: int, start: int, weights: Tensor
) -> None:
    """The same of a matrix of FP8 codes, uint8 `[out, in]`, with float32 scales of blocks of
    `height` rows and `width` columns."""
    _fill(weights, _fp8_to_float32, _fp8_to_bfloat16, codes, scales, height, width, start)


def _fill(
    weights: Tensor,
    to_float32: Callable[..., None],
    to_bfloat16: Callable[..., None],
    *source: Any,
) -> None:
    """Let the function for the type of `weights` set them, with as many threads as torch has."""
    with _alone:
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
        if weights.dtype == torch.float32:
            to_float32(*source, weights.numpy())
        else:
            to_bfloat16(*source, weights.view(torch.int16).numpy().view(np.uint16))
