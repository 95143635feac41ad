"""Selects the attention backend of a slice: the first one that passes its self-test."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pipespec.engine.precision import name_of

if TYPE_CHECKING:  # a wrong setting is refused without it
    import torch

    from pipespec.engine.attention.attention_plan import AttentionBackend
    from pipespec.engine.attention.self_test import AttentionLayer

AUTO, SDPA, STATIC, TRITON, FLASHINFER = "auto", "sdpa", "static", "triton", "flashinfer"
ATTENTIONS = (AUTO, SDPA, STATIC, TRITON, FLASHINFER)
# The backend that is used instead of one that is not available.
FALLBACK = {FLASHINFER: TRITON, TRITON: STATIC, STATIC: SDPA}
# Backends for GPUs: the package that they need, and the extra of pipespec that installs it.
PACKAGES = {TRITON: ("triton", "triton"), FLASHINFER: ("flashinfer", "cuda")}
# The types that a backend computes in, as settings name them; others take any.
TYPES = {FLASHINFER: ("bfloat16", "float16")}


def select_backend(
    name: str,
    device: torch.device,
    num_slots: int,
    layers: Sequence[AttentionLayer],
    batch_invariant: bool = False,
) -> tuple[str, AttentionBackend, list[str]]:
    """The named backend for a slice with these layers, or the first fallback that passes its
    self-test on the device: its name, the backend, and a sentence for each that is not used. `auto`
    is `sdpa`, until `pipespec.engine.slice.speedups` has found a faster one."""
    refused: list[str] = []
    name = SDPA if name == AUTO else name
    while name != SDPA:
        dtype = name_of(layers[0].pool.keys.dtype) if layers else None
        wrong = missing_requirement(name, device.type, dtype) or backend_error(name, device, layers)
        if wrong is None:
            return name, make_backend(name, device, num_slots), refused
        refused.append(f"attention={name} is not used, {FALLBACK[name]} is used instead: {wrong}.")
        name = FALLBACK[name]
    return name, make_backend(name, device, num_slots, batch_invariant=batch_invariant), refused


def missing_requirement(name: str, device_type: str, dtype: str | None = None) -> str | None:
    """Why a backend is not available on a device, as a clause; None: it is available. `dtype`: of
    the slice, as settings name it, if it is known."""
    if name not in PACKAGES:
        return None
    if device_type != "cuda":
        return f"it needs a GPU, and the device is a {device_type}"
    package, extra = PACKAGES[name]
    if find_spec(package) is None:
        return f"the package {package} is not installed; run pip install 'pipespec[{extra}]'"
    if dtype is not None and dtype not in TYPES.get(name, (dtype,)):
        return f"it computes in {' and '.join(TYPES[name])}, and the model is in {dtype}"
    return None


def backend_error(name: str, device: torch.device, layers: Sequence[AttentionLayer]) -> str | None:
    """Why a backend fails its self-test on a device, as a clause; None: it passes."""
    from pipespec.engine.attention.self_test import NUM_SLOTS, self_test_error

    try:
        if name == TRITON and device.type == "cuda":
            import torch

            from pipespec.engine.attention.triton_backend import capability_error

            wrong = capability_error(torch.cuda.get_device_capability(device))
            if wrong is not None:
                return wrong
        return self_test_error(make_backend(name, device, NUM_SLOTS), NUM_SLOTS, layers)
    except Exception as error:  # noqa: BLE001 - compilers, drivers and kernels raise anything
        return f"it fails with {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def make_backend(
    name: str, device: torch.device, num_slots: int, *, batch_invariant: bool = False
) -> AttentionBackend:
    if name == FLASHINFER:
        from pipespec.engine.attention.flashinfer import FlashInferBackend

        return FlashInferBackend(device)
    if name == TRITON:
        from pipespec.engine.attention.triton_backend import TritonBackend

        return TritonBackend(device, num_slots)
    if name == STATIC:
        from pipespec.engine.attention.device_plan import TorchBackend

        return TorchBackend(device, num_slots)
    from pipespec.engine.attention.sdpa import SdpaBackend

    assert name == SDPA, name
    return SdpaBackend(batch_invariant=batch_invariant)
