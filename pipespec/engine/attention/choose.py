"""Which attention backend a slice uses. A backend is imported when it is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a wrong setting is refused without it
    import torch

    from pipespec.engine.attention.plan import Attention

AUTO, SDPA, STATIC = "auto", "sdpa", "static"
ATTENTIONS = (AUTO, SDPA, STATIC)


def make(name: str, device: torch.device, num_slots: int) -> Attention:
    """The backend of a name, for one slice with so many slots on a device."""
    if name == STATIC:
        from pipespec.engine.attention.static import Static

        return Static(device, num_slots)
    from pipespec.engine.attention.sdpa import Sdpa

    assert name in (AUTO, SDPA), name
    return Sdpa()
