"""A sealed message opens once, in its turn, at its receiver, as it was sent; nothing else opens."""

from itertools import permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipespec.errors import RankFailed
from pipespec.transport.encryption import KEY_BYTES, SEAL_BYTES, Seal, link_key

SECRET = "of the cluster"
OURS = {"secret": SECRET, "epoch": 3, "meeting": ("aa", "bb"), "sender": 1}
ROOM = 512
REFUSED = r"Message \d+ from rank 1 was altered, repeated, reordered or cut"
messages = st.binary(min_size=1, max_size=ROOM // 8).map(lambda data: data * 8)


def tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def ends(**other) -> tuple[Seal, Seal]:
    """The two ends of a link; the receiver's key differs in `other`."""
    return Seal(link_key(**OURS), 1), Seal(link_key(**{**OURS, **other}), 1)


def received(sealed: torch.Tensor, room: int = ROOM) -> torch.Tensor:
    """The buffer of a receiver, which has room for the longest message, behind which anything
    lies."""
    buffer = torch.full((room + SEAL_BYTES,), 0xA5, dtype=torch.uint8)
    buffer[: len(sealed)] = sealed
    return buffer


@given(st.lists(messages, max_size=5))
def test_messages_open_in_the_order_in_which_they_were_sealed(sent):
    sender, receiver = ends()
    for data in sent:
        opened = receiver.open(received(sender.seal(tensor(data))))
        assert bytes(opened.numpy()) == data


@given(messages, st.data())
def test_a_message_of_which_any_byte_was_altered_is_refused(data, draw):
    sender, receiver = ends()
    sealed = sender.seal(tensor(data))
    at = draw.draw(st.integers(0, len(sealed) - 1))
    altered = sealed.clone()
    altered[at] ^= draw.draw(st.integers(1, 255))
    with pytest.raises(RankFailed, match=REFUSED):
        receiver.open(received(altered))
    # The message itself would still have opened.
    assert bytes(receiver.open(received(sealed)).numpy()) == data


@given(messages, st.data())
def test_a_message_that_was_cut_is_refused(data, draw):
    """Whatever lies in the buffer behind the cut, such as the message before."""
    sender, receiver = ends()
    buffer = received(sender.seal(tensor(data)))
    receiver.open(buffer)
    sealed = sender.seal(tensor(data))
    cut = draw.draw(st.integers(0, len(sealed) - 1))
    buffer[:cut] = sealed[:cut]
    with pytest.raises(RankFailed, match=REFUSED):
        receiver.open(buffer)


@given(st.lists(messages, min_size=1, max_size=4), st.data())
def test_a_message_that_is_repeated_is_refused(sent, draw):
    sender, receiver = ends()
    sealed = [sender.seal(tensor(data)) for data in sent]
    for each in sealed:
        receiver.open(received(each))
    with pytest.raises(RankFailed, match=REFUSED):
        receiver.open(received(draw.draw(st.sampled_from(sealed))))


def test_messages_in_any_other_order_are_refused():
    sender, _ = ends()
    sealed = [sender.seal(tensor(bytes(8))) for _ in range(3)]
    for order in permutations(range(3)):
        if order == (0, 1, 2):
            continue
        _, receiver = ends()
        in_turn = next(turn for turn, index in enumerate(order) if turn != index)
        for index in order[:in_turn]:
            receiver.open(received(sealed[index]))
        with pytest.raises(RankFailed, match=REFUSED):
            receiver.open(received(sealed[order[in_turn]]))


def test_no_two_links_share_a_key():
    fields = {
        "epoch": (1, 2, 12),
        "meeting": (("aa", "bb"), ("bb", "aa"), ("aab", "b")),
        "sender": (1, 2, 12),
    }
    links = [dict(zip(fields, values, strict=True)) for values in product(*fields.values())]
    keys = {link_key(SECRET, **link) for link in links}
    assert len(keys) == len(links)
    assert all(len(key) == KEY_BYTES for key in keys)


def test_equal_messages_look_different_and_show_nothing_of_themselves():
    sender, _ = ends()
    data = b"token ids" * 8
    first, second = sender.seal(tensor(data)), sender.seal(tensor(data))
    assert b"token" not in bytes(first.numpy())
    assert not np.array_equal(first.numpy()[8:], second.numpy()[8:])


def test_what_claims_to_be_longer_than_the_buffer_is_refused():
    _, receiver = ends()
    for size in (0, 7, ROOM + 8, 2**63, 2**64 - 8):
        buffer = received(torch.zeros(64, dtype=torch.uint8))
        buffer[:8] = tensor(size.to_bytes(8, "little"))
        with pytest.raises(RankFailed, match=REFUSED):
            receiver.open(buffer)
