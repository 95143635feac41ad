"""Locks of folders, among the hosts of one start and between starts."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from pipespec.engine.checkpoint.partial_checkpoint import own_path
from pipespec.engine.checkpoint.parts.folder import (
    FolderLock,
    Repository,
    StoredFile,
    read_repository,
    sole_fetcher,
    write_repository,
)
from pipespec.engine.checkpoint.parts.parts_file import BLOCK_BYTES, REPOSITORY, PartsFile
from pipespec.errors import ModelError


@pytest.mark.parametrize("killed", [False, True])
def test_what_a_killed_process_has_left_is_compared_with_its_hashes(
    killed: bool, tmp_path: Path
) -> None:
    file = PartsFile.create(tmp_path / "m.safetensors", 3 * BLOCK_BYTES)
    lock = FolderLock(tmp_path, "1 beta")
    for block in range(2):
        file.write(block, bytes([block]) * BLOCK_BYTES)
    with file.path.open("r+b") as stream:
        stream.write(b"wrong")
    if killed:
        assert lock._descriptor is not None
        os.close(lock._descriptor)
    else:
        lock.release()
    with sole_fetcher(tmp_path):
        assert PartsFile(file.path).absent() == ([0, 2] if killed else [2])


def test_a_process_that_fetches_alone_is_named(tmp_path: Path) -> None:
    with sole_fetcher(tmp_path):
        assert not FolderLock(tmp_path, "1 beta").held
        with (
            pytest.raises(ModelError, match=r"^process \d+ of .* fetches into .*; wait until"),
            sole_fetcher(tmp_path, wait=False),
        ):
            pass
    assert FolderLock(tmp_path, "1 beta").held


def test_the_lock_of_a_folder_that_was_removed_is_that_of_the_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with sole_fetcher(folder):
        assert folder.stat().st_mode & 0o077 == 0  # gated weights are its user's alone
        shutil.rmtree(folder)
        new = FolderLock(folder)
        assert new.held
    assert not FolderLock(folder).held
    new.release()


def test_what_earlier_checkouts_have_fetched_is_used(tmp_path: Path) -> None:
    files = {"a": [8, None], "b": [9, "abc"], "c": {"size": 10}}
    (tmp_path / REPOSITORY).parent.mkdir()
    (tmp_path / REPOSITORY).write_text(
        json.dumps({"repo": "org/model", "commit": "0" * 40, "path": None, "files": files})
    )
    found = read_repository(tmp_path)
    assert found is not None
    assert found.files == {"a": StoredFile(8), "b": StoredFile(9, "abc"), "c": StoredFile(10)}


def test_a_gguf_file_without_its_header_is_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that was refused before the first byte has left it beside a finished one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one = Repository("org/model", "0" * 40, files={"a.gguf": StoredFile(8)})
    two = Repository("org/model", "0" * 40, files={"b.gguf": StoredFile(8)})
    one.folder.mkdir(parents=True)
    for name in ("a.gguf", "b.gguf"):
        PartsFile.create(one.folder / name, 8)
    write_repository(one)
    assert own_path(Path("/far/b.gguf"), two, ()) is None
