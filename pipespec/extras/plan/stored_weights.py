"""In how many bits the weights of a planned model are: as its config says, or the headers of its
files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipespec.engine.checkpoint.checkpoint import StoredFiles
from pipespec.engine.formats import quantization
from pipespec.engine.formats.fp4 import MXFP4, NVFP4
from pipespec.engine.formats.gguf import INT4_KINDS
from pipespec.engine.formats.packing import PACKED_INT8, Packing
from pipespec.engine.formats.stored import KeptLayer

# Weights of few bits but integers become bfloat16, are scaled and are read again: bytes of each.
REREAD = 8.0
# A shape by which is seen whether a GPU keeps groups of their size.
USUAL_SHAPE = (4096, 4096)


@dataclass(frozen=True)
class Weights:
    """Bytes of a weight in a GPU's memory, scales included, and those that a batch moves for it."""

    held: float = 2.0
    moved: float = 2.0

    def beside_plain(self, share: float) -> Weights:
        """The mean, if this share of the weights is so and the others are bfloat16."""
        return Weights(2.0 + share * (self.held - 2.0), 2.0 + share * (self.moved - 2.0))


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
) -> list[Weights]:
    """Of the matrices of all layers, with their names, sizes and whether they are experts': of the
    dense ones, and of the experts. Raises ModelError if pipespec reads no such files."""
    config = raw.get("quantization_config")
    method = quantization.stored_method(Path(name), config)
    if method is None or config is None:
        return [PLAIN, PLAIN]
    few = _few(name, method, config)
    spared = [*(config.get("modules_to_not_convert") or ()), *(config.get("ignore") or ())]
    patterns = [
        text[3:] if text.startswith("re:") else rf"(.*\.)?{text.replace('*', '[^.]*')}(\.|$)"
        for text in spared
    ]
    found = []
    for expert in (False, True):
        sizes = {each: size for each, size, own in matrices if own == expert}
        plain = sum(sizes[each] for each in sizes if any(re.match(p, each) for p in patterns))
        of_fp4 = expert and raw.get("expert_dtype") == "fp4"
        share = 1 - plain / (sum(sizes.values()) or 1)
        found.append((_FP4[MXFP4] if of_fp4 else few).beside_plain(share if sizes else 0.0))
    return found


def _few(name: str, method: str, config: Mapping[str, Any]) -> Weights:
    """Those that are not plain, as a GPU has them."""
    if method in quantization.METHODS:
        own = "int8" if method == quantization.TORCHAO else "nf4"
        held = quantization.QUANTIZATIONS[own].bits / 8
        return Weights(held, held)
    packing = quantization.stored_packing(Path(name), config)
    if packing.format == PACKED_INT8 or not packing.keeps("", USUAL_SHAPE):
        return PLAIN
    if isinstance(packing, Packing) and packing.group:
        held = 0.5 + 4 / packing.group
        return Weights(held, held)
    return (WEIGHTS | _FP4)[packing.format]


def by_headers(
    files: StoredFiles, num_layers: int, dense: int, experts: int
) -> list[Weights] | None:
    """Of so many dense weights and weights of experts of all layers; the latter have few bits
    first. None: the headers do not say. Raises ModelError."""
    kept = sum(files.storage(num_layers).kept_layers, KeptLayer())
    if not kept.weights or files.kept_format == PACKED_INT8:
        return None
    held, parts = kept.num_bytes / kept.weights, set(map(str, range(num_layers)))
    kinds = [each.kind for each in files.kept(parts, with_ggml=False, divided=False).values()]
    reread = sum(kind not in INT4_KINDS for kind in kinds) / max(len(kinds), 1)
    few, of_experts = Weights(held, held + REREAD * reread), min(kept.weights, experts)
    shares = min((kept.weights - of_experts) / dense, 1.0), of_experts / (experts or 1)
    return [few.beside_plain(share) for share in shares]
