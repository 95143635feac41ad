"""A stand-in for CUDA graphs: `make_fx` records every operation of one run, and replays them."""

import threading
from collections.abc import Callable

from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

# `make_fx` changes global state while it records.
_one_at_a_time = threading.Lock()
_here = threading.local()


def stand_in(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """Like `capture_cuda_graph`: a replay writes its result to the same memory."""
    with _one_at_a_time:
        _here.notes = True
        try:
            graph = make_fx(lambda: run())()
        finally:
            _here.notes = False
    result = graph()
    return lambda: result.copy_(graph()), result


def notes() -> bool:
    """Whether this thread is recording."""
    return getattr(_here, "notes", False)
