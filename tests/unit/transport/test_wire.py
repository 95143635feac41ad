import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipespec.core import MAX_STARTED_BYTES, NUM_COLUMNS, Batch, SequenceStart
from pipespec.errors import RankFailed, StaleEpoch
from pipespec.transport.wire import Wire, token

HIDDEN = 24
MAX_RELEASED = 9
MAX_KEPT = 3
MAX_STATES = 4
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
int64s = st.integers(-(2**63), 2**63 - 1)


def wire(**changes) -> Wire:
    fields = {"epoch": 1, "max_rows": 8, "max_columns": HIDDEN, "dtype": torch.float32}
    return Wire(
        **{
            **fields,
            "max_finished": MAX_RELEASED,
            "max_retained": MAX_KEPT,
            "max_kept": MAX_STATES,
            **changes,
        }
    )


def batch_of(rows: int, dtype: torch.dtype | None = torch.float32, **fields) -> Batch:
    table = np.arange(rows * NUM_COLUMNS, dtype=np.int64).reshape(rows, NUM_COLUMNS)
    hidden = None if dtype is None else torch.randn(rows, HIDDEN).to(dtype)
    return Batch(step=fields.pop("step", 3), rows=table, hidden=hidden, **fields)


def assert_same(got: Batch, sent: Batch) -> None:
    assert (got.step, got.beside, got.stop) == (sent.step, sent.beside, sent.stop)
    assert (got.finished, got.preempted) == (sent.finished, sent.preempted)
    assert got.failed == sent.failed
    assert (got.retained_prefixes, got.started) == (sent.retained_prefixes, sent.started)
    assert got.kept_states == sent.kept_states
    assert got.rows.dtype == np.int64
    assert np.array_equal(got.rows, sent.rows)
    if sent.hidden is None:
        assert got.hidden is None
    else:
        assert got.hidden.dtype == sent.hidden.dtype
        assert torch.equal(got.hidden, sent.hidden)


@given(
    epoch=st.integers(0, 2**63 - 1),
    step=st.integers(0, 2**63 - 1),
    values=st.lists(st.tuples(*[int64s] * NUM_COLUMNS), max_size=8),
    dtype=st.sampled_from([None, *DTYPES]),
    released=st.lists(int64s, max_size=MAX_RELEASED - 4).map(tuple),
    preempted=st.lists(int64s, max_size=4).map(tuple),
    failed=st.lists(int64s, max_size=MAX_RELEASED).map(tuple),
    kept=st.lists(st.tuples(int64s, int64s), max_size=MAX_KEPT).map(tuple),
    states=st.lists(st.tuples(int64s, int64s, int64s), max_size=MAX_STATES).map(tuple),
    opened=st.lists(
        st.builds(SequenceStart, *[int64s] * 4, st.binary(max_size=99), int64s, int64s), max_size=5
    ),
    beside=st.booleans(),
    stop=st.booleans(),
)
def test_a_batch_comes_back_as_it_was_sent(
    epoch, step, values, dtype, released, preempted, failed, kept, states, opened, beside, stop
):
    rows = np.array(values, np.int64).reshape(len(values), NUM_COLUMNS)
    hidden = None if dtype is None else torch.randn(len(values), HIDDEN).to(dtype)
    leaving = tuple(opened), released, preempted, kept, states, failed
    sent = Batch(step, rows, hidden, *leaving, beside, stop)
    link = wire(epoch=epoch, dtype=dtype or torch.float32)
    message = link.pack(sent)
    assert message.dtype == torch.uint8
    assert len(message) <= link.capacity
    # It arrives in a buffer for the longest message, whose tail holds anything.
    buffer = torch.full((link.capacity,), 0xA5, dtype=torch.uint8)
    buffer[: len(message)] = message
    assert_same(link.unpack(buffer), sent)


def test_the_largest_batch_fills_the_capacity():
    link = wire()
    fixed = SequenceStart(1, 2, 3, 4, b"").num_bytes
    opened = (SequenceStart(1, 2, 3, 4, bytes(MAX_STARTED_BYTES - fixed)),)
    kept = ((1, 2),) * MAX_KEPT
    largest = batch_of(
        8,
        finished=tuple(range(MAX_RELEASED)),
        failed=tuple(range(MAX_RELEASED)),
        retained_prefixes=kept,
        kept_states=((1, 2, 3),) * MAX_STATES,
        started=opened,
    )
    assert len(link.pack(largest)) == link.capacity


def test_a_message_is_only_as_long_as_its_rows():
    link = wire(max_columns=8192, max_rows=64)
    one_row = Batch(0, np.zeros((1, NUM_COLUMNS), np.int64), torch.zeros(1, 8192))
    assert len(link.pack(one_row)) < 8192 * 4 + 256
    assert len(link.pack(Batch(0))) < 256


def test_hidden_states_are_aligned_for_the_receiver():
    link = wire()
    for rows in range(1, 9):
        got = link.unpack(link.pack(batch_of(rows)))
        assert got.hidden.data_ptr() % 16 == 0
        assert got.hidden.is_contiguous()
        assert got.hidden.storage_offset() * 4 % 64 == 0


def test_the_message_is_independent_of_the_batch():
    link, sent = wire(), batch_of(2)
    message = link.pack(sent)
    expected = link.unpack(message.clone())
    sent.rows[:] = 0
    sent.hidden.zero_()
    assert_same(link.unpack(message), expected)


def test_hidden_states_that_are_not_contiguous_are_packed_by_value():
    hidden = torch.randn(HIDDEN, 3).t()
    sent = Batch(0, np.zeros((3, NUM_COLUMNS), np.int64), hidden)
    link = wire()
    assert_same(link.unpack(link.pack(sent)), sent)


def test_another_epoch_is_refused_by_name():
    with pytest.raises(StaleEpoch, match="epoch 4 reached a rank of epoch 5"):
        wire(epoch=5).unpack(wire(epoch=4).pack(batch_of(1)))


def test_a_sender_without_the_secret_is_refused():
    ours = wire(token=token("secret", 1))
    assert ours.unpack(wire(token=token("secret", 1)).pack(batch_of(1))).step == 3
    strangers = [(0, 0), token("", 1), token("other", 1), token("secret", 2)]
    for stranger in [*strangers, (token("secret", 1)[0], 0)]:
        with pytest.raises(RankFailed, match="does not hold the cluster's secret"):
            ours.unpack(wire(token=stranger).pack(batch_of(1)))


def test_a_message_that_claims_more_than_it_has_is_a_programming_error():
    with pytest.raises(AssertionError, match="9 rows in a batch of at most 8"):
        wire().unpack(wire(max_rows=9).pack(batch_of(9)))
    for field in range(4, 9):  # numbers of what leaves, of what is kept and of sequence starts
        message = wire().pack(batch_of(2))
        message.view(torch.int64)[field] += 100
        with pytest.raises(AssertionError, match=r"bytes in a message of"):
            wire().unpack(message)
    with pytest.raises(AssertionError, match=r"bytes in a message of"):
        wire().unpack(wire().pack(batch_of(2))[:-8])


@pytest.mark.parametrize(
    "batch",
    [
        batch_of(9),
        batch_of(1, finished=tuple(range(MAX_RELEASED)), preempted=(1,)),
        batch_of(1, retained_prefixes=((1, 2),) * (MAX_KEPT + 1)),
        batch_of(1, kept_states=((1, 2, 3),) * (MAX_STATES + 1)),
        batch_of(1, started=(SequenceStart(1, 2, 3, 4, bytes(MAX_STARTED_BYTES)),)),
        batch_of(1, torch.bfloat16),
        Batch(0, np.zeros((2, NUM_COLUMNS), np.int64), torch.zeros(1, HIDDEN)),
        Batch(0, np.zeros((2, NUM_COLUMNS - 1), np.int64)),
        Batch(0, np.zeros((2, NUM_COLUMNS), np.int32)),
    ],
)
def test_what_the_wire_cannot_carry_is_a_programming_error(batch):
    with pytest.raises(AssertionError):
        wire().pack(batch)
