"""What a host and the launcher say to each other while weights move."""

from __future__ import annotations

import os

import pytest

from pipespec.cluster.weights import host
from pipespec.cluster.weights.host import lines_of


def test_lines_end_with_their_pipe_or_once_the_other_side_gives_no_sign_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "SILENCE_S", 0.01)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as stream, os.fdopen(writer, "wb", buffering=0) as sink:
        sink.write(b"\none\n\na long ")
        lines = lines_of(stream)
        assert next(lines) == b"one"
        sink.write(b"line\n")
        assert [*lines] == [b"a long line"]  # silence
        sink.write(b"x\n")
        sink.close()
        assert [*lines_of(stream)] == [b"x"]
