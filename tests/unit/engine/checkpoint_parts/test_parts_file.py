"""Sparse weight files and the records of what is in them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from pipespec.engine.checkpoint_parts.parts_file import PartsFile, is_partial, record_of
from pipespec.errors import ModelError


def put(file: PartsFile, start: int, data: bytes) -> None:
    with file.opened() as descriptor:
        os.pwrite(descriptor, data, start)
    file.commit((start, start + len(data)), hashlib.sha256(data).hexdigest())


@pytest.fixture
def file(tmp_path: Path) -> PartsFile:
    return PartsFile.create(tmp_path / "weights", 100, b"header")


def test_a_new_file_has_its_size_and_its_header(file):
    assert file.path.stat().st_size == 100
    assert file.path.read_bytes()[:6] == b"header"
    assert is_partial(file.path)
    assert list(file.here) == [(0, 6)]
    assert PartsFile.create(file.path, 100, b"header").here.num_bytes == 6


def test_what_was_recorded_is_known_to_the_next_process(file):
    put(file, 10, b"x" * 20)
    put(file, 30, b"y" * 5)
    file.commit_tensors({"a": file.hash((10, 30))})
    again = PartsFile(file.path)
    assert list(again.here) == [(0, 6), (10, 35)]
    assert again.hashes == {"a": hashlib.sha256(b"x" * 20).hexdigest()}
    assert again.absent([(0, 40)]) == [(6, 10), (35, 40)]


def test_half_a_last_line_is_ignored_and_the_next_one_counts(file):
    put(file, 10, b"x" * 20)
    record = record_of(file.path)
    whole = record.read_bytes()
    for length in range(len(whole) - 60, len(whole) - 1):
        record.write_bytes(whole[:length])
        again = PartsFile(file.path)
        assert list(again.here) == [(0, 6)]
        put(again, 40, b"z")
        assert list(PartsFile(file.path).here) == [(0, 6), (40, 41)]


def test_changed_bytes_are_forgotten(file):
    put(file, 10, b"x" * 20)
    put(file, 50, b"y" * 20)
    ranges = {"a": (10, 30), "b": (50, 70)}
    assert file.verify(ranges) == 0
    with file.opened() as descriptor:
        os.pwrite(descriptor, b"!", 60)
    assert PartsFile(file.path).verify(ranges) == 20
    assert list(PartsFile(file.path).here) == [(0, 6), (10, 30)]


def test_a_tensor_whose_bytes_are_forgotten_has_no_hash(file):
    put(file, 10, b"x" * 20)
    put(file, 50, b"y" * 20)
    file.commit_tensors({"a": "1", "b": "2"})
    file.forget([(20, 21)], {"a": (10, 30), "b": (50, 70)})
    assert file.hashes == PartsFile(file.path).hashes == {"b": "2"}
    assert list(file.here) == [(0, 6), (50, 70)]


def test_tensors_that_share_a_piece_with_forgotten_bytes_are_forgotten_too(file):
    put(file, 10, b"x" * 20)
    file.commit_tensors({"a": "1", "b": "2"})
    file.forget([(10, 12)], {"a": (10, 15), "b": (15, 30)})
    assert file.hashes == PartsFile(file.path).hashes == {}
    assert list(file.here) == [(0, 6)]


def test_a_file_without_its_record_is_refused(file):
    record_of(file.path).unlink()
    with pytest.raises(ModelError, match="has no record"):
        PartsFile(file.path)
