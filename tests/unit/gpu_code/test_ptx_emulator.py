"""The emulator: what it refuses, and that it copies as late as a GPU may."""

from __future__ import annotations

import numpy as np
import pytest

from tools.gpu_code.ptx_machine import Machine
from tools.gpu_code.ptx_memory import Memory, PtxFault
from tools.gpu_code.ptx_text import read_program

FRAME = """
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u32 kernel_param_1
)
.reqntid 32
{{
	ld.param.b64 	%rd1, [kernel_param_0];
	ld.param.b32 	%r1, [kernel_param_1];
	mov.u32 	%r2, %tid.x;
	mad.wide.u32 	%rd2, %r2, 4, %rd1;
	{body}
	ret;

}}
"""


def run(body: str, number: int = 0, grid: tuple[int, ...] = (1,)) -> np.ndarray:
    """The 32 integers of a kernel's tensor, which begin as 0, 1, 2, ..."""
    tensor = np.arange(32, dtype=np.int32)
    memory, (address,) = Memory.holding([tensor.view(np.uint8)], [0])
    Machine(read_program(FRAME.format(body=body)), 128).launch(grid, [address, number], memory)
    return memory.at(address, 128).view(np.int32).copy()


def test_each_thread_stores_where_its_guard_is_true() -> None:
    body = "setp.lt.s32 %p1, %r2, %r1; @%p1 st.global.b32 [%rd2], {%r1};"
    assert run(body, 3).tolist() == [3, 3, 3, *range(3, 32)]


def test_programs_that_branch_apart_go_on_separately() -> None:
    body = """mov.u32 %r3, %ctaid.x;
    setp.ne.b32 %p1, %r3, 1;
    @%p1 bra $L__BB0_2;
    st.global.b32 [%rd2], 7;
$L__BB0_2:
    mov.b32 %r4, 0;"""
    assert run(body, grid=(1,)).tolist() == list(range(32))
    assert run(body, grid=(3,)).tolist() == [7] * 32


COPY = """shl.b32 %r3, %r2, 2;
    cp.async.ca.shared.global [%r3], [%rd2], 0x4;
    cp.async.commit_group;
    {wait}
    ld.shared.b32 %r4, [%r3];
    st.global.b32 [%rd2], %r4;"""


def test_an_asynchronous_copy_is_there_once_it_is_waited_for() -> None:
    assert run(COPY.format(wait="cp.async.wait_group 0;")).tolist() == list(range(32))
    assert run(COPY.format(wait="cp.async.wait_group 1;")).tolist() == [-1] * 32
    assert run(COPY.format(wait="")).tolist() == [-1] * 32


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("st.global.b32 [%rd2+4], %r1;", "outside of every tensor"),
        ("st.global.b32 [%rd2+-1048576], %r1;", "outside of memory"),
        ("st.global.b32 [%rd1+2], %r1;", "not aligned"),
        ("ld.global.v2.b32 {%r3, %r4}, [%rd1+4];", "not aligned"),
        ("shl.b32 %r3, %r2, 10; st.shared.b32 [%r3], %r1;", "outside of memory"),
        ("setp.lt.s32 %p1, %r2, 3; @%p1 bra $L__end; $L__end:", "branch apart"),
        ("add.s32 %r3, %r9, 1;", "%r9 was never written"),
        ("tex.1d.v4.f32.f32 {%r3}, [%r1];", "does not know tex"),
        ("cvt.rzi.s32.f32 %r3, %r1;", "does not know cvt.rzi.s32.f32"),
        (
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r3}, {%r1}, {%r1}, {%r1};",
            "does not know mma.sync.aligned.m16n8k8",
        ),
    ],
)
def test_what_a_gpu_would_punish_or_the_emulator_does_not_know_is_refused(
    body: str, why: str
) -> None:
    with pytest.raises(PtxFault, match=why.replace(".", r"\.")):
        run(body)


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("div.s32 %r3, -7, 2;", -3),
        ("rem.s32 %r3, -7, 2;", -1),
        ("shr.s32 %r3, -8, 40;", -1),
        ("shl.b32 %r3, 1, 33;", 0),
        ("bfe.s32 %r3, 12, 2, 2;", -1),
        ("bfe.u32 %r3, 12, 2, 2;", 3),
        ("prmt.b32 %r3, 287454020, 1432778632, 0x3340U;", 0x11118844),
        ("cvt.rn.bf16x2.f32 %r3, 0f3F800000, 0f3F808000;", 0x3F803F80),
        ("cvt.rn.bf16x2.f32 %r3, 0f3F818000, 0f00000000;", 0x3F820000),
        ("cvt.rn.f16x2.f32 %r3, 0f3F800000, 0f40000000;", 0x3C004000),
        ("max.f32 %r3, 0f7FC00000, 0f3F800000;", 0x3F800000),
        ("fma.rn.f32 %r3, 0f3F800001, 0f3F800001, 0fBF800002;", 0x28800000),
        ("redux.sync.min.s32 %r3, %r2, -1;", 0),
        ("shfl.sync.idx.b32 %r3, %r2, 5, 31, -1;", 5),
    ],
)
def test_instructions_compute_what_the_isa_says(instruction: str, expected: int) -> None:
    assert run(f"{instruction} st.global.b32 [%rd1], %r3;")[0] == expected
