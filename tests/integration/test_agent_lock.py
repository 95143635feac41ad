"""A name that one agent of a host holds, and who may be signalled for it."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pipespec.cluster.host_link.agent_lock import runtime_folder, sole_agent
from pipespec.errors import ConfigError
from pipespec.system.process_identity import since_boot

PATIENCE = 60
NAME = "lab-1-beta"
HOLDER = """
    import sys
    from pipespec.cluster.host_link.agent_lock import sole_agent
    with sole_agent(sys.argv[1]):
        print("held", flush=True)
        sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "pipespec"


def started() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), NAME],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@contextmanager
def holder() -> Iterator[subprocess.Popen[str]]:
    process = started()
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_the_earlier_holder_is_ended(runtime):
    with holder() as earlier, sole_agent(NAME):
        assert earlier.wait(PATIENCE) != 0
        lock = runtime / f"{NAME}.lock"
        assert lock.read_text().splitlines()[0] == str(os.getpid())


def test_the_lock_that_an_agent_of_another_cluster_left_is_removed(runtime):
    with holder() as earlier:
        other = runtime / "another.lock"
        (runtime / f"{NAME}.lock").rename(other)
        with sole_agent(NAME):
            assert other.exists()
        earlier.kill()
        earlier.wait()
        with sole_agent(NAME):
            assert [*runtime.iterdir()] == [runtime / f"{NAME}.lock"]


def test_the_folder_of_locks_is_for_this_user_alone(runtime):
    assert runtime_folder() == runtime
    assert runtime.stat().st_mode & 0o077 == 0


def test_a_folder_to_which_others_can_write_is_refused(runtime):
    runtime.mkdir()
    runtime.chmod(0o777)
    with pytest.raises(ConfigError, match="Others can write to"), sole_agent(NAME):
        pass


def test_a_link_in_the_place_of_the_lock_is_not_followed(runtime, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("keep")
    runtime_folder()
    (runtime / f"{NAME}.lock").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"), sole_agent(NAME):
        pass
    assert precious.read_text() == "keep"


@pytest.mark.parametrize("named", ["a bystander", "a group"])
def test_lock_whose_file_names_another_process_signals_none(named):
    """Somebody holds the lock whose file names others: only a matching start is signalled."""
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with holder() as earlier:
            lock = runtime_folder() / f"{NAME}.lock"
            pid = -1 if named == "a group" else bystander.pid
            begun = since_boot(psutil.Process(bystander.pid)) - 3600
            lock.write_text(f"{pid}\n{begun}\n")
            waiting = started()
            try:
                # It gets the lock only by the holder's own end.
                earlier.stdin.close()
                assert earlier.wait(PATIENCE) == 0
                assert waiting.stdout.readline() == "held\n"
            finally:
                waiting.kill()
                waiting.communicate()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.communicate()
