"""Executes the PTX of a kernel on the CPU.

All threads of many programs (blocks of threads) execute an instruction at once, as one numpy
operation. Threads of one program must branch alike, as they do in what Triton compiles; programs
that branch apart go on separately. What a GPU may do late is done as late as it may be:
asynchronous copies arrive when the kernel waits for them. So a missing wait is found; a missing
barrier is not, as the threads of a program never run apart.

No package that executes the PTX of sm_80 on a CPU was found, so this knows what our kernels need.
Other instructions are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tools.gpu_code.ptx_arithmetic import TYPES, bf16_value, computed_by, f16_value
from tools.gpu_code.ptx_memory import Memory, PtxFault
from tools.gpu_code.ptx_text import Address, Instruction, Operand, Program

WARP = 32
# Programs that are executed together.
TOGETHER = 32
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
_REGISTERS = {"p": np.bool_, "rs": np.uint16, "r": np.uint32, "rd": np.uint64}
# The name of all shared memory.
_SHARED = "global_smem"
# What changes nothing here; see above for barriers.
_IGNORED = {"bar", "barrier", "fence", "membar"}


@dataclass
class _Copies:
    """An asynchronous copy of each thread that takes part; `group` counts the commits before it."""

    to: np.ndarray
    words: np.ndarray
    active: np.ndarray
    group: int


@dataclass
class _State:
    """Programs that have branched alike: their indices, and the registers of their threads."""

    programs: np.ndarray
    registers: dict[str, np.ndarray]
    at: int = 0
    commits: int = 0
    copies: list[_Copies] = field(default_factory=list)

    def of(self, chosen: np.ndarray, threads: int, at: int) -> _State:
        """Some of its programs, at another instruction."""
        lanes = np.repeat(chosen, threads)
        copies = [
            _Copies(c.to[lanes], c.words[lanes], c.active[lanes], c.group) for c in self.copies
        ]
        registers = {name: each[lanes] for name, each in self.registers.items()}
        return _State(self.programs[chosen], registers, at, self.commits, copies)


class Machine:
    """One kernel, with `shared_bytes` of shared memory for each of its programs."""

    def __init__(self, program: Program, shared_bytes: int):
        self._program, self._shared_bytes = program, -(-max(shared_bytes, 16) // 16) * 16
        self._steps = [self._step(each) for each in program.instructions]

    def launch(self, grid: Sequence[int], arguments: Sequence[object], memory: Memory) -> None:
        """Execute every program of the grid. `arguments`: one number for each parameter. Raises
        PtxFault for an access outside of the tensors in `memory`, and whatever is not known."""
        grid = (*grid, 1, 1)[:3]
        self._memory, self._grid = memory, grid
        params = zip(self._program.params.items(), arguments, strict=True)
        self._numbers = {name: _argument(value, kind) for (name, kind), value in params}
        every = np.arange(int(np.prod(grid)))
        with np.errstate(all="ignore"):
            for start in range(0, len(every), TOGETHER):
                self._run(every[start : start + TOGETHER])

    def _run(self, programs: np.ndarray) -> None:
        threads = self._program.threads
        lane = np.tile(np.arange(threads, dtype=np.uint32), len(programs))
        index = np.repeat(programs, threads)
        x, y, _ = self._grid
        places = {"x": index % x, "y": index // x % y, "z": index // (x * y)}
        registers = {f"%ctaid.{axis}": at.astype(np.uint32) for axis, at in places.items()}
        for axis, size in zip("xyz", self._grid, strict=True):
            registers[f"%nctaid.{axis}"] = np.full(len(lane), size, np.uint32)
        registers |= {"%tid.x": lane, "%laneid": lane % np.uint32(WARP)}
        # Where a program's part of shared memory begins; what was never written is NaN.
        self._first = int(programs[0])
        self._shared = Memory(len(programs) * self._shared_bytes, empty=0xFF)
        waiting = [_State(programs, registers)]
        while waiting:
            waiting += self._until_branch(waiting.pop())

    def _until_branch(self, state: _State) -> list[_State]:
        """Execute until programs end or branch apart; returns those that go on."""
        instructions, labels = self._program.instructions, self._program.labels
        threads = self._program.threads
        while state.at < len(instructions):
            each, step = instructions[state.at], self._steps[state.at]
            state.at += 1
            if each.parts[0] not in ("bra", "ret"):
                try:
                    step(state)
                except PtxFault as fault:
                    raise PtxFault(f"{fault}, in {self._program.name}: {each.text}") from fault
                continue
            goes = _active(each, state)
            goes = np.ones(len(state.programs) * threads, bool) if goes is None else goes
            goes = goes.reshape(-1, threads)
            if (goes.any(1) != goes.all(1)).any():
                raise PtxFault(f"threads of one program branch apart: {each.text}")
            goes = goes[:, 0]
            there = len(instructions) if each.parts[0] == "ret" else labels[str(each.operands[0])]
            if goes.all():
                state.at = there
            elif goes.any():
                return [state.of(goes, threads, there), state.of(~goes, threads, state.at)]
        return []

    # --- instructions -------------------------------------------------------------------------

    def _step(self, each: Instruction) -> Callable[[_State], None]:
        base, parts = each.parts[0], each.parts
        if base in ("bra", "ret") or base in _IGNORED:
            return lambda state: None
        special = {
            ("mov",): self._mov,
            ("ld",): self._load,
            ("st",): self._store,
            ("cp",): self._copy,
            ("shfl",): self._shuffle,
            ("redux",): self._reduce,
            ("ldmatrix",): self._load_matrices,
            ("mma",): self._multiply,
        }.get((base,))
        if special is not None:
            return lambda state: special(each, state)
        found = computed_by(parts)
        if found is None:
            raise PtxFault(f"the emulator does not know {'.'.join(parts)}")
        function, types = found

        def compute(state: _State) -> None:
            given = (
                self._read(x, t, state) for x, t in zip(each.operands[1:], types, strict=False)
            )
            self._write(each.operands[0], function(*given), each, state)

        return compute

    def _read(self, operand: Operand, kind: str, state: _State) -> np.ndarray:
        """The values of an operand as this type."""
        assert isinstance(operand, str), operand
        dtype = TYPES[kind]
        found = state.registers.get(operand)
        if found is None:
            return np.full(len(state.programs) * self._program.threads, _number(operand, dtype))
        if found.dtype.itemsize == np.dtype(dtype).itemsize or kind == "pred":
            return found.view(dtype)
        return found.astype(f"u{np.dtype(dtype).itemsize}").view(dtype)

    def _write(self, name: Operand, value: np.ndarray, each: Instruction, state: _State) -> None:
        assert isinstance(name, str), name
        kind = np.dtype(_REGISTERS[name.strip("%0123456789")])
        if value.dtype.itemsize != kind.itemsize:
            value = value.view(f"u{value.dtype.itemsize}").astype(kind)
        value = value if value.dtype == kind else value.view(kind)
        active = _active(each, state)
        if active is not None:
            old = state.registers.get(name, np.zeros_like(value))
            value = np.where(active, value, old)
        state.registers[name] = value

    def _mov(self, each: Instruction, state: _State) -> None:
        to, value = each.operands
        dtype = TYPES[each.parts[-1]]
        half = 4 * np.dtype(dtype).itemsize  # bits
        if isinstance(value, tuple):
            low, high = (self._read(x, f"u{half}", state).astype(dtype) for x in value)
            self._write(to, low | high << dtype(half), each, state)
        elif isinstance(to, tuple):
            whole = self._read(value, each.parts[-1], state)
            for i, name in enumerate(to):
                self._write(name, (whole >> dtype(half * i)).astype(f"u{half // 8}"), each, state)
        else:
            self._write(to, self._read(value, each.parts[-1], state), each, state)

    # --- memory -------------------------------------------------------------------------------

    def _address(self, place: Operand, space: str, state: _State) -> np.ndarray:
        """The address of each thread within the whole of a memory."""
        assert isinstance(place, Address), place
        offset = np.uint64(place.offset % 2**64)
        if space == "global":
            return self._read(place.base, "u64", state) + offset
        if place.base in state.registers:
            own = self._read(place.base, "u32", state).astype(np.uint64) + offset
        else:  # the name of all shared memory
            own = np.full(len(state.programs) * self._program.threads, offset)
        # What is outside of a program's own part is outside of all.
        own = np.where(own < self._shared_bytes, own, np.uint64(1 << 32))
        part = (state.programs - self._first).astype(np.uint64) * np.uint64(self._shared_bytes)
        return own + np.repeat(part, self._program.threads)

    def _load(self, each: Instruction, state: _State) -> None:
        to, place = each.operands
        space, kind = each.parts[1], each.parts[-1]
        if space == "param":
            assert isinstance(place, Address) and isinstance(to, str)
            value = self._numbers[place.base]
            self._write(
                to, np.full(len(state.programs) * self._program.threads, value), each, state
            )
            return
        names, size = to if isinstance(to, tuple) else (to,), _SIZES[kind[1:]]
        memory = self._memory if space == "global" else self._shared
        at, active = self._address(place, space, state), _active(each, state)
        chosen = slice(None) if active is None else active
        memory.check_alignment(at[chosen], size * len(names))
        for i, name in enumerate(names):
            words = np.zeros(len(at), f"u{size}")
            words[chosen] = memory.load(at[chosen] + np.uint64(size * i), size)
            self._write(name, words, each, state)

    def _store(self, each: Instruction, state: _State) -> None:
        place, given = each.operands
        space, kind = each.parts[1], each.parts[-1]
        names, size = given if isinstance(given, tuple) else (given,), _SIZES[kind[1:]]
        memory = self._memory if space == "global" else self._shared
        at, active = self._address(place, space, state), _active(each, state)
        chosen = slice(None) if active is None else active
        memory.check_alignment(at[chosen], size * len(names))
        for i, name in enumerate(names):
            words = self._read(name, f"u{8 * size}", state)
            memory.store(at[chosen] + np.uint64(size * i), words[chosen], size)

    def _copy(self, each: Instruction, state: _State) -> None:
        """cp.async: the words are read now, and arrive when they are waited for."""
        if "commit_group" in each.parts:
            state.commits += 1
        elif "wait_group" in each.parts or "wait_all" in each.parts:
            kept = int(str(each.operands[0])) if "wait_group" in each.parts else 0
            due = [c for c in state.copies if c.group < state.commits - kept]
            state.copies = [c for c in state.copies if c.group >= state.commits - kept]
            for copies in due:
                for i in range(copies.words.shape[1]):
                    to = copies.to[copies.active] + np.uint64(4 * i)
                    self._shared.store(to, copies.words[copies.active, i], 4)
        else:
            to, source, size = each.operands[:3]
            count = int(str(size), 0) // 4
            at, active = self._address(source, "global", state), _active(each, state)
            active = np.ones(len(at), bool) if active is None else active
            read = np.full(len(at), 4 * count, np.uint32)
            if len(each.operands) > 3:  # so many bytes are read, and the others are zero
                read = self._read(each.operands[3], "u32", state)
            words = np.zeros((len(at), count), np.uint32)
            for i in range(count):
                chosen = active & (read > 4 * i)
                words[chosen, i] = self._memory.load(at[chosen] + np.uint64(4 * i), 4)
            to = self._address(to, "shared", state)
            self._shared.check_alignment(to[active], 4 * count)
            state.copies.append(_Copies(to, words, active, state.commits))

    # --- what the threads of a warp do together -----------------------------------------------

    def _shuffle(self, each: Instruction, state: _State) -> None:
        to, value, lane = each.operands[:3]
        lanes = np.arange(len(state.programs) * self._program.threads)
        by = self._read(lane, "u32", state)
        other = {"bfly": (lanes % WARP) ^ by, "idx": by}[each.parts[2]] % WARP
        words = self._read(value, "b32", state)
        self._write(to, words[(lanes // WARP * WARP + other).astype(np.int64)], each, state)

    def _reduce(self, each: Instruction, state: _State) -> None:
        to, value = each.operands[:2]
        function = {"min": np.minimum, "max": np.maximum, "add": np.add}[each.parts[2]]
        words = self._read(value, each.parts[-1], state)
        found = function.reduce(words.reshape(-1, WARP), 1, dtype=words.dtype)
        self._write(to, np.repeat(found, WARP), each, state)

    def _load_matrices(self, each: Instruction, state: _State) -> None:
        """ldmatrix: the lanes give the addresses of rows of 8 x 8 matrices of 16 bits."""
        to, place = each.operands
        assert isinstance(to, tuple)
        at = self._address(place, "shared", state).reshape(-1, WARP)
        for i, name in enumerate(to):
            rows = at[:, 8 * i : 8 * i + 8, None] + np.arange(0, 16, 2, dtype=np.uint64)
            self._shared.check_alignment(rows[..., 0].ravel(), 16)
            matrix = self._shared.load(rows.ravel(), 2).reshape(-1, 8, 8)
            if "trans" in each.parts:
                matrix = matrix.transpose(0, 2, 1)
            words = np.ascontiguousarray(matrix).view(np.uint32).reshape(-1)
            self._write(name, words, each, state)

    def _multiply(self, each: Instruction, state: _State) -> None:
        """mma.sync m16n8k16: D = A B + C, in 16 bits and float32."""
        if each.parts[3] != "m16n8k16" or each.parts[6:] not in _PRODUCTS:
            raise PtxFault(f"the emulator does not know {'.'.join(each.parts)}")
        to, a, b, c = each.operands
        value = bf16_value if each.parts[7] == "bf16" else f16_value

        def halves(names: Operand) -> list[np.ndarray]:
            """The two numbers of each register, [warps, 8, 4, 2] by group and its thread."""
            words = [self._read(name, "b32", state).view(np.uint16) for name in names]
            return [value(word).reshape(-1, 8, 4, 2) for word in words]

        def wide(names: Operand) -> np.ndarray:
            words = [self._read(name, "f32", state).reshape(-1, 8, 4) for name in names]
            upper, lower = np.stack(words[:2], -1), np.stack(words[2:], -1)
            return np.concatenate((upper, lower), 1).reshape(-1, 16, 8)

        first, below, right, last = (part.reshape(-1, 8, 8) for part in halves(a))
        left = np.concatenate(
            (np.concatenate((first, right), 2), np.concatenate((below, last), 2)), 1
        )
        columns = np.concatenate([part.reshape(-1, 8, 8) for part in halves(b)], 2)
        product = left.astype(np.float64) @ columns.astype(np.float64).transpose(0, 2, 1)
        sums = (product + wide(c)).astype(np.float32).reshape(-1, 2, 8, 4, 2)
        for i, name in enumerate(to):
            self._write(name, sums[:, i // 2, :, :, i % 2].reshape(-1), each, state)


_PRODUCTS = {("f32", kind, kind, "f32") for kind in ("bf16", "f16")}


def _active(each: Instruction, state: _State) -> np.ndarray | None:
    """Which threads take part; None: all."""
    if each.guard is None:
        return None
    guard = state.registers[each.guard]
    return ~guard if each.negated else guard


def _argument(value: Any, kind: str) -> np.ndarray:
    """An argument of the kernel; an address may be before the beginning of memory."""
    return np.array(value % 2**64 if kind == "u64" else value, TYPES[kind])


def _number(text: str, dtype: type[np.generic]) -> np.generic:
    """A number that stands in the text, as this type."""
    kind = np.dtype(dtype)
    if text.startswith("0f"):
        return np.uint32(int(text[2:], 16)).view(kind)  # its bits, of whatever type
    if text.startswith("%"):
        raise PtxFault(f"{text} was never written")
    value = 0 if text == _SHARED else int(text.rstrip("U"), 0)
    if kind.kind == "f" or kind == np.bool_:
        return kind.type(value)
    return np.array(value % 2 ** (8 * kind.itemsize), f"u{kind.itemsize}").view(kind)[()]
