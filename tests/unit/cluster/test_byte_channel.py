"""Calls and streams between two processes over pipes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pipespec.cluster import byte_channel
from pipespec.cluster.byte_channel import (
    _HEAD,
    CALL,
    CHUNK_BYTES,
    MOST_BYTES,
    ByteChannel,
    ChannelClosed,
)
from pipespec.errors import ModelError


def pair(here: dict[str, Any], there: dict[str, Any]) -> tuple[ByteChannel, ByteChannel, list[Any]]:
    """Two ends, and the files to close."""
    (read_a, write_a), (read_b, write_b) = os.pipe(), os.pipe()
    files = [os.fdopen(fd, mode) for fd, mode in ((read_a, "rb"), (write_b, "wb"))]
    others = [os.fdopen(fd, mode) for fd, mode in ((read_b, "rb"), (write_a, "wb"))]
    return ByteChannel("there", *files, here), ByteChannel("here", *others, there), files + others


def numbers(count: int) -> Iterator[bytes]:
    for number in range(count):
        yield bytes([number % 256]) * 1000


def refuse() -> None:
    raise ModelError("there is no such thing")


def test_calls_are_answered_in_both_directions():
    a, b, _ = pair({"double": lambda n: 2 * n}, {"join": lambda texts: "+".join(texts)})
    assert a.call("join", texts=["x", "y"]) == "x+y"
    assert b.call("double", n=21) == 42


def test_a_side_that_gives_no_sign_of_life_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a process was stopped: its end of the pipes stays open."""
    monkeypatch.setattr(byte_channel, "SILENCE_S", 0.2)
    monkeypatch.setattr(byte_channel, "LOOK_S", 0.01)
    (read_a, write_a), (read_b, write_b) = os.pipe(), os.pipe()
    channel = ByteChannel("beta", os.fdopen(read_a, "rb"), os.fdopen(write_b, "wb"), {})
    with pytest.raises(ChannelClosed, match=r"beta gave no sign of life for 0\.2 s"):
        channel.call("fetch")
    channel.join()
    for end in (write_a, read_b):
        os.close(end)


def test_a_side_that_takes_its_time_shows_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_channel, "SILENCE_S", 1.0)
    monkeypatch.setattr(byte_channel, "ALIVE_S", 0.02)
    released = threading.Event()

    def fetch() -> str:
        assert released.wait(60)
        return "done"

    a, b, _ = pair({}, {"fetch": fetch})
    threading.Timer(1.5, released.set).start()
    assert a.call("fetch") == "done"
    assert not b.closed.is_set()


def test_a_stream_longer_than_the_pipe_comes_whole():
    a, _, _ = pair({}, {"numbers": numbers, "one": lambda: iter([b"z" * (3 * CHUNK_BYTES + 1)])})
    assert b"".join(a.stream("numbers", count=2000)) == b"".join(numbers(2000))
    assert b"".join(a.stream("one")) == b"z" * (3 * CHUNK_BYTES + 1)


def test_many_streams_at_once_do_not_mix():
    a, b, _ = pair({"numbers": numbers}, {"numbers": numbers})
    found: dict[int, bytes] = {}

    def read(index: int) -> None:
        side = (a, b)[index % 2]
        found[index] = b"".join(side.stream("numbers", count=100 + index))

    threads = [threading.Thread(target=read, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {index: b"".join(numbers(100 + index)) for index in range(16)}


def test_a_refusal_comes_with_its_sentence():
    def broken() -> Iterator[bytes]:
        yield b"some"
        raise ModelError("it ended early")

    a, _, _ = pair({}, {"refuse": refuse, "broken": broken})
    with pytest.raises(ModelError, match="there is no such thing"):
        a.call("refuse")
    with pytest.raises(ModelError, match="it ended early"):
        list(a.stream("broken"))
    with pytest.raises(ModelError, match="KeyError"):
        a.call("unknown")


def test_the_end_of_the_other_side_ends_what_waits_for_it():
    ready = threading.Event()

    def never() -> None:
        ready.wait(30)

    a, b, files = pair({}, {"never": never})
    threading.Timer(0, files[3].close).start()
    with pytest.raises(ChannelClosed, match="there has ended"):
        a.call("never")
    ready.set()
    assert not b.closed.is_set()


def test_a_reader_that_leaves_a_stream_does_not_stop_the_others():
    a, _, _ = pair({}, {"numbers": numbers, "double": lambda n: 2 * n})
    stream = a.stream("numbers", count=5000)
    next(stream)
    stream.close()
    assert a.call("double", n=4) == 8


def test_a_reader_of_a_stream_may_call_the_other_side():
    a, _, _ = pair({}, {"numbers": numbers, "double": lambda n: 2 * n})
    assert [a.call("double", n=len(chunk)) for chunk in a.stream("numbers", count=500)] == [
        2000
    ] * 500


def test_a_stream_that_nobody_reads_is_ended():
    ended = threading.Event()

    def endless() -> Iterator[bytes]:
        try:
            while True:
                yield b"z"
        finally:
            ended.set()

    a, _, _ = pair({}, {"endless": endless})
    stream = a.stream("endless")
    next(stream)
    assert not ended.is_set()
    stream.close()
    assert ended.wait(30)


def test_a_frame_that_is_too_long_is_not_waited_for():
    (read_a, write_a), (_, write_b) = os.pipe(), os.pipe()
    channel = ByteChannel("there", os.fdopen(read_a, "rb"), os.fdopen(write_b, "wb"), {})
    with os.fdopen(write_a, "wb") as writer:
        writer.write(_HEAD.pack(MOST_BYTES + 1, CALL, 1))
        writer.flush()
        assert channel.closed.wait(30)


def test_an_answer_of_the_other_kind_is_one_sentence():
    a, _, _ = pair({}, {"numbers": numbers, "double": lambda n: 2 * n})
    with pytest.raises(ModelError, match="there answers 'numbers' with bytes, not a value"):
        a.call("numbers", count=1)
    with pytest.raises(ModelError, match="there answers 'double' with a value, not bytes"):
        list(a.stream("double", n=1))
