"""What a host has: versions, CUDA devices, and hashes of its model files.

Nothing is downloaded and no weight is read, so an answer takes a fraction of a second; torch is
imported only where a CUDA device is asked for.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipespec.engine.checkpoint.fingerprint import Fingerprint, fingerprint
from pipespec.system.devices import num_cuda
from pipespec.system.versions import SHORT, code_hash, package_version

PACKAGES = ("torch", "transformers")
# Packages that quantise, and that read quantised checkpoints.
OPTIONAL = ("torchao", "bitsandbytes", "gguf")
DRIVER_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a host has. `versions` has python, pipespec, code (of pipespec: a hash), torch,
    transformers, OPTIONAL and driver (NVIDIA's); None stands for what is not there. `cuda` names
    the CUDA devices that torch can use, None if the request did not ask for them; `cuda_problem`
    says in a clause why there are none. `models` maps "target" and "draft" to the checkpoints at
    their paths."""

    versions: dict[str, str | None]
    cuda: list[str] | None
    cuda_problem: str | None
    models: dict[str, Fingerprint]


def take_inventory(models: Mapping[str, str], devices: Iterable[str]) -> Inventory:
    """Take the inventory of this machine. `models` maps a part, as "target", to a folder or hub id;
    `devices` are those that the hosts file names."""
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
    return Inventory(versions, cuda, problem, found)


def nvidia_driver() -> str | None:
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
