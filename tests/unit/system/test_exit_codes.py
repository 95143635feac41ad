"""How a command ends: bugs of ours, and output that cannot be written."""

from __future__ import annotations

import os
import shlex
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pipespec.errors import PipespecError
from pipespec.system.exit_codes import SIGNALLED, exit_code_of

PIPESPEC = shlex.join([sys.executable, "-m", "pipespec"])
QUICK = "plan policy=root --tokens 5"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "pipespec"


def deep(depth: int = 0) -> int:
    return deep(depth + 1)


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env=os.environ | environment
    )


# --- bugs -------------------------------------------------------------------------------------


def raising(error: BaseException) -> Callable[[], int]:
    def run() -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (raising(KeyError("a")), "KeyError: 'a'"),
        (raising(ValueError("one\ntwo")), "ValueError: one"),
        (raising(ValueError()), "ValueError"),
        (raising(MemoryError()), "MemoryError"),
        (deep, "RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_a_bug_is_one_line_and_its_traceback_a_file(
    run: Callable[[], int], said: str, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(run) == 70
    (file,) = state.iterdir()
    assert "Traceback (most recent call last)" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"pipespec: internal error: {said}; the traceback is in {file}\n"


def test_bug_in_a_thread_is_reported_like_any_other(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = threading.excepthook

    def run() -> int:
        thread = threading.Thread(target=raising(KeyError("a")))
        thread.start()
        thread.join()
        return 3

    assert exit_code_of(run) == 3
    (file,) = state.iterdir()
    assert capsys.readouterr().err.endswith(f"the traceback is in {file}\n")
    assert threading.excepthook is before


@pytest.mark.parametrize("variable", ["XDG_STATE_HOME", "HOME"])
def test_a_traceback_that_cannot_be_stored_is_printed(
    variable: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv(variable, str(tmp_path / "file") if variable != "HOME" else "")
    assert exit_code_of(raising(KeyError("a"))) == 70
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("pipespec: internal error: KeyError: 'a'; the traceback is above\n")


def test_what_a_user_can_mend_leaves_no_file(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(raising(PipespecError("Mend it."))) == 1
    assert capsys.readouterr().err == "pipespec: Mend it.\n"
    assert not state.exists()


@pytest.mark.parametrize("error", [KeyError("a"), PipespecError("It is not valid.")])
@pytest.mark.parametrize("explicit", [True, False])
def test_an_error_raised_because_of_a_signal_is_reported_as_the_signal(
    error: Exception, explicit: bool, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> int:
        try:
            try:
                raise KeyboardInterrupt
            finally:  # of a library
                raise ValueError("left half done")
        except ValueError as fault:
            if explicit:
                raise error from fault
            raise error from None

    with pytest.raises(KeyboardInterrupt):
        exit_code_of(run)
    assert capsys.readouterr().err == ""
    assert not state.exists()


# --- standard streams -------------------------------------------------------------------------


def test_a_standard_error_that_is_full_changes_no_exit_code() -> None:
    assert shell(f"{PIPESPEC} {QUICK} 2>/dev/full").returncode == 0
    assert shell(f"{PIPESPEC} plan stages=0 2>/dev/full").returncode == 2


def test_a_terminal_of_few_characters_is_one_sentence() -> None:
    answer = shell(f"{PIPESPEC} {QUICK}", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert answer.returncode == 1
    assert "takes ascii alone; set PYTHONUTF8=1" in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_a_reader_that_leaves_a_table_ends_it_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        answer = subprocess.run(
            ["bash", "-c", f"{PIPESPEC} {QUICK}"], stdout=out, stderr=subprocess.PIPE, text=True
        )
    assert (answer.returncode, answer.stderr) == (SIGNALLED + signal.SIGPIPE, "")
