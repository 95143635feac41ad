"""The locks of all folders into which the hosts of one start fetch.

Two starts may have folders in common, under different names of hosts and in any order: a machine
may have several names, and hosts may share a file system. So a start that holds some locks waits
for no other one: it gives them back, and tries again later.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from pipespec.cluster.weight_peer import WeightPeer

# Seconds between two tries, drawn anew each time, so that two starts do not meet for good.
PAUSE_S = (0.2, 1.0)


def lock_folders(
    asked: Sequence[tuple[WeightPeer, Mapping[str, object]]],
    on_warning: Callable[[str], None],
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Be the only start that fetches into the folders of these models, by host. A sentence says
    what is waited for. Raises ModelError, HostFailed.

    Args:
        pause: called with the seconds between two tries.
    """
    run = secrets.token_hex(8)
    warned = False
    while (taken := _try_all(asked, run)) is not None:
        for peer, _ in asked:
            peer.call("unlock")
        if not warned:
            on_warning(f"{taken}; waiting until it has ended.")
            warned = True
        pause(random.uniform(*PAUSE_S))


def _try_all(asked: Sequence[tuple[WeightPeer, Mapping[str, object]]], run: str) -> str | None:
    """Which folder is taken, and by what; None: all are this start's. One after another, as hosts
    that share a folder find out by that who fetches into it."""
    for peer, needs in asked:
        for kind in needs:
            if (taken := peer.lock(kind, run)) is not None:
                return f"{peer.name}: {taken}"
    return None
