"""What the launcher does with a host that has been let in, until it has left."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipespec.cluster.host_link.host_session import HostSession
from pipespec.cluster.join.host_changes import HostChanges
from pipespec.errors import PipespecError

# Seconds between two checks of a host.
LOOK_S = 0.5
# Seconds between two tries to have the others go on without a host that is gone.
RETRY_S = 5.0
# How much longer than the cluster waits for its workers a host may be away.
LONGER_S = 10.0


def look_after_host(
    session: HostSession,
    changes: HostChanges,
    patience_s: float,
    on_log: Callable[[str, str], None],
    *,
    joined: bool = False,
) -> None:
    """Give a host its ranks, and take them from it when it leaves, fails or stays away, until the
    cluster ends. `patience_s`: how long the cluster waits for a lost host. `on_log`: called with
    the host's name and a sentence. `joined`: the cluster has begun with this host."""
    name = session.host.name

    def tell(sentence: str) -> None:
        on_log(name, sentence)
        session.tell(sentence)

    def leaving() -> bool:
        return session.leaving or session.lost_s > patience_s + LONGER_S

    try:
        if joined:
            tell(f"it computes {changes.ranks_of(session.host)}")
        else:
            changes.join(session.host, tell, leaving)
    except PipespecError as error:
        if changes.over():
            return
        on_log(name, f"it does not join: {error}")
        session.dismiss(f"this host does not join: {error}", failed=not session.leaving)
        return
    while True:
        session.changed.wait(LOOK_S)
        session.changed.clear()
        if changes.over():
            return
        if (failure := changes.failure(name)) is not None:
            break
        if session.lost_s > patience_s + LONGER_S:
            failure = f"it was away for {session.lost_s:.0f} s"
            break
        if session.leaving:
            session.leaving = False
            tell("the other hosts take over its layers")
            try:
                changes.leave(name)
            except PipespecError as error:
                if changes.over():
                    return
                refusal = f"it cannot leave yet: {error}"
                on_log(name, refusal)
                session.tell(refusal, stays=True)
                continue
            on_log(name, "it has left")
            session.dismiss("this host has left the cluster", failed=False)
            return
    on_log(name, failure)
    session.dismiss(failure, failed=True)
    problem = None
    while not changes.over():
        try:
            changes.lost(name)
            return
        except PipespecError as error:
            if problem != (problem := str(error)):
                on_log(name, f"the others cannot go on without it yet: {problem}")
        time.sleep(RETRY_S)
