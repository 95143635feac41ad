import os
import queue
import shutil
import socket
import threading
from pathlib import Path

import pytest

from pipespec.engine.checkpoint.partial_checkpoint import own_path
from pipespec.engine.checkpoint.parts.folder import (
    Repository,
    StoredFile,
    log,
    sole_fetcher,
    write_repository,
)
from pipespec.engine.checkpoint.parts.parts_file import BLOCK_BYTES, PartsFile
from pipespec.system.files import lock_file


@pytest.mark.parametrize("killed", [False, True])
def test_what_a_killed_process_has_left_is_compared_with_its_hashes(killed, tmp_path):
    def fetch() -> None:
        with sole_fetcher(tmp_path):
            file = PartsFile.create(tmp_path / "m.safetensors", 3 * BLOCK_BYTES)
            for block in range(2):
                file.write(block, bytes([block]) * BLOCK_BYTES)
            with file.path.open("r+b") as stream:
                stream.write(b"wrong")
            if killed:
                os._exit(0)

    if killed:
        if not (child := os.fork()):
            fetch()
        os.waitpid(child, 0)
    else:
        fetch()
    with sole_fetcher(tmp_path):
        assert PartsFile(tmp_path / "m.safetensors").absent() == ([0, 2] if killed else [2])


def test_of_two_starts_the_one_that_waits_names_the_other(tmp_path, monkeypatch):
    said = queue.Queue[str]()
    monkeypatch.setattr(log, "warning", lambda text, *of: said.put(text % of))

    def second() -> None:
        with sole_fetcher(tmp_path):
            said.put("done")

    with sole_fetcher(tmp_path):
        other = threading.Thread(target=second)
        other.start()
        holder = f"process {os.getpid()} of {socket.gethostname()}"
        sentence = f"{holder} fetches into {tmp_path}; waiting until it has ended"
        assert said.get(timeout=60) == sentence
        assert said.empty()
    assert said.get(timeout=60) == "done"
    other.join()


def test_the_lock_of_a_folder_that_was_removed_is_that_of_the_new_one(tmp_path):
    folder = tmp_path / "folder"
    with sole_fetcher(folder):
        assert folder.stat().st_mode & 0o077 == 0  # gated weights are its user's alone
        shutil.rmtree(folder)
        with sole_fetcher(folder):
            assert lock_file(folder / ".parts" / "lock") is None


def test_a_gguf_file_without_its_header_is_nowhere(tmp_path, monkeypatch):
    """A start that was refused before the first byte has left it beside a finished one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one = Repository("org/model", "0" * 40, files={"a.gguf": StoredFile(8)})
    two = Repository("org/model", "0" * 40, files={"b.gguf": StoredFile(8)})
    one.folder.mkdir(parents=True)
    for name in ("a.gguf", "b.gguf"):
        PartsFile.create(one.folder / name, 8)
    write_repository(one)
    assert own_path(Path("/far/b.gguf"), two, ()) is None


def test_a_shared_model_is_not_looked_for_where_the_launcher_has_it(tmp_path, monkeypatch):
    """What is there on another host may be another model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (launcher := tmp_path / "b.gguf").touch()
    assert own_path(launcher, None, ()) == launcher
    assert own_path(launcher, Repository("org/model", "0" * 40), ()) is None
