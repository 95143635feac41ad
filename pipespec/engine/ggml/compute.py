"""Matrices of ggml's types in memory, and products with them."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from typing import Any

import numpy as np
import torch

from pipespec.engine.ggml import library as ggml
from pipespec.engine.ggml.library import ALIGNMENT, TYPES, Library
from pipespec.system import heap

# How long threads poll before they sleep, of 100: not at all. Polling threads of several processes,
# or ggml's beside PyTorch's, take cores from each other: with two other busy processes on two cores
# a token took 932 ms with ggml's usual level of 50, and 152 with none (docs/log.md, 2026-11-28).
POLL = 0
# Tensors and operations of the graph of one product.
_SMALL = 8
# Rows that are computed together are padded to a multiple of this: tiles and layouts for many rows
# begin with 8 and 4 rows, and sum the rows beyond in another order.
WIDE = 8
# Bytes of memory for weights that are allocated together, so that small matrices share huge pages.
CHUNK = 64 << 20
# Weights stay in the memory of their file unless so many times their bytes are free.
SPARE = 2
_of_thread = threading.local()
_threads: int | None = None  # of `use_threads`
_shares = False  # of `share_cores`


class ThreadChoice:
    """How many threads compute: all cores', or those of this rank's share while other ranks compute
    too (`share_cores`, or seen by a crowded step), or one while others use even that.

    Threads of a graph wait for each other after every operation, polling, so that one of two that
    has no core makes a step many times slower: 0.46 s became 8 s on two busy cores.
    """

    # Computing for less time says nothing, and so much of the cores must have been ours.
    LEAST_S, SHARE = 0.005, 0.6
    # Behind a crowded step fewer threads compute for as long as it took, at least SHORTEST_S, and
    # for twice as long each time that it is so again, up to LONGEST times.
    SHORTEST_S, LONGEST = 0.1, 8

    def __init__(self, threads: int, share: int = 1):
        self._share = min(share, threads)
        self._levels = sorted({threads, self._share, 1}, reverse=True)
        # Until when each number of threads is too many, and for how long it is next time.
        self._crowded_until = dict.fromkeys(self._levels, 0.0)
        self._pause = dict.fromkeys(self._levels, 1)

    def at(self, now: float, *, shares: bool = False) -> int:
        """How many threads compute now, a time in seconds."""
        levels = [each for each in self._levels if each <= self._share or not shares]
        return next(each for each in levels if self._crowded_until[each] <= now)

    def ran(self, threads: int, took_s: float, cpu_s: float, now: float) -> None:
        """So many threads have computed for so long, and used so much time of processors."""
        if threads == 1 or took_s <= self.LEAST_S:
            return
        pause = self._pause[threads]
        if cpu_s >= self.SHARE * threads * took_s:
            self._pause[threads] = max(pause // 2, 1)
            return
        until = now + pause * max(took_s, self.SHORTEST_S)
        self._crowded_until |= {each: until for each in self._levels if each >= threads}
        self._pause[threads] = min(2 * pause, self.LONGEST)


class Computer:
    """Computes graphs with a pool of threads; for one thread at a time.

    Rows do not depend on their batch: products are computed row by row and attention in the order
    of its keys, without tiles and without dividing them among threads (`use_ref`). A `wide` graph
    may have tiles; its rows are the same in every batch of a multiple of WIDE.
    """

    def __init__(self, library: Library, threads: int, share: int = 1):
        """`share` of the threads are this rank's while others compute."""
        self.library, self.sizes = library, (threads, share)
        # Of prompts, and of others: a draft reads a prompt while the target does, and answers would
        # be computed by one thread for long behind it.
        self._choices = {wide: ThreadChoice(threads, share) for wide in (True, False)}
        self._pool = library.pool(threads, POLL)
        self._backend = library.backend_cpu_init()
        library.backend_cpu_set_threadpool(self._backend, self._pool)
        self.scratch = library.context(_SMALL, _SMALL)
        weakref.finalize(self, _free, library, self._backend, self._pool, self.scratch, os.getpid())

    def compute(self, graph: int, *, wide: bool = False) -> None:
        """Compute all operations of a graph; `wide`: with products of many rows at a time, which
        sums them in another order. Raises MemoryError if ggml has none for it."""
        self.library.backend_cpu_set_use_ref(self._backend, not wide)
        began, cpu_began = time.perf_counter(), time.process_time()
        choice = self._choices[wide]
        threads = choice.at(began, shares=_shares)
        self.library.backend_cpu_set_n_threads(self._backend, threads)
        if self.library.backend_graph_compute(self._backend, graph):
            raise MemoryError("ggml found no memory for a batch")
        now = time.perf_counter()
        choice.ran(threads, now - began, time.process_time() - cpu_began, now)


def _free(library: Library, backend: int, pool: int, context: int, process: int) -> None:
    if os.getpid() != process:
        return  # a child that was forked, which has none of the threads
    library.backend_free(backend)
    library.threadpool_free(pool)
    library.free(context)


def use_threads(threads: int) -> None:
    """Let ggml have so many threads from now on, of which as many as PyTorch has, or one, compute
    while others use the cores (`ThreadChoice`)."""
    global _threads
    _threads = threads


def share_cores(shares: bool) -> None:
    """Say whether other ranks of this host compute meanwhile, so that this one keeps to its share
    of threads from the first step on; stages that compute in turn have all cores."""
    global _shares
    _shares = shares


def num_threads() -> int:
    return max(_threads or 1, torch.get_num_threads())


def computer(most: int | None = None) -> Computer:
    """That of this thread of the program, with so many threads at most. ggml must be there."""
    sizes = (most, most) if most else (num_threads(), torch.get_num_threads())
    kept: dict[int | None, Computer] = _of_thread.__dict__.setdefault("computers", {})
    if most not in kept or kept[most].sizes != sizes:
        library = ggml.load()
        assert library is not None, "callers have looked whether there is ggml"
        kept[most] = Computer(library, *sizes)
    return kept[most]


class GgmlTensor:
    """A tensor of ggml in memory that numpy or a file has.

    Attributes:
        address: of ggml's structure.
        memory: what keeps the numbers alive.
        by_row: whether products must be told to take rows one by one, for a row to be independent
            of its batch.
    """

    by_row = False

    def __init__(
        self, library: Library, kind: int, shape: tuple[int, ...], memory: np.ndarray, context: int
    ):
        """`shape` as in numpy, of one to three dimensions; `memory` is contiguous and holds as many
        bytes as ggml needs for it; `context`: has the structure, or 0 for one of its own."""
        assert memory.flags.c_contiguous
        self.memory, self.shape, self.num_bytes = memory, shape, memory.nbytes
        own = context or library.context(1)
        make = getattr(library, f"new_tensor_{len(shape)}d")
        self.address: int = make(own, kind, *reversed(shape))
        assert library.nbytes(self.address) <= memory.nbytes, "the memory is too small"
        buffer = place(library, self.address, memory)
        weakref.finalize(self, _forget, library, buffer, 0 if context else own)


def place(library: Library, tensor: int, memory: np.ndarray) -> int:
    """Let a tensor have its numbers in this memory; returns a buffer to free after it."""
    first = memory.ctypes.data
    start = first - first % ALIGNMENT  # ggml wants buffers aligned, and tensors anywhere in them
    buffer: int = library.backend_cpu_buffer_from_ptr(start, first - start + memory.nbytes)
    status = library.backend_tensor_alloc(buffer, tensor, first)
    assert status == 0, "a tensor in memory of its own cannot fail"
    return buffer


class LaidOutMatrix:
    """A matrix in memory of ggml's own, as its products read it fastest.

    Attributes: as of `GgmlTensor`.
    """

    def __init__(
        self, library: Library, address: int, shape: tuple[int, ...], memory: _Chunk, context: int
    ):
        self.address, self.shape, self.memory = address, shape, memory
        self.num_bytes: int = library.nbytes(address)
        self.by_row = memory.kind != library.layouts[-1]
        weakref.finalize(self, library.free, context)


Matrix = GgmlTensor | LaidOutMatrix


class _Chunk:
    """Memory for matrices, in huge pages where the system has them: with two threads a product of
    one row reads them twice as fast as the pages of a file (docs/log.md, 2026-11-29)."""

    def __init__(self, library: Library, kind: int, size: int):
        self.kind, self.size, self.used = kind, size, 0
        self.buffer: int = library.backend_buft_alloc_buffer(kind, size)
        if not self.buffer:
            raise MemoryError(f"there is no memory for {size >> 20} MiB of weights")
        self.base: int = library.backend_buffer_get_base(self.buffer)
        heap.use_huge_pages(self.base, size)
        weakref.finalize(self, library.backend_buffer_free, self.buffer)


def laid_out(library: Library, kind: str, rows: np.ndarray, shape: tuple[int, int]) -> Matrix:
    """Weights `[out, in]` of one of TYPES, copied to memory that products read faster than that of
    a file, in the layout that ggml has for this processor, if any; or where they are, if memory is
    short."""
    for layout in library.layouts if heap.free_bytes() >= SPARE * rows.nbytes else []:
        context = library.context(_SMALL)
        tensor: int = library.new_tensor_2d(context, TYPES[kind], *reversed(shape))
        size = library.backend_buft_get_alloc_size(layout, tensor)
        size += -size % ALIGNMENT
        try:
            chunk = _room(library, layout, size)
        except MemoryError:
            library.free(context)
            break
        library.backend_tensor_alloc(chunk.buffer, tensor, chunk.base + chunk.used)
        row = library.new_tensor_2d(context, TYPES["F32"], shape[1], 1)
        if library.backend_dev_supports_op(library.device, library.mul_mat(context, tensor, row)):
            chunk.used += size
            library.backend_tensor_set(tensor, rows.ctypes.data, 0, rows.nbytes)
            return LaidOutMatrix(library, tensor, shape, chunk, context)
        library.free(context)
    return matrix(library, kind, rows, shape)


def _room(library: Library, layout: int, size: int) -> _Chunk:
    """A chunk of a layout with room for so many bytes. The matrices in it keep it."""
    chunks: weakref.WeakValueDictionary[int, _Chunk]
    chunks = _of_thread.__dict__.setdefault("chunks", weakref.WeakValueDictionary())
    chunk = chunks.get(layout)
    if chunk is None or chunk.used + size > chunk.size:
        chunk = chunks[layout] = _Chunk(library, layout, max(size, CHUNK))
    return chunk


def _forget(library: Library, buffer: int, context: int) -> None:
    library.backend_buffer_free(buffer)
    if context:
        library.free(context)


def matrix(library: Library, kind: str, rows: np.ndarray, shape: tuple[int, ...]) -> GgmlTensor:
    """Weights `[out, in]`, or a stack `[experts, out, in]`, of one of TYPES, from their blocks or
    numbers."""
    return GgmlTensor(library, TYPES[kind], shape, rows, 0)


def empty(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Memory that is aligned as ggml wants it."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    whole = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + num_bytes].view(dtype).reshape(shape)


def product(
    computer: Computer, weights: Matrix, rows: np.ndarray, *, wide: bool = False
) -> np.ndarray:
    """float32 `[rows, in]` -> `[rows, out]`; `wide`: of a multiple of WIDE rows."""
    output = empty(len(rows), weights.shape[0])
    given = rows[:, None] if weights.by_row and not wide else rows
    return _once(computer, "mul_mat", weights, output, (TYPES["F32"], given), wide=wide)


def rows_of(computer: Computer, weights: GgmlTensor, indices: np.ndarray) -> np.ndarray:
    """These rows of a matrix in float32: int32 `[n]` -> `[n, in]`."""
    output = empty(len(indices), weights.shape[1])
    return _once(computer, "get_rows", weights, output, (ggml.I32, indices))


def expert_product(
    computer: Computer, stack: GgmlTensor, rows: np.ndarray, chosen: np.ndarray
) -> np.ndarray:
    """Products with the matrices of a stack that rows have chosen, int32 `[rows, k]`: float32
    `[rows, k, in]`, or `[rows, 1, in]` for the same of all -> `[rows, k, out]`."""
    output = empty(*chosen.shape, stack.shape[1])
    given = (TYPES["F32"], rows), (ggml.I32, chosen)
    return _once(computer, "mul_mat_id", stack, output, *given)


def _once(
    computer: Computer,
    name: str,
    weights: Matrix,
    output: np.ndarray,
    *inputs: tuple[int, np.ndarray],
    wide: bool = False,
) -> np.ndarray:
    """The result of one operation of weights and inputs, each with its type."""
    library, context = computer.library, computer.scratch
    library.reset(context)
    given = [
        GgmlTensor(library, kind, each.shape, np.ascontiguousarray(each), context)
        for kind, each in inputs
    ]
    result = getattr(library, name)(context, weights.address, *(each.address for each in given))
    buffer = place(library, result, output)
    graph = library.new_graph_custom(context, _SMALL, False)
    library.build_forward_expand(graph, result)
    try:
        computer.compute(graph, wide=wide)
    finally:
        library.backend_buffer_free(buffer)
    return output
