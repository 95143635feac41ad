import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.system.cores import CoreShares, share_cores


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
