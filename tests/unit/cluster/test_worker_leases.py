"""Who is alive by leases, who is lost, and whom to kill. Pure."""

from __future__ import annotations

from pipespec.cluster.worker_leases import GRACE_S, KILL_S, WorkerLeases
from pipespec.controller.membership import LEASE_S


def test_a_worker_is_lost_when_its_renewals_stop_changing() -> None:
    leases = WorkerLeases(["a", "b"])
    assert leases.update({"a": b"7 1", "b": b"8 1"}, 100.0) == []
    assert leases.alive == {"a", "b"} and leases.pid("a") == 7
    # Redis still holds the lease of b, as its clock was set back, but it is not renewed.
    assert leases.update({"a": b"7 2", "b": b"8 1"}, 100.0 + LEASE_S) == ["b"]
    assert leases.alive == {"a"} and leases.pid("b") is None
    assert leases.silent_s("b", 105.0) == 105.0 - leases.lost_at["b"]
    assert leases.silent_s("a", 105.0) == 0
    assert leases.update({"a": b"7 3", "b": b"9 1"}, 104.0) == []
    assert leases.lost_at == {} and leases.pid("b") == 9


def test_the_process_that_held_the_lease_is_killed_and_only_later_whatever_came_in_its_place() -> (
    None
):
    leases = WorkerLeases(["a", "b"])
    leases.update({"a": b"7 1"}, 0.0)
    leases.update({}, LEASE_S)
    assert leases.to_kill(LEASE_S + GRACE_S / 2) == {}, "it may be a silence of Redis"
    first = LEASE_S + 2 * GRACE_S
    assert leases.to_kill(first) == {"a": 7}
    leases.note_kill("a", first)
    assert leases.to_kill(first + KILL_S) == {}, "its successor has time to begin"
    assert leases.to_kill(first + KILL_S + 1) == {"a": None}
