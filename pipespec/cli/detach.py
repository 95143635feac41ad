"""`pipespec up --detach`: the same command in a session of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pipespec.cli.arguments import STDIN
from pipespec.client.registry import LOG, RunningCluster, held, kept_folder
from pipespec.errors import ConfigError, PipespecError

# How often a cluster that is to become ready is looked at.
LOOK_S = 0.1
MESSAGE = "pipespec: "


def detached(name: str, settings: Sequence[str], *, measure: bool) -> RunningCluster:
    """Start `pipespec up` in a session of its own and wait until it is ready.

    What it says goes to the log beside its entry. Raises what it failed with.
    """
    with kept_folder() as here:
        log = here / (name + LOG)
        # Nobody's log may be lost to a start that is refused.
        partial = here / f"{name}{LOG}.{os.getpid()}"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    flags = ["--measure"] if measure else []
    with os.fdopen(descriptor, "wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipespec", "up", "--name", name, *flags, STDIN],
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        assert process.stdin is not None
        with process.stdin as stdin:
            # Settings may hold a password, which a command line would show.
            stdin.write(json.dumps(settings).encode())
        while True:
            entry = held(name)
            if entry is not None and entry.cluster and entry.owner.pid == process.pid:
                partial.rename(log)
                return entry.cluster
            if process.poll() is not None:
                raise failure(partial, process.returncode)
            time.sleep(LOOK_S)
    except BaseException:
        process.terminate()
        process.wait()
        partial.unlink(missing_ok=True)
        raise


def failure(log: Path, code: int) -> PipespecError:
    """What a process said last, as an error."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = lines[-1].removeprefix(MESSAGE) if lines else f"It ended with exit code {code}."
    return ConfigError(said) if code == ConfigError.exit_code else PipespecError(said)
