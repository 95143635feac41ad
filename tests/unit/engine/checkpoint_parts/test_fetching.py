"""What sources are asked for, and what may come from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipespec.engine.checkpoint_parts import parts_file
from pipespec.engine.checkpoint_parts.fetching import fetch
from pipespec.engine.checkpoint_parts.parts_file import PartsFile, Range, ranges_of
from pipespec.errors import ModelError

NAME = "m.safetensors"
TENSORS = ("a", "b", "c")


class Beta:
    """A host that sends what it has, and `more` bytes after it."""

    name = "beta"

    def __init__(self, file: Path, more: int = 0) -> None:
        self._data, self._more = file.read_bytes(), more
        self.asked: list[Range] = []

    def read(self, file: str, part: Range) -> Iterator[bytes]:
        assert file == NAME
        self.asked.append(part)
        stop = part[1] + self._more
        for at in range(part[0], stop, 7):
            yield self._data[at : min(at + 7, stop)]

    def stop(self) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Path:
    path = tmp_path / NAME
    save_file({name: torch.full((4,), 1.0 + at) for at, name in enumerate(TENSORS)}, path)
    return path


@pytest.fixture
def own(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PartsFile:
    """The same file without tensors, each of which will be two pieces."""
    monkeypatch.setattr(parts_file, "PIECE_BYTES", 8)
    folder = tmp_path / "own"
    folder.mkdir()
    begin = min(start for start, _ in ranges_of(served).values())
    return PartsFile.create(folder / NAME, served.stat().st_size, served.read_bytes()[:begin])


def get(own: PartsFile, source: Beta, *names: str) -> int:
    return fetch({NAME: own}, [(source, {NAME: own.pieces(own.ranges[each] for each in names)})])


def test_neighbours_that_are_absent_are_asked_for_together(served: Path, own: PartsFile) -> None:
    beta = Beta(served)
    assert get(own, beta, "a", "c") == 32
    assert sorted(beta.asked) == [own.ranges["a"], own.ranges["c"]]
    assert get(own, beta, *TENSORS) == 16
    assert beta.asked[2:] == [own.ranges["b"]]
    assert own.path.read_bytes() == served.read_bytes()
    again = PartsFile(own.path)
    assert again.hashes == own.hashes == {each: own.hash(each) for each in own.pieces()}


@pytest.mark.parametrize(("more", "what"), [(1, "more"), (16, "more"), (-1, "fewer")])
def test_a_source_that_sends_another_number_of_bytes_changes_no_neighbour(
    more: int, what: str, served: Path, own: PartsFile
) -> None:
    get(own, Beta(served), "c")
    here = dict(own.hashes)
    start, stop = own.ranges["c"]
    before = own.path.read_bytes()[start:stop]
    wrong = served.with_name("wrong")
    wrong.write_bytes(served.read_bytes()[:start] + b"wrong" * 20)
    with pytest.raises(
        ModelError, match=f"^beta sends {what} than the 16 bytes of {NAME} that were asked for"
    ):
        get(own, Beta(wrong, more), "b")
    assert own.path.read_bytes()[start:stop] == before
    assert PartsFile(own.path).hashes == here
    get(own, Beta(served), "b")
    assert PartsFile(own.path).absent() == own.pieces([own.ranges["a"]])
