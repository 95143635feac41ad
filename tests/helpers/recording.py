"""In the place of CUDA's graphs: `make_fx` notes every operation of one run, and replays them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

# It changes what is global while it notes.
_one_at_a_time = threading.Lock()
_here = threading.local()


def stand_in(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """As `record_cuda`: what is computed lies where it lay."""
    with _one_at_a_time:
        _here.notes = True
        try:
            graph = make_fx(lambda: run())()
        finally:
            _here.notes = False
    result = graph()
    return lambda: result.copy_(graph()), result


def notes() -> bool:
    """Whether this thread notes what it is to do, which no other will be asked about."""
    return getattr(_here, "notes", False)
