"""Quantised checkpoints, packed as their tools do it, number by number: nothing here is shared
with what reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

MATRICES = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
GROUP = 32  # inputs that share a scale
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble of a word


@dataclass
class Quantised:
    """Codes `[out, in]`, scales float16 and zeros `[out, groups]`, the group of each input."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    group_of: np.ndarray

    @classmethod
    def of(
        cls, weight: np.ndarray, bits: int, group: int, *, symmetric: bool, reorder: bool, seed: int
    ) -> Quantised:
        """To the nearest code."""
        out, inputs = weight.shape
        group_of = np.arange(inputs) // group
        if reorder:
            group_of = np.random.default_rng(seed).permutation(group_of)
        most = 2**bits - 1
        groups = group_of.max() + 1
        scales = np.zeros((out, groups), np.float16)
        zeros = np.zeros((out, groups), np.int64)
        codes = np.zeros(weight.shape, np.int64)
        for g in range(groups):
            part = weight[:, group_of == g]
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            if symmetric:
                high = np.maximum(high, -low)
                low = -high
            scales[:, g] = np.maximum((high - low) / most, 1e-4)
            scale = scales[:, g].astype(np.float64)
            zeros[:, g] = 2 ** (bits - 1) if symmetric else np.clip(np.rint(-low / scale), 0, most)
            near = np.rint(part / scale[:, None]) + zeros[:, g, None]
            codes[:, group_of == g] = np.clip(near, 0, most)
        return cls(codes, scales, zeros, group_of)

    @property
    def dense(self) -> np.ndarray:
        """The weights, in float16, as the tools' own code rounds them."""
        centred = (self.codes - self.zeros[:, self.group_of]).astype(np.float16)
        return centred * self.scales[:, self.group_of]


def words(values: np.ndarray, bits: int) -> np.ndarray:
    """Rows of codes as words of 32 bits, the first in the lowest bits."""
    per_word = 32 // bits
    rows, columns = values.shape
    found = np.zeros((rows, -(-columns // per_word)), np.uint64)
    for column in range(columns):
        shifted = values[:, column].astype(np.uint64) << np.uint64(bits * (column % per_word))
        found[:, column // per_word] |= shifted
    return found.astype(np.uint32).view(np.int32)


def awq(name: str, q: Quantised, bits: int = 4) -> dict[str, np.ndarray]:
    def shuffled(values: np.ndarray) -> np.ndarray:
        order = [
            8 * word + nibble for word in range(values.shape[1] // 8) for nibble in AWQ_COLUMNS
        ]
        return words(values[:, order], bits)

    return {
        f"{name}.qweight": shuffled(q.codes.T),
        f"{name}.qzeros": shuffled(q.zeros.T),
        f"{name}.scales": q.scales.T,
    }


def gptq(name: str, q: Quantised, bits: int, *, less: int = 1) -> dict[str, np.ndarray]:
    return {
        f"{name}.qweight": words(q.codes, bits).T,
        f"{name}.qzeros": words((q.zeros - less).T % 2**bits, bits),
        f"{name}.scales": q.scales.T,
        f"{name}.g_idx": q.group_of.astype(np.int32),
    }


def compressed(name: str, q: Quantised, bits: int) -> dict[str, np.ndarray]:
    found = {
        f"{name}.weight_packed": words(q.codes, bits),
        f"{name}.weight_scale": q.scales,
        f"{name}.weight_shape": np.array(q.codes.shape, np.int64),
    }
    if (q.zeros != 2 ** (bits - 1)).any():
        found[f"{name}.weight_zero_point"] = words(q.zeros.T, bits).T
    if (np.diff(q.group_of) < 0).any():
        found[f"{name}.weight_g_idx"] = q.group_of.astype(np.int32)
    return found


@dataclass(frozen=True)
class Kind:
    """A packed format, and its entry in config.json."""

    pack: Callable[[str, Quantised, int], dict[str, np.ndarray]]
    config: dict[str, Any]
    bits: int = 4
    symmetric: bool = False
    reorder: bool = False


def compressed_tensors(form: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The entry of compressed-tensors in config.json."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **more}},
        "ignore": ["lm_head"],
    }


def _weights(**given: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "group_size": GROUP, "strategy": "group", **given}
    return compressed_tensors("pack-quantized", weights)


def _gptq(bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, **more}


KINDS = {
    "awq": Kind(awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq": Kind(gptq, _gptq(desc_act=False)),
    "gptq symmetric": Kind(gptq, _gptq(sym=True), symmetric=True),
    "gptq reordered": Kind(gptq, _gptq(desc_act=True), reorder=True),
    "gptq v2": Kind(partial(gptq, less=0), _gptq(checkpoint_format="gptq_v2")),
    "gptq 8 bits": Kind(gptq, _gptq(8), bits=8),
    "gptq 2 bits": Kind(gptq, _gptq(2), bits=2),
    "compressed": Kind(compressed, _weights(symmetric=True), symmetric=True),
    "compressed asymmetric": Kind(compressed, _weights(symmetric=False)),
    "compressed reordered": Kind(
        compressed, _weights(symmetric=True, actorder="group"), symmetric=True, reorder=True
    ),
    "compressed 8 bits": Kind(
        compressed, _weights(num_bits=8, symmetric=True), bits=8, symmetric=True
    ),
}


def pack(source: Path, folder: Path, plain: Path, kind: Kind, *, skip: str = "\0") -> None:
    """Write a checkpoint of plain weights once more, packed, and as what that is in plain ones.

    Matrices whose name holds `skip` are left as they are.
    """
    packed: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    stored = [
        each for file in sorted(source.glob("*.safetensors")) for each in load_file(file).items()
    ]
    for seed, (name, tensor) in enumerate(stored):
        if not name.endswith(MATRICES) or skip in name:
            packed[name] = dense[name] = tensor.half()
            continue
        q = Quantised.of(
            tensor.float().numpy(),
            kind.bits,
            GROUP,
            symmetric=kind.symmetric,
            reorder=kind.reorder,
            seed=seed,
        )
        dense[name] = torch.from_numpy(q.dense)
        for part, values in kind.pack(name.removesuffix(".weight"), q, kind.bits).items():
            packed[part] = torch.from_numpy(np.ascontiguousarray(values))
    more = {"dtype": "float16", "quantization_config": kind.config}
    write_checkpoint(source, folder, packed, **more)
    write_checkpoint(source, plain, dense, dtype="float16")


def write_checkpoint(
    source: Path, folder: Path, tensors: Mapping[str, torch.Tensor], **changes: Any
) -> None:
    """A checkpoint of these tensors, with the other files of `source` and changes to its
    config.json."""
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if "safetensors" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(
        {name: each.contiguous() for name, each in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
