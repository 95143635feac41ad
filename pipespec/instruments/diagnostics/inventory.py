"""What a host has: versions, CUDA devices, and hashes of its model files.

Nothing is downloaded and no weight is read, so an answer takes a fraction of a second; torch is
imported only where a CUDA device is asked for.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipespec.engine.architectures import count_field
from pipespec.engine.attention.select import missing_requirement
from pipespec.engine.checkpoint.formats.gguf import is_gguf
from pipespec.engine.checkpoint.formats.gguf_parts import parts_of
from pipespec.engine.checkpoint.model_path import known_model
from pipespec.engine.checkpoint.partial_checkpoint import missing
from pipespec.engine.checkpoint.safetensors_headers import (
    CONFIG,
    INDEX,
    WEIGHTS,
    tensor_ranges,
    weight_map,
)
from pipespec.engine.checkpoint.slice_tensors import OUTPUT_HEADS, part_of
from pipespec.engine.checkpoint.text_part import text_config, text_names
from pipespec.engine.checkpoint_parts.parts_file import is_partial
from pipespec.errors import ModelError
from pipespec.instruments.diagnostics.machine_check import attention_faults
from pipespec.system.devices import num_cuda
from pipespec.system.validation import (
    Missing,
    Unreadable,
    home_expanded,
    is_folder,
    parse_json,
    read_bytes,
)
from pipespec.system.versions import SHORT, code_hash, package_version

# Of a GGUF file so many bytes at its start, where its settings are, and at its end are compared.
GGUF_END = 2**16
PACKAGES = ("torch", "transformers")
# Packages that quantise, and that read quantised checkpoints.
OPTIONAL = ("torchao", "bitsandbytes", "compressed-tensors", "gguf")
DRIVER_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A checkpoint on a host.

    `problem` says in a clause why it cannot be used, or is None. `config` and `index` are SHA-256
    hashes of those files; `shards` has the sizes of the weight files by their names. `index` is
    None where a single file holds all weights. `absent` has the parts (`engine.slice_tensors`) that
    each missing file of the index holds; `num_layers` and `tied` say which of them a slice needs.
    """

    folder: str
    problem: str | None
    config: str | None = None
    index: str | None = None
    shards: Mapping[str, int] | None = None
    absent: Mapping[str, list[str]] = field(default_factory=dict)
    num_layers: int | None = None
    tied: bool = False


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a host has.

    `versions` has python, pipespec, code (of pipespec: a hash), torch, transformers, OPTIONAL
    and driver (NVIDIA's); None stands for what is not there. `cuda` names the CUDA
    devices that torch can use, None if the request did not ask for them; `cuda_problem` says in a
    clause why there are none. `attention` maps the installed backends to the clause with which
    their self-test fails on such a device (None: it passes). `models` maps "target" and "draft" to
    the checkpoints at their paths.
    """

    versions: dict[str, str | None]
    cuda: list[str] | None
    cuda_problem: str | None
    attention: dict[str, str | None]
    models: dict[str, Fingerprint]


def take_inventory(models: Mapping[str, str], devices: Iterable[str]) -> Inventory:
    """Take the inventory of this machine.

    `models` maps a part, as "target", to a folder or hub id; `devices` are those that the hosts
    file names.
    """
    driver = nvidia_driver()
    versions = {
        "python": platform.python_version(),
        "pipespec": package_version("pipespec"),
        "code": code_hash()[:SHORT],
        **{name: package_version(name) for name in (*PACKAGES, *OPTIONAL)},
        "driver": driver,
    }
    named = any(device.startswith("cuda") for device in devices)
    wanted = named or (driver is not None and any(device == "auto" for device in devices))
    cuda, problem = cuda_devices() if wanted else (None, None)
    found = {part: fingerprint(model) for part, model in models.items()}
    faults = attention_faults(True) if cuda else {}
    installed = {
        name: why for name, why in faults.items() if missing_requirement(name, "cuda") is None
    }
    return Inventory(versions, cuda, problem, installed, found)


def nvidia_driver() -> str | None:
    """The version of NVIDIA's driver, None without one."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=DRIVER_TIMEOUT_S,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(answer.split()), None)


def cuda_devices() -> tuple[list[str], str | None]:
    """The names of the CUDA devices that torch can use, and a clause that says why none."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
        return [], f"torch cannot be imported ({error})"
    if torch.version.cuda is None and torch.version.hip is None:
        return [], f"torch {torch.__version__} is built without CUDA"
    names = [torch.cuda.get_device_name(index) for index in range(num_cuda())]
    return names, None if names else "torch finds no CUDA device, or its driver is too old"


def fingerprint(model: str) -> Fingerprint:
    """The checkpoint in a folder, or in the hub's cache under a hub id; nothing is downloaded."""
    path = home_expanded(model)
    if not path.is_file() and is_gguf(path):
        path = known_model(model) or path
    if is_gguf(path) and path.is_file():
        ends, size = b"", 0
        try:
            for part in parts_of(path):
                with part.open("rb") as stream:
                    ends += stream.read(GGUF_END)
                    stream.seek(max(part.stat().st_size - GGUF_END, 0))
                    ends += stream.read(GGUF_END)
                    size += part.stat().st_size
        except OSError as error:
            return Fingerprint(str(path), f"cannot be read ({error.strerror})")
        # It may have another name on each host.
        return Fingerprint(str(path), None, _hash(ends), None, {"": size})
    if not is_folder(path):
        cached = known_model(model)
        if cached is None:
            return Fingerprint(model, "is missing")
        path = cached
    folder = str(path)
    try:
        raw = read_bytes(path / CONFIG)
    except Missing:
        return Fingerprint(folder, f"holds no {CONFIG}")
    except Unreadable as error:
        return Fingerprint(folder, f"cannot be read ({CONFIG}: {error})")
    config = _hash(raw)
    try:
        index = read_bytes(path / INDEX) if os.path.isfile(path / INDEX) else None
        shard_of = _shard_of(path, index)
        sizes = _sizes(path, set(shard_of.values()) or {WEIGHTS})
    except Unreadable as error:
        return Fingerprint(folder, f"cannot be read ({INDEX}: {error})", config)
    except ModelError as error:
        return Fingerprint(folder, str(error), config)
    except OSError as error:
        return Fingerprint(folder, f"cannot be read ({error.strerror})", config)
    hashed = None if index is None else _hash(index)
    absent = _absent(path, shard_of)
    return Fingerprint(folder, None, config, hashed, sizes, absent, *_layers(raw, shard_of))


def _shard_of(path: Path, index: bytes | None) -> dict[str, str]:
    """The file of each tensor, by the index. Raises ModelError with a clause."""
    if index is None:
        return {}
    try:
        return weight_map(path / INDEX, parse_json(index))
    except (Unreadable, ModelError) as error:
        raise ModelError(f"has no usable {INDEX}") from error


def _sizes(path: Path, shards: Collection[str]) -> dict[str, int]:
    """Name and size of every weight file that is here. Raises ModelError with a clause if none
    is."""
    here = sorted(name for name in shards if os.path.isfile(path / name))
    if not here:
        others = f" and {len(shards) - 1} more of its files" if len(shards) > 1 else ""
        raise ModelError(f"holds no {min(shards)}{others}")
    return {name: (path / name).stat().st_size for name in here}


def _absent(path: Path, shard_of: Mapping[str, str]) -> dict[str, list[str]]:
    """The parts of which tensors are missing, by file. Raises ModelError with a clause."""
    try:
        names = shard_of or (tensor_ranges(path / WEIGHTS) if is_partial(path / WEIGHTS) else {})
        lacking = missing(path, {part_of(name) for name in text_names(names).values()})
    except ModelError as error:
        raise ModelError(f"cannot be read ({error})") from error
    return {file: sorted(set(map(part_of, lacking[file]))) for file in sorted(lacking)}


def _layers(config: bytes, names: Collection[str]) -> tuple[int | None, bool]:
    """How many layers a model has, by its config.json, and whether its embedding is its output
    head."""
    try:
        raw = parse_json(config)
    except Unreadable:
        return None, False
    raw = text_config(raw) if isinstance(raw, dict) else {}
    count = raw.get(count_field(str(raw.get("model_type"))))
    tied = raw.get("tie_word_embeddings")
    if type(tied) is not bool:
        tied = not any(name.endswith(OUTPUT_HEADS) for name in names)
    return count if type(count) is int and count > 0 else None, tied


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
