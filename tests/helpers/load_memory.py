"""How much memory loading a slice takes: a program that is asked with JSON.

    python -m tests.helpers.load_memory '[["small", "large", "bfloat16", "fp8"], …]'

For each case it prints by how many bytes a process grows at most, pages of mapped files included,
while it loads the second layer of the large checkpoint, and how many bytes of weights it
has then. It has loaded the small one before. Each case has a process of its own, forked when all is
imported and no thread was started.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.system import heap

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _bytes_of(field: str) -> int:
    line: Any = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _measure(small: str, large: str, dtype: str, form: str | None) -> list[int]:
    def load(path: str) -> ModelSlice:
        kind = getattr(torch, dtype)
        return ModelSlice.load(path, range(1, 2), dtype=kind, quantization=form, num_slots=4)

    load(small)
    heap.release()
    CLEAR.write_text("5")  # the highest size so far is the present one
    before = _bytes_of("VmRSS")
    model = load(large)
    return [_bytes_of("VmHWM") - before, model.num_weight_bytes]


def main() -> None:
    for case in json.loads(sys.argv[1]):
        child = os.fork()
        if child == 0:
            print(json.dumps(_measure(*case)), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
