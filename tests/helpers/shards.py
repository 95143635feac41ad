"""Checkpoints in many files, and copies that hold only the files of a slice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from pipespec.engine.formats.safetensors_headers import INDEX, WEIGHTS, read_index
from pipespec.engine.formats.slice_tensors import needed, part_of, parts_of


def shard(source: Path, folder: Path, per_file: int = 5) -> Path:
    """A checkpoint of one file again, with so many tensors in each of several files."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(WEIGHTS))
    state = load_file(source / WEIGHTS)
    names = sorted(state, key=lambda name: (part_of(name).zfill(4), name))
    shard_of = {}
    for start in range(0, len(names), per_file):
        file = f"model-{start:05d}.safetensors"
        held = names[start : start + per_file]
        save_file({name: state[name] for name in held}, folder / file, {"format": "pt"})
        shard_of |= dict.fromkeys(held, file)
    index = {"metadata": {}, "weight_map": shard_of}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def own_files(source: Path, folder: Path, layers: range, num_layers: int, *, tied: bool) -> Path:
    """A copy of a sharded checkpoint with the files of one slice alone."""
    shard_of = read_index(source)
    assert shard_of is not None
    keep = {shard_of[name] for name in needed(shard_of, parts_of(layers, num_layers, tied=tied))}
    others = set(shard_of.values()) - keep
    assert others
    return Path(shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*others)))
