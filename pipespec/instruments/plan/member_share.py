"""What each GPU of a tensor-parallel group holds of a model, from its config alone.

The parts are those that loading makes (`pipespec.engine.tp_shares`), counted by the model's own
class without weights.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipespec.engine.checkpoint.model_config import read_config
from pipespec.engine.checkpoint.safetensors_headers import CONFIG
from pipespec.engine.checkpoint.text_part import text_config
from pipespec.engine.tp_divisibility import require_tp_divisible
from pipespec.engine.tp_shares import tp_shares
from pipespec.instruments.plan.model_shape import ITEM, WEIGHT_BYTES, ModelShape, raw_config


@dataclass(frozen=True)
class MemberShare:
    """Of the GPU that has most.

    Attributes:
        size: GPUs of a group.
        layer: parameters of a layer's matrices.
        whole: those among them that every GPU of a group has.
        small: its other parameters, such as norms, all of which every GPU has.
        vocabulary: of embedding and LM head, as a share.
        kv: of K and V, as a share.
        repeated_kv_heads: KV heads of a layer that its GPUs keep beyond those that it has.
    """

    size: int = 1
    layer: float = 0.0
    whole: float = 0.0
    small: float = 0.0
    vocabulary: float = 1.0
    kv: float = 1.0
    repeated_kv_heads: int = 0

    def layer_bytes(self, weights: str) -> float:
        """Of a layer's weights in memory; `weights` is one of WEIGHT_BYTES."""
        return self.layer * WEIGHT_BYTES[weights] + self.small * ITEM

    def repeated_bytes(self, weights: str) -> float:
        """Those among them that every GPU has."""
        return self.whole * WEIGHT_BYTES[weights] + self.small * ITEM

    def of_layer(self, shape: ModelShape) -> float:
        """The share of a layer's matrices."""
        return self.layer / shape.layer


def whole_model(shape: ModelShape) -> MemberShare:
    """A GPU without others beside it."""
    return MemberShare(layer=shape.layer)


def member_share(model: str, shape: ModelShape, size: int) -> MemberShare:
    """What one of `size` GPUs has of a model that `model_shape.find` takes. Raises ModelError if
    they cannot divide its layers."""
    if size == 1:
        return whole_model(shape)
    raw = raw_config(model)
    with _folder(raw) as folder:
        text = text_config(raw)
        stored, kind = read_config(folder, text), str(text.get("model_type"))
        require_tp_divisible(Path(model), kind, stored.has_tp_plan, size, requantized=False)
        shares = tp_shares(folder, size)
    layers = len(shares.common)
    common, parts = sum(shares.common) / layers, sum(part[0] for part in shares.parts) / layers
    whole = min(max(shape.layer - sum(shares.divided) / layers, 0.0), common)
    kept = shares.kv_heads if stored.tp_plan_splits_kv else [stored.kv_heads] * size
    return MemberShare(
        size,
        layer=parts + whole,
        whole=whole,
        small=common - whole,
        vocabulary=shares.vocabulary[0] / shape.vocab_size,
        kv=max(kept) / stored.kv_heads,
        repeated_kv_heads=sum(kept) - stored.kv_heads,
    )


@contextmanager
def _folder(raw: Mapping[str, Any]) -> Iterator[Path]:
    """A folder that holds this config.json and nothing else."""
    with tempfile.TemporaryDirectory(prefix="pipespec-") as name:
        (Path(name) / CONFIG).write_text(json.dumps(raw))
        yield Path(name)
