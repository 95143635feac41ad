"""How a command ends: bugs of ours, and output that cannot be written."""

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from pipespec.errors import PipespecError
from pipespec.system.exit_codes import exit_code_of

PIPESPEC = shlex.join([sys.executable, "-m", "pipespec"])
QUICK = "plan policy=root --tokens 5"


def deep(depth: int = 0) -> int:
    return deep(depth + 1)


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env=os.environ | environment
    )


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
def test_a_bug_is_a_traceback_and_a_line(run, said, capsys):
    assert exit_code_of(run) == 70
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Traceback (most recent call last)")
    assert err.endswith(f"\npipespec: internal error: {said}; the traceback is above\n")


def test_bug_in_a_thread_is_reported_like_any_other(capsys):
    before = threading.excepthook

    def run() -> int:
        thread = threading.Thread(target=raising(KeyError("a")))
        thread.start()
        thread.join()
        return 3

    assert exit_code_of(run) == 3
    assert capsys.readouterr().err.endswith(
        "internal error: KeyError: 'a'; the traceback is above\n"
    )
    assert threading.excepthook is before


def test_what_a_user_can_mend_is_one_line(capsys):
    assert exit_code_of(raising(PipespecError("Mend it."))) == 1
    assert capsys.readouterr().err == "pipespec: Mend it.\n"


@pytest.mark.parametrize("error", [KeyError("a"), PipespecError("It is not valid.")])
@pytest.mark.parametrize("explicit", [True, False])
def test_an_error_raised_because_of_a_signal_is_reported_as_the_signal(error, explicit, capsys):
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


@pytest.mark.slow
def test_a_standard_error_that_is_full_changes_no_exit_code():
    assert shell(f"{PIPESPEC} {QUICK} 2>/dev/full").returncode == 0
    assert shell(f"{PIPESPEC} plan stages=0 2>/dev/full").returncode == 2


@pytest.mark.slow
def test_a_terminal_of_few_characters_is_one_sentence():
    answer = shell(f"{PIPESPEC} {QUICK}", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert answer.returncode == 1
    assert "takes ascii alone; set PYTHONUTF8=1" in answer.stderr
    assert answer.stderr.count("\n") == 1
