"""Sparse weight files and the records of which of their pieces are here."""

from __future__ import annotations

import hashlib
import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from pipespec.engine.checkpoint_parts import parts_file
from pipespec.engine.checkpoint_parts.parts_file import PartsFile, is_partial, pieces, record_of
from pipespec.errors import ModelError

DATA = save({"a": torch.ones(25, dtype=torch.uint8), "b": torch.ones(10, dtype=torch.uint8)})
BEGIN, SIZE = len(DATA) - 35, len(DATA)
# A tensor of three pieces, and one of one.
A, B = [(BEGIN, BEGIN + 10), (BEGIN + 10, BEGIN + 20), (BEGIN + 20, BEGIN + 25)], (SIZE - 10, SIZE)
HEADER = 0, BEGIN


def put(file: PartsFile, *parts: tuple[int, int]) -> None:
    with file.opened() as descriptor:
        for start, stop in parts:
            os.pwrite(descriptor, DATA[start:stop], start)
    file.commit({each: sha(*each) for each in parts})


def sha(start: int, stop: int) -> str:
    return hashlib.sha256(DATA[start:stop]).hexdigest()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PartsFile:
    monkeypatch.setattr(parts_file, "PIECE_BYTES", 10)
    return PartsFile.create(tmp_path / "m.safetensors", SIZE, DATA[:BEGIN])


def test_a_new_file_has_its_size_and_its_header(file):
    assert file.path.stat().st_size == SIZE
    assert file.path.read_bytes()[:BEGIN] == DATA[:BEGIN]
    assert is_partial(file.path)
    assert file.hashes == {HEADER: sha(*HEADER)}
    assert file.pieces() == [HEADER, *A, B]
    written = record_of(file.path).read_bytes()
    assert PartsFile.create(file.path, SIZE, DATA[:BEGIN]).hashes == file.hashes
    assert record_of(file.path).read_bytes() == written


def test_a_header_that_was_changed_is_written_again_with_what_is_known_beyond_it(file):
    file.path.write_bytes(b"x" + DATA[1:])
    assert PartsFile.create(file.path, SIZE, DATA[: A[1][0] + 1]).hashes.keys() == {HEADER, A[0]}
    assert file.path.read_bytes()[:BEGIN] == DATA[:BEGIN]


@pytest.mark.parametrize(
    ("ranges", "found"),
    [
        ([(0, 30)], [(0, 10), (10, 20), (20, 30)]),
        ([(10, 20)], [(10, 20)]),
        ([(9, 11), (12, 13)], [(0, 10), (10, 20)]),
        ([(10, 10), (30, 30)], []),
        ([], []),
        (None, [(0, 10), (10, 20), (20, 30)]),
    ],
)
def test_pieces_are_those_that_hold_bytes_of_the_ranges(ranges, found):
    assert pieces([0, 10, 20, 30], ranges) == found
    assert all(a[1] <= b[0] for a, b in pairwise(found))


def test_what_was_recorded_is_known_to_the_next_process(file):
    put(file, A[0], B)
    again = PartsFile(file.path)
    assert again.hashes == {each: sha(*each) for each in (HEADER, A[0], B)}
    assert again.absent() == A[1:]
    assert again.absent([again.ranges["b"]]) == []


def test_half_a_last_line_is_ignored_and_the_next_one_counts(file):
    put(file, A[0])
    record = record_of(file.path)
    whole = record.read_bytes()
    for length in range(len(whole) - 60, len(whole) - 1):
        record.write_bytes(whole[:length])
        again = PartsFile(file.path)
        assert again.hashes.keys() == {HEADER}
        put(again, B)
        assert PartsFile(file.path).hashes.keys() == {HEADER, B}


@pytest.mark.parametrize("ended", [False, True])
def test_changed_bytes_of_a_fetch_that_was_killed_are_forgotten(ended, file):
    put(file, A[0], B)
    if ended:
        file.end_fetch()
    with file.opened() as descriptor:
        os.pwrite(descriptor, b"!", B[0])
    again = PartsFile(file.path)
    again.verify()
    assert again.hashes.keys() == ({HEADER, A[0], B} if ended else {HEADER, A[0]})
    assert PartsFile(file.path).hashes == again.hashes


@pytest.mark.parametrize("right", [True, False])
def test_a_whole_file_is_compared_once_with_its_hash(right, file):
    stated = sha(0, SIZE) if right else sha(1, SIZE)
    file.compare(stated)  # it is not whole
    put(file, *A, B)
    if right:
        file.compare(stated)
        file.path.write_bytes(b"not read again".ljust(SIZE))
        again = PartsFile(file.path)
        again.verify()
        again.compare(stated)
        again.forget([B])
        assert PartsFile(file.path).hashes.keys() == {HEADER, *A}
        return
    with pytest.raises(ModelError, match="has another SHA-256 than the hub states"):
        file.compare(stated)
    assert PartsFile(file.path).hashes.keys() == {HEADER}


def test_only_bytes_that_are_to_come_are_waited_for(file):
    put(file, A[0])
    file.expect([A[1], B])
    assert file.wait_for(A[0], 0)
    assert not file.wait_for((A[0][0], A[1][1]), 0)
    file.arrived(A[1])
    assert file.wait_for((A[0][0], A[1][1]), 0)
    with pytest.raises(ModelError, match="are neither here nor fetched in this start"):
        file.wait_for((A[1][0], A[2][1]), 60)
    file.expect([A[1]])  # once more, as it was wrong
    assert not file.wait_for(A[1], 0)


def test_a_file_without_its_record_is_refused(file):
    record_of(file.path).unlink()
    with pytest.raises(ModelError, match="has no record"):
        PartsFile(file.path)
