"""Which kernels are compiled ahead of time, how they are launched, and what counts as a fault."""

import importlib.util
from itertools import combinations, product
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from pipespec.engine.attention import kernels, select, triton_backend
from pipespec.engine.attention.triton_backend import (
    SHARED_KIB,
    Launch,
    attend_launch,
    capability_error,
    tile_rows,
)
from tools.gpu_code import matrix
from tools.gpu_code.compiling import Compiled, compile_variant
from tools.gpu_code.matrix import AXES, Case, Variant, compiled_for, covering_cases

CASE = Case((8, 6), torch.bfloat16, (64, 64), 4, "window", True, True, 8)
BATCHES = (1, 2, 3, 16, 17, 32, 1)


def variant(**changes: object) -> Variant:
    (found,) = (each for each in compiled_for(CASE, [1]) if each.kernel == "attend")
    return Variant(**{**vars(found), **changes})


def plant(before: str, after: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace this text of the kernels' source, which must be there once. `folder` keeps the
    changed source, which Triton reads."""
    source = Path(kernels.__file__).read_text()
    assert source.count(before) == 1
    path = folder / "planted_kernels.py"
    path.write_text(source.replace(before, after))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    for user in (triton_backend, matrix):
        monkeypatch.setattr(user, "kernels", changed)


def test_batches_of_any_size_run_what_the_first_one_compiled():
    first = compiled_for(CASE, [32])
    assert sorted(each.kernel for each in first) == ["attend", "merge", "store"]
    assert compiled_for(CASE, BATCHES) != []
    assert {v.arguments for v in compiled_for(CASE, BATCHES)} == {v.arguments for v in first}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('do_not_specialize=["rows", "words", "span"]', 'do_not_specialize=["words", "span"]'),
        ('        "tree_positions",\n', ""),
        ('do_not_specialize=["rows"], ', ""),
    ],
)
def test_a_kernel_that_is_compiled_anew_for_a_batch_is_found(before, after, tmp_path, monkeypatch):
    plant(before, after, tmp_path, monkeypatch)
    assert len(compiled_for(CASE, BATCHES)) > 3


@pytest.mark.slow
def test_every_two_values_of_the_matrix_occur_in_ci():
    cases = covering_cases()
    seen = {pair for case in cases for pair in combinations(enumerate(case), 2)}
    for (a, first), (b, second) in combinations(enumerate(AXES), 2):
        assert all(((a, x), (b, y)) in seen for x in first for y in second)
    largest = {(c.capability, c.dtype, c.dims) for c in cases if c.group == 16}
    for capability in SHARED_KIB:
        for dtype in AXES.dtype:
            assert all((capability, dtype, (d, d)) in largest for d in (64, 128, 256))


def test_gpus_that_the_table_does_not_know_get_the_launch_of_those_with_least_memory():
    smallest = min(SHARED_KIB, key=SHARED_KIB.__getitem__)
    for of_layer in ((2, 64, 16), (2, 256, 4), (4, 128, 1)):
        assert attend_launch((12, 1), *of_layer) == attend_launch(smallest, *of_layer)


def test_every_launch_has_tiles():
    """A plan has the tilings of these sizes alone."""
    for capability in SHARED_KIB:
        launches = {
            attend_launch(capability, itemsize, width, group).rows
            for itemsize, width, group in product((2, 4), (64, 128, 256), (1, 4, 8, 16))
        }
        assert launches == {*tile_rows(capability)}


def test_an_older_gpu_is_refused_by_name(monkeypatch):
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    expected = "its kernels need a GPU of sm_80 or newer, and this one is of sm_75"
    assert select.backend_error("triton", device, []) == expected
    assert all(capability_error(each) is None for each in SHARED_KIB)


def test_what_is_over_a_limit_is_a_fault():
    small, large = variant(capability=(8, 6)), variant(capability=(9, 0))
    needs = Compiled(registers=255, shared_bytes=100 << 10)
    (fault,) = needs.faults(small)
    assert fault == "needs 100.0 KiB of shared memory, and a program may have 99"
    assert needs.faults(large) == []
    spills = Compiled(registers=255, spilled_bytes=16)
    assert spills.faults(small) == ["spills 16 bytes of registers"]
    assert Compiled(tensor_columns=1024).faults(large) == ["needs 1024 columns of tensor memory"]
    assert Compiled(error="why").faults(small) == ["is not compiled: why"]
    assert Compiled(registers=80, spilled_bytes=16).faults(small) == []
    assert Compiled(registers=80, spilled_bytes=160).faults(small) != []


@pytest.mark.long
def test_launches_of_other_gpus_are_found_where_they_do_not_fit(monkeypatch):
    def attend(capability: tuple[int, int]) -> list[str]:
        case = CASE._replace(capability=capability, dims=(256, 256), group=16)
        (found,) = (each for each in compiled_for(case, [1]) if each.kernel == "attend")
        return compile_variant(found).faults(found)

    assert attend((8, 6)) == []
    (older,) = attend((7, 5))
    assert older.startswith("is not compiled: RuntimeError")
    large = Launch(rows=8, heads=16, keys=64, warps=8, stages=3)
    monkeypatch.setattr(triton_backend, "attend_launch", lambda *_: large)
    shared, *_ = attend((8, 6))
    assert shared.endswith("KiB of shared memory, and a program may have 99")
