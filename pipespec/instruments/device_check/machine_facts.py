"""What the check runs on."""

from __future__ import annotations

import platform
from typing import Any

import torch

from pipespec.instruments.diagnostics.machine_check import cuda_devices
from pipespec.system.versions import package_version

PACKAGES = ("pipespec", "torch", "triton", "flashinfer-python", "transformers", "torchao")


def describe(device: torch.device) -> dict[str, Any]:
    """Versions and devices."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: package_version(name) or "not installed" for name in PACKAGES},
        "cuda": torch.version.cuda or "not in this torch",
        "devices": list(cuda_devices()) if device.type == "cuda" else [],
    }
    for each in found["devices"]:
        properties = torch.cuda.get_device_properties(each["name"])
        each["capability"] = f"{properties.major}.{properties.minor}"
        each["multiprocessors"] = properties.multi_processor_count
    return found
