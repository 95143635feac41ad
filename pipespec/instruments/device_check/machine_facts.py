"""What the check runs on."""

from __future__ import annotations

import platform
from typing import Any

import torch

from pipespec.system.versions import package_version

PACKAGES = ("pipespec", "torch", "triton", "flashinfer-python", "transformers", "torchao")
GIB = 2**30


def describe(device: torch.device) -> dict[str, Any]:
    """Versions and devices."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: package_version(name) or "not installed" for name in PACKAGES},
        "cuda": torch.version.cuda or "not in this torch",
        "devices": [],
    }
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            found["devices"].append(
                {
                    "name": f"cuda:{index}",
                    "model": properties.name,
                    "capability": f"{properties.major}.{properties.minor}",
                    "multiprocessors": properties.multi_processor_count,
                    "memory_gib": round(total / GIB, 1),
                    "free_gib": round(free / GIB, 1),
                }
            )
    return found
