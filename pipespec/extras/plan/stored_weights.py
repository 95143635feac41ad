"""In how many bits the weights of a planned model are: as `--weights` says, as its config does, or
as the headers of its files do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipespec.engine.checkpoint.checkpoint import StoredFiles
from pipespec.engine.formats.fp4 import MXFP4, NVFP4
from pipespec.engine.formats.gguf import INT4_KINDS
from pipespec.engine.formats.packing import PACKED_INT8, Packing
from pipespec.engine.formats.quantization import QUANTIZATIONS, stored_method, stored_packing
from pipespec.engine.formats.stored import KeptLayer

# Weights of few bits but integers become bfloat16, are scaled and are read again: bytes of each.
REREAD = 8.0
# A shape by which is seen whether groups of this size are kept.
USUAL_SHAPE = (4096, 4096)


@dataclass(frozen=True)
class Weights:
    """Bytes of a weight in a GPU's memory, scales included, and those that a batch moves for it."""

    held: float = 2.0
    moved: float = 2.0

    def beside_plain(self, share: float) -> Weights:
        """The mean, if this share of the weights is so and the others are bfloat16."""
        held, moved = (2.0 + share * (each - 2.0) for each in (self.held, self.moved))
        return Weights(held, moved)


PLAIN = Weights()
# Of --weights, the most bytes first; integers of 4 bits have groups of 128 (AWQ, GPTQ).
WEIGHTS = {
    "bfloat16": PLAIN,
    "int8": Weights(1.03, 1.03),
    "fp8": Weights(1.0, 1.0 + REREAD),
    "int4": Weights(0.53, 0.53),
}
# Floats of 4 bits with a scale of 8 for so many.
_FP4 = {name: Weights(0.5 + 1 / n, 0.5 + 1 / n + REREAD) for name, n in ((NVFP4, 16), (MXFP4, 32))}


def by_config(
    name: str, raw: Mapping[str, Any], matrices: Sequence[tuple[str, int, bool]]
) -> tuple[Weights, Weights]:
    """Of the matrices of all layers, with their names, sizes and whether they are experts': of the
    dense ones, and of the experts. Raises ModelError if pipespec reads no such files."""
    config = raw.get("quantization_config")
    if stored_method(Path(name), config) is None:
        return PLAIN, PLAIN
    assert isinstance(config, dict)
    few = _few(name, config)
    of_experts = _FP4[MXFP4] if raw.get("expert_dtype") == "fp4" else few
    spared = [*(config.get("modules_to_not_convert") or ()), *(config.get("ignore") or ())]
    patterns = [
        text[3:] if text.startswith("re:") else rf"(.*\.)?{text.replace('*', '[^.]*')}(\.|$)"
        for text in spared
    ]
    dense, experts = (
        [
            (size, not any(re.match(each, name) for each in patterns))
            for name, size, own in matrices
            if own == expert
        ]
        for expert in (False, True)
    )
    return few.beside_plain(_share(dense)), of_experts.beside_plain(_share(experts))


def _share(sizes: Sequence[tuple[int, bool]]) -> float:
    return sum(size for size, few in sizes if few) / max(sum(size for size, _ in sizes), 1)


def _few(name: str, config: Mapping[str, Any]) -> Weights:
    """Those that are not plain."""
    method = config.get("quant_method")
    if method == "torchao":
        return WEIGHTS["int8"]
    if method == "bitsandbytes" or "quant_method" not in config:
        bits = QUANTIZATIONS["nf4"].bits / 8
        return Weights(bits, bits)
    packing = stored_packing(Path(name), config)
    if packing.format == PACKED_INT8 or not packing.keeps("", USUAL_SHAPE):
        return PLAIN  # as on a GPU
    if isinstance(packing, Packing) and packing.group:
        held = 0.5 + 4 / packing.group
        return Weights(held, held)
    return (WEIGHTS | _FP4)[packing.format]


def by_headers(
    files: StoredFiles, num_layers: int, dense: int, experts: int
) -> tuple[Weights, Weights] | None:
    """Of so many dense weights and weights of experts of all layers; the latter have few bits
    first. None: the headers do not say. Raises ModelError."""
    kept = sum(files.storage(num_layers).kept_layers, KeptLayer())
    if not kept.weights or files.kept_format == PACKED_INT8:
        return None
    held = kept.num_bytes / kept.weights
    parts = {str(layer) for layer in range(num_layers)}
    kinds = [each.kind for each in files.kept(parts, with_ggml=False, divided=False).values()]
    reread = sum(kind not in INT4_KINDS for kind in kinds) / max(len(kinds), 1)
    few = Weights(held, held + REREAD * reread)
    of_experts = min(kept.weights, experts)
    shares = (kept.weights - of_experts) / max(dense, 1), of_experts / max(experts, 1)
    return few.beside_plain(min(shares[0], 1.0)), few.beside_plain(shares[1])
