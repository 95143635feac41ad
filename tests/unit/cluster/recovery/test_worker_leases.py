import pytest

from pipespec.cluster.recovery.cluster_state import ALONE_S, LOOK_S, SILENT_S, WorkerLeases


def lost_after(signs: list[dict[str, int]], beats: list[dict[str, bytes]]) -> float | None:
    """Seconds until worker a is lost, which has a lease at the beginning and then these signs, over
    and over."""
    leases = WorkerLeases(["a"])
    leases.update({"a": b"7 1"}, signs[0], 0.0)
    for look in range(1, round(2 * ALONE_S / LOOK_S)):
        at = look * LOOK_S
        if leases.update(beats[look % len(beats)], signs[look % len(signs)], at):
            assert leases.alive == set()
            assert leases.lost_at == {"a": at}
            assert leases.silent_s("a", at + 3) == 3
            return at
    assert leases.alive == {"a"}
    return None


@pytest.mark.parametrize(
    ("signs", "beats", "after_s"),
    [
        # Its agent sees the process run, though its thread is late, or Redis lost the lease.
        ([{"a": 1}, {"a": 2}], [{"a": b"7 1"}], None),
        ([{"a": 1}, {"a": 2}], [{}], None),
        # The agent is late, but the lease is renewed.
        ([{"a": 1}], [{"a": b"7 1"}, {"a": b"7 2"}], None),
        # Neither: Redis still holds the lease, as its clock was set back, or no longer.
        ([{"a": 1}], [{"a": b"7 1"}], SILENT_S),
        ([{"a": 1}], [{}], SILENT_S),
        # It has no agent.
        ([{}], [{"a": b"7 1"}], ALONE_S),
    ],
)
def test_a_worker_is_lost_once_neither_it_nor_its_host_gives_a_sign(signs, beats, after_s):
    assert lost_after(signs, beats) == after_s


def test_a_pause_of_the_launcher_is_no_silence_of_workers():
    leases = WorkerLeases(["a", "b"])
    leases.update({"a": b"7 1"}, {"a": 1, "b": 1}, 0.0)
    assert leases.alive == {"a"}, "b has not reached Redis yet"
    assert leases.update({"a": b"7 1"}, {"a": 1, "b": 2}, 10 * SILENT_S) == []
    assert leases.alive == {"a"}


def test_a_lost_worker_is_back_with_its_next_sign():
    leases = WorkerLeases(["a"])
    leases.update({"a": b"7 1"}, {}, 0.0)
    at = 0.0
    while not leases.update({}, {}, at := at + LOOK_S):
        pass
    assert leases.update({"a": b"9 1"}, {}, at + LOOK_S) == []
    assert leases.alive == {"a"} and leases.lost_at == {}
