"""Reads what a draft head is, before any rank starts."""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

from pipespec.engine.checkpoint.checkpoint import open_files
from pipespec.engine.checkpoint.model_path import resolve
from pipespec.engine.formats.draft_heads import (
    EAGLE3,
    EAGLE_LAYERS,
    EAGLE_PARTS,
    OUTPUT,
    OWN_EMBEDDING,
    TO_TARGET,
    DraftHead,
    HeadFolder,
    eagle3_taps,
    mtp_head,
    mtp_names,
    other_kind,
    other_tensors,
)
from pipespec.engine.formats.safetensors_folder import SafetensorsFolder
from pipespec.engine.formats.safetensors_headers import Tensor
from pipespec.engine.formats.slice_tensors import EMBEDDING, HEAD
from pipespec.engine.formats.stored import Storage
from pipespec.engine.inspection.header_checks import check_config
from pipespec.engine.inspection.inspection import CheckpointInfo, Matrices, Sizes
from pipespec.engine.inspection.model_config import ModelFacts
from pipespec.engine.precision import ITEM_BYTES
from pipespec.errors import ModelError
from pipespec.system.result_cache import load_cached, store_cached

INSTEAD = "take an EAGLE-3 head of this target, a small model, or proposer=suffix"
# Sizes count as plain weights of this type.
ITEM = ITEM_BYTES["float32"]


def inspect_head(model: str | Path | None, target: CheckpointInfo) -> CheckpointInfo:
    """The draft head of a target: an EAGLE-3 head in a folder or of the hub, or None: the MTP
    layers that its checkpoint holds. Raises ModelError, in one sentence, for anything else."""
    if model is None:
        return _mtp(target)
    files = HeadFolder(path := resolve(model))
    raw = files.whole
    if (why := other_kind(raw) or other_tensors(tensors := files.present)) is not None:
        raise ModelError(f"{path} holds {why}; {INSTEAD}")
    check_config(path, raw)
    layers, kind = raw.get("num_hidden_layers", 1), raw.get("model_type")
    if kind != "llama" or layers != 1:
        raise ModelError(
            f"{path} holds an EAGLE-3 head of {layers} layers of {kind}, but heads of one layer of "
            f"llama are read; {INSTEAD}"
        )
    taps = eagle3_taps(path, raw, target.num_layers)
    own = OUTPUT in tensors, OWN_EMBEDDING in tensors
    parts = {part for part, has in zip((HEAD, EMBEDDING), own, strict=True) if not has}
    if HEAD in parts and target.tied:
        parts.add(EMBEDDING)
    hidden, features = tensors["fc.weight"].shape[0], len(taps) * target.hidden_size
    if features != tensors["fc.weight"].shape[-1] or (parts and hidden != target.hidden_size):
        raise ModelError(
            f"{path} is a head for another target: it reads {tensors['fc.weight'].shape[-1]} "
            f"features of a position, but {len(taps)} layers of {target.path} have {features}; "
            f"{INSTEAD}"
        )
    draft_tokens = tensors[OUTPUT].shape[0] if own[0] else target.vocab_size
    if TO_TARGET not in tensors and draft_tokens != target.vocab_size:
        raise ModelError(
            f"{path} holds no {TO_TARGET}, but proposes {draft_tokens} tokens where the target has "
            f"{target.vocab_size}; {INSTEAD}"
        )
    heads = int(raw["num_attention_heads"])
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    size = int(raw.get("head_dim") or hidden // heads)
    head = DraftHead(EAGLE3, taps, EAGLE_LAYERS - 1, EAGLE_PARTS, frozenset(parts))
    rest = [each for name, each in tensors.items() if name != OWN_EMBEDDING]
    return _info(target, path, head, [rest], hidden, 2 * size * kv_heads, kv_heads)


def _mtp(target: CheckpointInfo) -> CheckpointInfo:
    path = target.path
    if not isinstance(open_files(path), SafetensorsFolder):
        raise ModelError(
            f"MTP layers are read from folders of safetensors, but {path} is a GGUF file; {INSTEAD}"
        )
    files = HeadFolder(path)
    head = mtp_head(files.present, target.num_layers)
    if head is None:
        raise ModelError(
            f"{path} holds no MTP layer, and model.draft names no head; {INSTEAD} (model.draft)"
        )
    if files.by_package:
        raise ModelError(
            f"the MTP layer of {path} is quantised by {files.method}, which a package reads as a "
            f"whole; {INSTEAD}"
        )
    tensors = files.headers()
    layers = [
        [tensors[name] for name in mtp_names(tensors, head.layer, number)]
        for number in range(head.num_layers)
    ]
    return _info(target, path, head, layers, target.hidden_size, target.kv_size, target.kv_heads)


def _info(
    target: CheckpointInfo,
    path: Path,
    head: DraftHead,
    layers: Sequence[Iterable[Tensor]],
    hidden: int,
    kv_size: int,
    kv_heads: int,
) -> CheckpointInfo:
    """As of a model with these layers, by their tensors, and the target's embedding."""
    facts = {each.name: getattr(target, each.name) for each in fields(ModelFacts)}
    facts |= {"num_layers": len(layers), "hidden_size": hidden, "kv_size": kv_size}
    facts |= {"kv_heads": kv_heads, "has_kv": (), "has_state": (), "recurrent": None, "tied": False}
    sizes = [sum(math.prod(each.shape) for each in layer) * ITEM for layer in layers]
    return CheckpointInfo(
        **{**facts, "unscaled": None, "has_tp_plan": False, "tp_plan_splits_kv": False},
        path=path,
        model_type=target.model_type if head.kind != EAGLE3 else "llama",
        vocab_size=target.vocab_size,
        eos=(),
        stored=Sizes(tuple(sizes), target.vocab_size * hidden * ITEM, 0),
        matrices=Matrices((0,) * head.num_layers, 1, 1, False),
        storage=Storage(),
        dtype=None,
        mask_token=None,
        parallel_tokens=1,
        head=head,
    )


def require_head_fit(info: CheckpointInfo, target: CheckpointInfo) -> None:
    """Raise ModelError unless the classes of its modules accept the headers of a draft head; as
    `header_checks.require_fit`."""
    assert info.head is not None
    files = HeadFolder(info.path)
    described = sorted((name, each.shape) for name, each in files.headers().items())
    depends = {
        "config": files.raw,
        "headers": hashlib.sha256(repr(described).encode()).hexdigest(),
        "target": [target.vocab_size, target.hidden_size, target.num_layers],
        "transformers": importlib.metadata.version("transformers"),
    }
    if load_cached("fits", depends) is None:
        from pipespec.engine.slice import head_slice  # torch and Transformers

        output = target.vocab_size, info.hidden_size
        head_slice.check_fit(info.path, info.head, target.path, output)
        store_cached("fits", depends, {})
