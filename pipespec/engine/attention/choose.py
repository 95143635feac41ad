"""Which attention backend a slice uses: the first of some that proves itself.

A backend is imported when it is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a wrong setting is refused without it
    import torch

    from pipespec.engine.attention.plan import Attention
    from pipespec.engine.attention.proof import Layer

AUTO, SDPA, STATIC, TRITON, FLASHINFER = "auto", "sdpa", "static", "triton", "flashinfer"
ATTENTIONS = (AUTO, SDPA, STATIC, TRITON, FLASHINFER)
# What serves in the place of a backend that does not.
NEXT = {FLASHINFER: TRITON, TRITON: STATIC, STATIC: SDPA}
# The package of a backend that is for GPUs, and what of pipespec brings it.
PACKAGES = {TRITON: ("triton", "triton"), FLASHINFER: ("flashinfer", "cuda")}


def choose(
    name: str,
    device: torch.device,
    num_slots: int,
    layers: Sequence[Layer],
    *,
    steady: bool = False,
) -> tuple[str, Attention, list[str]]:
    """The backend of a name for a slice of such layers on a device, or the next that proves itself
    there; its name, and a sentence on each that does not serve.

    `auto` is PyTorch's own, until `pipespec.engine.tuning` has found a faster one;
    `steady` is for that alone.
    """
    refused: list[str] = []
    name = SDPA if name == AUTO else name
    while name != SDPA:
        wrong = missing(name, device.type) or fault(name, device, layers)
        if wrong is None:
            return name, make(name, device, num_slots), refused
        refused.append(f"attention={name} is not used, {NEXT[name]} serves: {wrong}.")
        name = NEXT[name]
    return name, make(name, device, num_slots, steady=steady), refused


def missing(name: str, device_type: str) -> str | None:
    """What a backend lacks on a device, as a clause; None: nothing."""
    if name not in PACKAGES:
        return None
    if device_type != "cuda":
        return f"it is for GPUs, and the device is a {device_type}"
    package, extra = PACKAGES[name]
    if find_spec(package) is None:
        return f"the package {package} is not installed; run pip install 'pipespec[{extra}]'"
    return None


def fault(name: str, device: torch.device, layers: Sequence[Layer]) -> str | None:
    """What is wrong with a backend on a device; None: it has proved itself."""
    from pipespec.engine.attention.proof import NUM_SLOTS
    from pipespec.engine.attention.proof import fault as faulty

    try:
        return faulty(make(name, device, NUM_SLOTS), NUM_SLOTS, layers)
    except Exception as error:  # noqa: BLE001 - a compiler's, a driver's, a kernel's: all the same
        return f"it fails with {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def make(name: str, device: torch.device, num_slots: int, *, steady: bool = False) -> Attention:
    """The backend of a name, for pools of so many slots on a device; `steady`: see `Sdpa`."""
    if name == FLASHINFER:
        from pipespec.engine.attention.flashinfer import FlashInfer

        return FlashInfer(device)
    if name == TRITON:
        from pipespec.engine.attention.tree import TreeKernel

        return TreeKernel(device, num_slots)
    if name == STATIC:
        from pipespec.engine.attention.static import Static

        return Static(device, num_slots)
    from pipespec.engine.attention.sdpa import Sdpa

    assert name == SDPA, name
    return Sdpa(steady=steady)
