"""No more than the slice and a tensor is in memory while a checkpoint of few bits is loaded."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from pipespec.engine.formats.fp4 import MXFP4, NVFP4
from pipespec.engine.formats.fp8 import FP8
from pipespec.engine.formats.gguf import GGUF
from pipespec.engine.formats.packing import PACKED_INT4
from pipespec.engine.inspection.inspection import inspect
from tests.helpers import few_bits

SIZES = {
    "small": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3},
    "large": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 3},
}
# By their scales: of blocks of 128 by 128, of the matrix, of a row, and of other blocks.
FP8_KINDS = ("deepseek", "autofp8", "fbgemm", "compressed block")
# Weights of one of the three layers of the large model, and of its largest matrix.
LAYER, MATRIX = 12.5e6, 1024 * 3072
MB = 1e6


@dataclass(frozen=True)
class Case:
    """A checkpoint, how it is loaded, and the most memory beyond the slice and what is mapped of
    its file, bytes: `per_weight` for each weight of the largest matrix, and `room`."""

    stored: str
    dtype: str
    form: str | None
    bits: float
    per_weight: float
    room: float = 10 * MB

    def __str__(self) -> str:
        return f"{self.stored}-{self.form or 'plain'}-{self.dtype}"


# A matrix that is made plain is in memory as stored, in float32 and as what it becomes.
CASES = (
    Case("Q4_K", "bfloat16", GGUF, 4.5, 4),
    Case("Q6_K", "bfloat16", GGUF, 6.6, 4, 6 * MB),
    Case("Q8_0", "bfloat16", GGUF, 8.5, 4, 6 * MB),
    Case("Q8_0", "float32", None, 8.5, 12),
    # Held as mapped.
    *(Case(kind, "bfloat16", FP8, 0, 4, 0) for kind in FP8_KINDS),
    Case("deepseek", "float32", FP8, 0, 4, 0),
    Case("deepseek", "bfloat16", None, 8, 8),
    # Pages beside those of the layer are mapped.
    Case(MXFP4, "bfloat16", MXFP4, 4.25, 4, 1 * MB),
    Case(NVFP4, "bfloat16", NVFP4, 4.5, 4, 1 * MB),
    Case("awq", "bfloat16", PACKED_INT4, 4.5, 4),
    Case("awq", "float32", None, 4.5, 8),
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[Case, tuple[int, int]]:
    """Of each case, by how much the process grew at most, and what it has then, bytes."""
    root = tmp_path_factory.mktemp("memory")
    paths = {}
    for size, sizes in SIZES.items():
        for stored in dict.fromkeys(case.stored for case in CASES):
            path = few_bits.make(root / f"{size}-{stored}", stored, "llama", **sizes)
            inspect(path)  # a GGUF header is read once, by whoever starts the ranks
            paths[size, stored] = str(path)
    asked = [
        [paths["small", case.stored], paths["large", case.stored], case.dtype, case.form]
        for case in CASES
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.load_memory", json.dumps(asked)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(CASES), done.stderr
    return {case: (grown, held) for case, (grown, held) in zip(CASES, found, strict=True)}


@pytest.mark.timeout(600)  # with that of the fixture
@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_more_than_the_slice_and_a_tensor_is_in_memory(measured, case):
    """Of three layers one is loaded."""
    grown, held = measured[case]
    most = held + LAYER * case.bits / 8 + MATRIX * case.per_weight + case.room
    assert grown < most, f"{grown / MB:.1f} MB for {held / MB:.1f}, of at most {most / MB:.1f}"
