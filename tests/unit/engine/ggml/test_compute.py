"""Products with ggml's types, and how many threads compute them."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pipespec.engine.ggml import compute, library
from pipespec.engine.ggml.compute import (
    Computer,
    LaidOutMatrix,
    ThreadChoice,
    laid_out,
    matrix,
    product,
    rows_of,
)
from pipespec.engine.ggml.library import PATH_VARIABLE, TYPES, Library
from pipespec.engine.ggml.self_test import fault, quantised


@pytest.fixture(scope="module")
def ggml() -> Library:
    found = library.load()
    assert found is not None, library.why_not()
    return found


@pytest.mark.parametrize("kind", TYPES)
def test_products_are_right_and_rows_do_not_depend_on_their_batch(ggml, kind):
    assert fault(ggml, kind) is None


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q6_K"])
def test_rows_of_an_embedding_are_the_dequantised_ones(ggml, kind):
    from gguf import GGMLQuantizationType, dequantize

    blocks = quantised(ggml, kind, np.random.default_rng(1).standard_normal((9, 512), np.float32))
    expected = dequantize(blocks, GGMLQuantizationType[kind]).reshape(9, 512)
    found = rows_of(
        Computer(ggml, 1), matrix(ggml, kind, blocks, (9, 512)), np.array([3, 8, 3], np.int32)
    )
    np.testing.assert_allclose(found, expected[[3, 8, 3]], rtol=1e-6)


def test_weights_stay_in_their_file_where_memory_is_short(ggml, monkeypatch):
    blocks = quantised(ggml, "Q4_K", np.ones((64, 256), np.float32))
    assert isinstance(laid_out(ggml, "Q4_K", blocks, (64, 256)), LaidOutMatrix)
    monkeypatch.setattr("pipespec.system.heap.free_bytes", lambda: blocks.nbytes)
    assert laid_out(ggml, "Q4_K", blocks, (64, 256)).memory is blocks


def test_products_do_not_depend_on_the_number_of_threads(ggml):
    random = np.random.default_rng(2)
    stored = matrix(
        ggml, "Q4_K", quantised(ggml, "Q4_K", random.random((64, 256), np.float32)), (64, 256)
    )
    rows = random.random((5, 256), np.float32)
    one, two = (product(Computer(ggml, threads), stored, rows) for threads in (1, 2))
    assert np.array_equal(one, two)


def test_one_thread_computes_for_a_while_after_a_crowded_step():
    choice = ThreadChoice(2)
    choice.ran(2, took_s=0.1, cpu_s=0.19, now=10)  # both had a core
    assert choice.at(10) == 2
    choice.ran(2, took_s=0.001, cpu_s=0.001, now=10)  # too short to tell
    assert choice.at(10) == 2
    choice.ran(2, took_s=0.2, cpu_s=0.28, now=10)  # beside one other program
    assert choice.at(10) == 2
    choice.ran(2, took_s=0.2, cpu_s=0.2, now=10)
    assert [choice.at(now) for now in (10, 10.19, 10.21)] == [1, 1, 2]
    choice.ran(1, took_s=0.2, cpu_s=0.1, now=20)  # says nothing about two
    assert choice.at(20) == 2


def test_the_oftener_steps_are_crowded_the_longer_one_thread_computes():
    choice = ThreadChoice(2)
    for pause in (1, 2, 4, 8, 8):
        choice.ran(2, took_s=1, cpu_s=1, now=0)
        assert [choice.at(now) for now in (pause - 0.1, pause)] == [1, 2]
    for _ in range(2):
        choice.ran(2, took_s=1, cpu_s=2, now=8)  # the others have gone
    choice.ran(2, took_s=1, cpu_s=1, now=8)
    assert [choice.at(now) for now in (9.9, 10)] == [1, 2]


def test_a_prompt_beside_others_does_not_slow_the_answer(monkeypatch):
    class Recorded:
        """A library that computes nothing."""

        def __getattr__(self, name: str):
            return lambda *_: 0

        def backend_cpu_set_n_threads(self, backend: int, threads: int) -> None:
            used.append(threads)

    used: list[int] = []
    clock = iter((0, 1, 1.1, 2, 2.1, 3, 3.1, 4))
    others_had_the_cores = SimpleNamespace(perf_counter=lambda: next(clock), process_time=lambda: 0)
    monkeypatch.setattr(compute, "time", others_had_the_cores)
    monkeypatch.setattr(compute, "_shares", False)
    computer = Computer(Recorded(), 2)
    for wide in (True, True, False, False):
        computer.compute(0, wide=wide)
    assert used == [2, 1, 2, 1]


def test_a_rank_keeps_its_share_while_others_compute():
    choice = ThreadChoice(8, share=2)
    assert [choice.at(10, shares=shares) for shares in (True, False)] == [2, 8]
    choice.ran(8, took_s=0.1, cpu_s=0.2, now=10)
    assert choice.at(10) == 2
    choice.ran(2, took_s=0.1, cpu_s=0.2, now=10)
    assert choice.at(10) == 2
    choice.ran(2, took_s=0.1, cpu_s=0.1, now=10)  # other programs use even that
    assert [choice.at(now) for now in (10, 10.2)] == [1, 8]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda _: None, "ggml is not installed"),
        (lambda folder: (folder / "libggml-base.so").write_bytes(b"none"), "cannot be loaded"),
    ],
)
def test_a_library_that_cannot_be_used_is_named_in_a_sentence(tmp_path, make, why):
    make(tmp_path)
    if "loaded" in why:
        (tmp_path / "libggml-cpu.so").write_bytes(b"none")
    code = "from pipespec.engine.ggml import library as l; print(l.load(), l.why_not())"
    found = run(code, tmp_path)
    assert found.startswith("None ")
    assert why in found
    assert found.count("\n") == 1


def test_a_self_test_that_did_not_end_is_made_again(tmp_path, ggml):
    """As on a busy machine; and all threads of a process use one library, which is tested once."""
    look = "from pipespec.engine.ggml import library as l; "
    unfinished = run(look + "l.TEST_S = 0; print(l.load(), l.why_not())", ggml.folder, tmp_path)
    assert unfinished.startswith("None ")
    assert "it took more than 0 s" in unfinished
    threads = "from concurrent.futures import ThreadPoolExecutor as P; "
    count = "print(len({id(each) for each in P(4).map(lambda _: l.load(), range(4))}), l.why_not())"
    assert run(look + threads + count, ggml.folder, tmp_path) == "1 \n"


def run(code: str, folder: Path, home: Path | None = None) -> str:
    environment = {PATH_VARIABLE: str(folder), "PATH": "", "HOME": str(home or folder)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout
