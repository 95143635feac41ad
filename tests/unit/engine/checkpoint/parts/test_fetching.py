"""What sources are asked for, and what may come from them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from pipespec.engine.checkpoint.parts import parts_file
from pipespec.engine.checkpoint.parts.fetching import WrongBytes, fetch
from pipespec.engine.checkpoint.parts.parts_file import PartsFile, Range
from pipespec.engine.checkpoint.parts.range_source import Sink, Unavailable
from pipespec.errors import ModelError

NAME = "m.safetensors"
DATA = bytes(range(256))


class Beta:
    """A host that sends what it has, and fails at a byte."""

    name = "beta"

    def __init__(self, fails_at: int = len(DATA), error: type[ModelError] = Unavailable) -> None:
        self._fails_at, self._error = fails_at, error
        self.asked: list[Range] = []
        self.stopped = threading.Event()

    def read(self, file: str, part: Range, size: int, sink: Sink) -> None:
        assert (file, size) == (NAME, len(DATA))
        self.asked.append(part)
        for at in range(*part, 7):
            if at >= self._fails_at:
                raise self._error("it broke")
            sink(DATA[at : min(at + 7, part[1])])


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PartsFile:
    monkeypatch.setattr(parts_file, "BLOCK_BYTES", 16)
    return PartsFile.create(tmp_path / NAME, len(DATA))


def get(own: PartsFile, source: Any, *blocks: int, **hashes: bytes) -> dict[Any, ModelError]:
    wanted = {each: hashes.get(f"of_{each}") for each in blocks}
    return fetch([(source, {own: wanted})])


def test_neighbours_are_asked_for_together_and_nothing_else_is_written(own: PartsFile) -> None:
    beta = Beta()
    assert get(own, beta, 1, 2, 5) == {}
    assert sorted(beta.asked) == [(16, 48), (80, 96)]
    assert own.path.read_bytes() == (bytes(16) + DATA[16:48] + bytes(32) + DATA[80:96] + bytes(160))
    assert PartsFile(own.path).absent() == [0, 3, 4, *range(6, 16)]


def test_what_came_before_a_source_was_given_up_is_kept(own: PartsFile) -> None:
    (error,) = get(own, Beta(fails_at=40), 0, 1, 2, 3).values()
    assert str(error) == "it broke"
    assert PartsFile(own.path).absent() == list(range(2, 16))


def test_bytes_of_another_hash_are_dropped_and_their_source_named(own: PartsFile) -> None:
    (error,) = get(own, Beta(), 0, 1, of_1=bytes(32)).values()
    assert isinstance(error, WrongBytes)
    assert str(error) == f"beta sends wrong bytes of {NAME}"
    assert PartsFile(own.path).absent() == list(range(1, 16))


def test_a_source_that_refuses_ends_the_start(own: PartsFile) -> None:
    with pytest.raises(ModelError, match="it broke"):
        get(own, Beta(fails_at=0, error=ModelError), 0, 1)
