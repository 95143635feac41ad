import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.system.cores import (
    LOOK_S,
    MOST_REST_S,
    REST_S,
    CoreShares,
    Spinner,
    share_cores,
    waited_s,
)


@given(cores=st.integers(1, 256), stages=st.integers(0, 64), has_head=st.booleans())
def test_threads_never_exceed_the_cores_where_there_is_one_for_each_rank(cores, stages, has_head):
    shares = share_cores(cores, stages, has_head=has_head)
    assert shares.head >= 1 and shares.stage >= 1
    if stages:
        assert stages * shares.stage <= max(cores, stages)
        if has_head and cores > 2 * stages:
            assert stages * shares.stage + shares.head <= cores


@pytest.mark.parametrize(
    ("cores", "stages", "has_head", "expected"),
    [
        (2, 1, True, CoreShares(1, 2)),
        (2, 2, True, CoreShares(1, 1)),
        (2, 4, True, CoreShares(1, 1)),
        (3, 2, True, CoreShares(1, 1)),
        (4, 1, True, CoreShares(1, 3)),
        (16, 1, True, CoreShares(3, 13)),
        (16, 4, True, CoreShares(1, 3)),
        (8, 0, True, CoreShares(8, 8)),
        (8, 2, False, CoreShares(1, 4)),
    ],
)
def test_a_head_has_cores_of_its_own_where_stages_have_two_each(cores, stages, has_head, expected):
    assert share_cores(cores, stages, has_head=has_head) == expected


@pytest.fixture(scope="module", autouse=True)
def _undisturbed():
    """A thread that looks again does not wait for what else the machine computes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", lambda _: None)
        yield


class Thread:
    """The clocks of a thread that waits for a core for a share of the time; each look at the time
    takes 1 ms."""

    def __init__(self, share: float) -> None:
        self.share, self.now, self.waited = share, 0.0, 0.0

    def clock(self) -> float:
        self.now += 1e-3
        self.waited += 1e-3 * self.share
        return self.now

    def spinner(self, **how: bool) -> Spinner:
        return Spinner(**how, clock=self.clock, waited=lambda: self.waited)


def spins(spinner: Spinner) -> bool:
    """Whether it looks again and again for what never comes."""
    looks = []
    spinner.until(lambda: looks.append(1), LOOK_S / 2)
    return len(looks) > 1


def test_a_thread_that_has_a_core_to_itself_spins_and_finds_what_comes():
    thread = Thread(0.01)
    spinner = thread.spinner()
    assert all(spins(spinner) for _ in range(20))
    assert spinner.until(lambda: True)


@pytest.mark.parametrize(("share", "always", "rests"), [(0.05, False, True), (0.5, True, False)])
def test_a_thread_that_shares_its_core_sleeps_unless_it_is_told_to_spin(share, always, rests):
    thread = Thread(share)
    spinner = thread.spinner(always=always)
    assert [spins(spinner) for _ in range(6)][-1] is not rests


def test_a_thread_looks_again_whether_it_has_a_core_ever_more_seldom():
    thread = Thread(0.5)
    spinner = thread.spinner()
    pauses, rested_since = [], 0.0
    while len(pauses) < 8:
        if not spins(spinner):
            thread.now += 1.0
            rested_since = rested_since or thread.now
        elif rested_since:
            pauses.append(thread.now - rested_since)
            rested_since = 0.0
    assert pauses[0] == pytest.approx(REST_S, abs=2)
    assert pauses[1] == pytest.approx(2 * REST_S, abs=2)
    assert pauses[-1] == pytest.approx(MOST_REST_S, abs=2)
    thread.share = 0.0
    for _ in range(4):  # a last look at the time in which it had none
        spins(spinner)
    thread.now += MOST_REST_S
    assert all(spins(spinner) for _ in range(20))


def test_this_thread_has_waited_for_a_core_for_no_longer_than_it_lives():
    before = waited_s()
    assert 0 <= before <= waited_s() < time.monotonic()
