"""Sparse weight files and the records of which of their blocks are here."""

import hashlib
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from pipespec.engine.checkpoint.parts import parts_file
from pipespec.engine.checkpoint.parts.parts_file import (
    RECORDS,
    PartsFile,
    blocks_of,
    is_partial,
    ranges_of,
    record_of,
)
from pipespec.errors import ModelError

DATA = save({"a": torch.ones(25, dtype=torch.uint8), "b": torch.ones(10, dtype=torch.uint8)})
BEGIN, SIZE, BLOCK = len(DATA) - 35, len(DATA), 10
NUM_BLOCKS = -(-SIZE // BLOCK)


def put(file: PartsFile, *blocks: int) -> None:
    for each in blocks:
        file.write(each, DATA[slice(*file.place(each))])


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PartsFile:
    monkeypatch.setattr(parts_file, "BLOCK_BYTES", BLOCK)
    return PartsFile.create(tmp_path / "m.safetensors", SIZE)


def test_a_new_file_has_its_size_and_no_block(file):
    assert file.path.read_bytes() == bytes(SIZE)
    assert is_partial(file.path)
    assert file.absent() == list(range(NUM_BLOCKS))
    put(file, *blocks_of([(0, BEGIN)]))
    assert ranges_of(file.path) == {"a": (BEGIN, BEGIN + 25), "b": (BEGIN + 25, SIZE)}
    again = PartsFile.create(file.path, SIZE)  # it is there
    assert again.record == file.record
    assert sorted(each.name for each in file.path.parent.rglob("*") if each.is_file()) == [
        file.path.name,
        record_of(file.path).name,
    ]


def test_a_file_that_was_made_by_half_is_made_anew(file):
    put(file, *range(NUM_BLOCKS))
    os.truncate(file.path, 0)
    again = PartsFile.create(file.path, SIZE)
    assert (again.size, again.absent()) == (SIZE, list(range(NUM_BLOCKS)))


@pytest.mark.parametrize("fetched", [True, False])
def test_nothing_is_here_of_a_file_that_has_lost_its_record(fetched, file):
    put(file, *range(NUM_BLOCKS))
    link = file.path.with_name("link.safetensors")
    link.symlink_to(file.path)
    record_of(file.path).unlink()
    if not fetched:
        (file.path.parent / RECORDS).rmdir()
    assert PartsFile(file.path).absent() == (list(range(NUM_BLOCKS)) if fetched else [])
    assert not is_partial(link)
    assert PartsFile.create(link, SIZE).record is None  # whole, in another cache


@pytest.mark.parametrize(
    ("ranges", "found"),
    [
        ([(0, 30)], [0, 1, 2]),
        ([(10, 20)], [1]),
        ([(9, 11), (12, 13)], [0, 1]),
        ([(10, 10), (30, 30)], []),
        ([], []),
    ],
)
def test_blocks_are_those_that_hold_bytes_of_the_ranges(file, ranges, found):
    assert blocks_of(ranges) == file.absent(ranges) == found


def test_what_was_recorded_is_known_to_the_next_process(file):
    put(file, *blocks_of([(0, BEGIN)]))
    b = [ranges_of(file.path)["b"]]
    put(file, *blocks_of(b))
    again, blocks = PartsFile(file.path), blocks_of([(0, BEGIN), *b])
    assert again.absent() == [each for each in range(NUM_BLOCKS) if each not in blocks]
    for each in blocks:
        sha = hashlib.sha256(DATA[slice(*file.place(each))]).digest()
        assert again.digest(each) == sha


def test_a_block_that_has_changed_on_the_disk_is_not_here_any_more(file, caplog):
    put(file, 0, 1)
    assert [file.read(each) for each in range(3)] == [DATA[:10], DATA[10:20], None]
    file.path.write_bytes(DATA[:10] + b"?" + DATA[11:])
    assert [file.read(each) for each in range(2)] == [DATA[:10], None]
    assert PartsFile(file.path).absent() == list(range(1, NUM_BLOCKS))
    (said,) = caplog.messages
    assert said == f"{file.path} is not as it was fetched, so a block of it is dropped"


@pytest.mark.parametrize("length", [0, 1, 31, 32, 40])
def test_a_record_that_was_cut_has_the_blocks_before(length, file):
    put(file, 0, 1)
    record_of(file.path).write_bytes(record_of(file.path).read_bytes()[:length])
    again = PartsFile(file.path)
    again.verify()  # half a hash is that of no bytes
    assert set(range(NUM_BLOCKS)) - set(again.absent()) == ({0} if length >= 32 else set())


@pytest.mark.parametrize("right", [True, False])
def test_a_whole_file_is_compared_once_with_its_hash(right, file):
    stated = hashlib.sha256(DATA if right else b"other").hexdigest()
    file.compare(stated)  # it is not whole
    put(file, *range(NUM_BLOCKS))
    file.compare(None)  # nothing is stated
    if right:
        file.compare(stated)
        file.path.write_bytes(b"not read again".ljust(SIZE))
        PartsFile(file.path).compare(stated)
        return
    with pytest.raises(ModelError, match="has another SHA-256 than the hub states"):
        file.compare(stated)
    assert PartsFile(file.path).absent() == list(range(NUM_BLOCKS))


def test_a_file_of_which_a_block_was_dropped_is_compared_again(file):
    put(file, *range(NUM_BLOCKS))
    file.compare(hashlib.sha256(DATA).hexdigest())
    damaged = PartsFile(file.path)
    file.path.write_bytes(DATA[:-1] + b"?")
    damaged.verify()
    assert damaged.absent() == [NUM_BLOCKS - 1]
    damaged.write(NUM_BLOCKS - 1, b"?" * (SIZE - (NUM_BLOCKS - 1) * BLOCK))
    with pytest.raises(ModelError, match="has another SHA-256 than the hub states"):
        damaged.compare(hashlib.sha256(DATA).hexdigest())
