"""Processes that may end at any moment, even while they are looked at; modules on hosts."""

import tempfile
from contextlib import suppress

import psutil

from pipespec.cluster.host_link import programs
from pipespec.config.hosts import Host

PATIENCE_S = 60.0


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return pid > 0 and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_module(host: Host, *words: str, given: bytes = b"") -> bytes:
    """What `python -m` and the words write on a host. Raises HostFailed."""
    with tempfile.TemporaryFile() as errors:
        program = programs.start_module(host, *words, stderr=errors)
        assert program.stdin is not None and program.stdout is not None
        with program.stdout as stdout:
            with suppress(OSError), program.stdin as stdin:  # it may have ended
                stdin.write(given)
            output = stdout.read()
        if code := program.wait(PATIENCE_S):
            errors.seek(0)
            raise programs.failure(host, words[0], code, errors.read())
        return output
