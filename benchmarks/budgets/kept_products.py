"""The product of a matrix whose weights stay in few bits, by form and rows, beside the plain one.

    python -m benchmarks.budgets.kept_products --json benchmarks/results/kept_products.json

MEASURED on this machine's CPU with random weights, in bfloat16; medians. Each product reads
another of several equal matrices, together larger than the caches, as the layers of a model are.
`bits` is what a weight takes in memory, `of_file` how many times that of the file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import experiment
from pipespec.engine.block_linear import make_linear
from pipespec.engine.formats.fp8 import Fp8Weights
from pipespec.engine.formats.gguf_blocks import KINDS, BlockWeights
from pipespec.engine.fp8_linear import Fp8Linear

ROWS = (1, 4, 16, 64, 512)
CPU = torch.device("cpu")
FP8_BLOCK = 128
# Bytes of all matrices of one form, at the least.
WORKING_SET = 256 << 20


def plain(size: int) -> nn.Module:
    return nn.Linear(size, size, bias=False, dtype=torch.bfloat16)


def fp8(size: int) -> nn.Module:
    layer = Fp8Linear("it", size, size)
    codes = torch.randn(size, size).to(torch.float8_e4m3fn)
    blocks = -(-size // FP8_BLOCK)
    layer.fill(Fp8Weights(codes, torch.ones(blocks, blocks), FP8_BLOCK, FP8_BLOCK), CPU)
    return layer


def blocks_of(kind: str, size: int) -> nn.Module:
    found = KINDS[kind]
    # All bytes are equal, so that no scale is infinite; the time does not depend on them.
    rows = torch.full((size, size // found.size * found.num_bytes), 0x11, dtype=torch.uint8)
    layer = make_linear({"it": kind}, torch.bfloat16, "it", size, size)
    layer.fill(BlockWeights(rows, kind), CPU)
    return layer


# Of each form: a layer of a size, and the bits of a weight in the files.
FORMS: dict[str, tuple[Callable[[int], nn.Module], float]] = {
    "bfloat16": (plain, 16),
    "FP8": (fp8, 8 + 32 / FP8_BLOCK**2),
    **{
        name: (partial(blocks_of, name), 8 * kind.num_bytes / kind.size)
        for name, kind in KINDS.items()
    },
}


def held_bytes(layer: nn.Module) -> int:
    return sum(each.nbytes for each in (*layer.parameters(), *layer.buffers()))


def median_ms(layers: list[nn.Module], inputs: Tensor, times: int) -> float:
    took = []
    for _, layer in zip(range(times), cycle(layers), strict=False):
        start = time.perf_counter()
        layer(inputs)
        took.append(time.perf_counter() - start)
    return 1e3 * median(took)


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns (4096)")
    parser.add_argument("--repeats", type=int, default=30, help="products of each (30)")
    options = experiment.parse(parser, repeats=3, size=1024)
    rows = []
    with torch.inference_mode():
        for name, (make, in_file) in FORMS.items():
            first = make(options.size)
            count = -(-WORKING_SET // held_bytes(first)) if options.size > 1024 else 1
            layers = [first, *(make(options.size) for _ in range(count - 1))]
            bits = 8 * held_bytes(first) / options.size**2
            row: dict[str, Any] = {"form": name, "bits": bits, "of_file": bits / in_file}
            for num_rows in ROWS:
                inputs = torch.randn(num_rows, options.size, dtype=torch.bfloat16)
                median_ms(layers, inputs, 3)  # compiled and read once
                row[f"{num_rows}_rows_ms"] = median_ms(layers, inputs, options.repeats)
            rows.append(row)
    title = f"MEASURED: ms of a product by {options.size}², {torch.get_num_threads()} threads"
    experiment.publish(options, title, rows)


if __name__ == "__main__":
    main()
