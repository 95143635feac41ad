"""Who holds which rank when members are lost, and where the ranks then meet."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from pipespec.cluster import deployment
from pipespec.cluster.rank_assignment import RankAssignment
from pipespec.config.hosts import Box
from pipespec.errors import ConfigError
from pipespec.planning.partition import remaining
from pipespec.system.interfaces import source_address


def own_address(boxes: Sequence[Box]) -> str | None:
    """This machine's address towards the boxes; None: it is all the cluster."""
    far = next((box.address for box in boxes if not box.local), None)
    if far is None:
        return None
    try:
        return source_address(far, socket.AF_INET)
    except OSError as error:
        raise ConfigError(
            f"This machine has no route to {far} ({error.strerror}); correct the address."
        ) from error


def address_of(plan: deployment.Plan, member: str, own: str | None) -> str:
    """The address of a member's box, `own` being this machine's."""
    box = next(box for box in plan.boxes if member in box.members)
    return own if own is not None and box.local else box.address


def replanner(plan: deployment.Plan, own: str | None) -> Callable[[set[str]], RankAssignment]:
    """What makes an assignment without the members that are lost."""

    def replan(lost: set[str]) -> RankAssignment:
        found = remaining(plan.placement, lost)
        if plan.config.cluster.groups is not None and len(found.layers) != len(plan.layers):
            raise ConfigError("fewer stages do not fit cluster.groups; set spares aside.")
        head = found.members_by_rank[0]
        return RankAssignment(found.members_by_rank, found.layers, address_of(plan, head, own))

    return replan
