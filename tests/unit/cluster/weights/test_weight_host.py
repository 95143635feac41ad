"""What a host and the launcher say to each other while weights move."""

from __future__ import annotations

import io

import pytest

from pipespec.cluster.weights.host import lines_of


class Slow(io.BytesIO):
    """A pipe that has a few bytes at a time."""

    def read1(self, size: int | None = -1, /) -> bytes:
        return super().read1(7)


@pytest.mark.parametrize("text", [b"", b"\n\n", b"one\ntwo\n", b"a line of many parts\n\nx\n"])
def test_lines_come_as_they_are_and_every_part_is_a_sign_of_life(text: bytes) -> None:
    heard: list[None] = []
    assert [*lines_of(Slow(text), lambda: heard.append(None))] == text.split(b"\n")[:-1]
    assert len(heard) == -(-len(text) // 7)
