"""Checkpoints in many files."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from pipespec.engine.formats.safetensors_headers import INDEX, WEIGHTS
from pipespec.engine.formats.slice_tensors import part_of


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
