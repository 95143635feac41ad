"""What sources are asked for, and what may come from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipespec.engine.checkpoint_parts.fetching import fetch
from pipespec.engine.checkpoint_parts.parts_file import PartsFile
from pipespec.engine.checkpoint_parts.ranges import Range
from pipespec.engine.checkpoint_parts.repository import ranges_of
from pipespec.errors import ModelError

NAME = "m.safetensors"
TENSORS = ("a", "b", "c")


class Beta:
    """A host that sends what it has, and `more` bytes after it."""

    name, max_gap = "beta", 0

    def __init__(self, file: Path, more: int = 0) -> None:
        self._data, self._more = file.read_bytes(), more
        self.asked: list[Range] = []

    def read(self, file: str, part: Range) -> Iterator[bytes]:
        assert file == NAME
        self.asked.append(part)
        yield self._data[part[0] : part[1] + self._more]

    def stop(self) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Path:
    path = tmp_path / NAME
    save_file({name: torch.full((4,), 1.0 + at) for at, name in enumerate(TENSORS)}, path)
    return path


@pytest.fixture
def own(served: Path, tmp_path: Path) -> Path:
    """The same file without tensors."""
    folder = tmp_path / "own"
    folder.mkdir()
    ranges = ranges_of(served)
    begin = min(start for start, _ in ranges.values())
    PartsFile.create(folder / NAME, served.stat().st_size, served.read_bytes()[:begin])
    return folder


def test_another_host_is_asked_for_nothing_between_the_tensors(served: Path, own: Path) -> None:
    ranges, beta = ranges_of(served), Beta(served)
    fetch(own, [(beta, {NAME: ["a", "c"]})])
    assert sorted(beta.asked) == [ranges["a"], ranges["c"]]
    # The hub has every byte, and one request is better than two.
    beta.max_gap = 64
    fetch(own, [(beta, {NAME: ["a", "b", "c"]})])
    assert beta.asked[2:] == [ranges["b"]]


@pytest.mark.parametrize(("more", "what"), [(1, "more"), (16, "more"), (-1, "fewer")])
def test_a_source_that_sends_another_number_of_bytes_changes_no_neighbour(
    more: int, what: str, served: Path, own: Path
) -> None:
    fetch(own, [(Beta(served), {NAME: ["c"]})])
    start, stop = ranges_of(served)["c"]
    before = (own / NAME).read_bytes()[start:stop]
    wrong = served.with_name("wrong")
    wrong.write_bytes(served.read_bytes()[:start] + b"wrong" * 20)
    with pytest.raises(
        ModelError, match=f"^beta sends {what} than the 16 bytes of {NAME} that were asked for"
    ):
        fetch(own, [(Beta(wrong, more), {NAME: ["b"]})])
    assert (own / NAME).read_bytes()[start:stop] == before
    assert PartsFile(own / NAME).hashes.keys() == {"c"}
    fetch(own, [(Beta(served), {NAME: ["b"]})])
    assert PartsFile(own / NAME).hashes.keys() == {"b", "c"}
