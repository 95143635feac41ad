import os
import signal
import subprocess
import tempfile

import psutil
import pytest

from pipespec.system.files import TemporaryFolder, write_atomically
from tests.helpers.waiting import until


def test_open_file_keeps_its_content(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, b"before")
    with path.open("rb") as opened:
        write_atomically(path, b"after")
        assert opened.read() == b"before"
    assert path.read_bytes() == b"after"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("started", [False, True])
def test_process_that_is_killed_while_it_makes_a_folder_leaves_none(tmp_path, monkeypatch, started):
    """As by a second Ctrl-C: before, and after what removes the folder has started."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if not (child := os.fork()):

        def spawn(*arguments, real=subprocess.Popen, **options):
            if started:
                real(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        subprocess.Popen = spawn
        try:
            TemporaryFolder("socket")
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    until(lambda: not [*tmp_path.iterdir()])


def test_folder_is_removed_when_its_user_closes_it():
    made = TemporaryFolder("socket")
    assert made.folder.stat().st_mode & 0o777 == 0o700
    (made.folder / "socket").write_bytes(b"")
    for _ in range(2):
        made.close(60)
        assert not made.folder.exists()


def test_what_is_left_where_all_processes_were_killed_goes_with_the_next_folder(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    in_use = TemporaryFolder("socket")
    if not (child := os.fork()):
        try:
            left = TemporaryFolder("socket")
            (left.folder / "log").write_bytes(b"")
            for helper in psutil.Process().children():
                helper.kill()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len([*tmp_path.iterdir()]) == 2
    another = TemporaryFolder("socket")
    assert {*tmp_path.iterdir()} == {in_use.folder, another.folder}
    for folder in (another, in_use):
        folder.close(60)
    assert not [*tmp_path.iterdir()]
