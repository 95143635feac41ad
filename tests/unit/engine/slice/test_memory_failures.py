import numpy as np
import pytest
import torch

from pipespec.engine.slice.memory_failures import MemoryFailures


def allocate_above(rows: int, error: type[Exception], message: str = ""):
    def compute(kept: np.ndarray) -> int:
        if (count := int(kept.sum())) > rows:
            raise error(message)
        return count

    return compute


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError, "ggml found no memory for a batch"),
        (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2 GiB"),
        (RuntimeError, "[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        (RuntimeError, "std::bad_alloc"),
    ],
)
def test_sequence_with_the_most_rows_fails_first(error, message):
    failures = MemoryFailures(contained=True)
    sequences = np.array([7, 8, 8, 8, 9, 9])
    kept, count = failures.compute(sequences, allocate_above(3, error, message))
    assert (sequences[kept].tolist(), count) == ([7, 9, 9], 3)
    assert failures.take_new() == (8,)
    assert failures.take_new() == ()
    kept, count = failures.compute(sequences, allocate_above(0, error, message))
    assert (kept.any(), count, failures.take_new()) == (False, None, (7, 9))
    failures.forget(8)
    assert failures.compute(sequences, np.sum)[1] == 3


@pytest.mark.parametrize(("contained", "message"), [(False, "out of memory"), (True, "a bug")])
def test_what_cannot_be_computed_again_and_other_errors_are_raised(contained, message):
    failures = MemoryFailures(contained=contained)
    with pytest.raises(RuntimeError, match=message):
        failures.compute(np.array([1, 2]), allocate_above(0, RuntimeError, message))
    assert not failures.failed
