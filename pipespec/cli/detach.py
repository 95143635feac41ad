"""`pipespec up` in a session of its own: with --detach, and as what `pipespec serve` serves."""

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
from pipespec.system.process import dying_with

# How often a cluster that is to become ready is looked at.
LOOK_S = 0.1
MESSAGE = "pipespec: "


def detached(name: str, settings: Sequence[str], *, measure: bool) -> RunningCluster:
    """Start `pipespec up` in a session of its own and wait until it is ready.

    Raises what it failed with.
    """
    launcher = Launcher(name, settings, measure=measure)
    try:
        return launcher.await_ready()
    except BaseException:
        launcher.end()
        raise


class Launcher:
    """`pipespec up` in a session of its own. What it says goes to the log beside its entry.

    `ours`: it never outlives the thread that starts it, and can be started again.
    """

    def __init__(
        self, name: str, settings: Sequence[str], *, measure: bool = False, ours: bool = False
    ):
        self.name = name
        self._settings = settings
        self._flags = ["--measure"] if measure else []
        self._ours = ours
        self._process: subprocess.Popen[bytes]
        self._partial: Path | None = None  # the log of one that is not ready
        self.start()

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def start(self) -> None:
        """Start the process; once it has ended, again."""
        with kept_folder() as here:
            # Nobody's log may be lost to a start that is refused.
            self._partial = here / f"{self.name}{LOG}.{os.getpid()}"
            descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipespec", "up", "--name", self.name, *self._flags, STDIN],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                preexec_fn=dying_with(os.getpid()) if self._ours else None,
            )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            # Settings may hold a password, which a command line would show.
            stdin.write(json.dumps(self._settings).encode())

    def ready(self) -> RunningCluster | None:
        """The cluster, if it is ready. Raises what the process failed with before that."""
        entry = held(self.name)
        if entry is not None and entry.cluster and entry.owner.pid == self._process.pid:
            if self._partial is not None:
                self._partial.rename(self._partial.with_name(self.name + LOG))
                self._partial = None
            return entry.cluster
        if self.ended and self._partial is not None:
            raise failure(self._partial, self._process.returncode)
        return None

    def await_ready(self) -> RunningCluster:
        """The cluster, once it is ready. Raises what the process failed with."""
        while (cluster := self.ready()) is None:
            time.sleep(LOOK_S)
        return cluster

    def end(self) -> None:
        """End the process, and with it the cluster."""
        self._process.terminate()
        self._process.wait()
        if self._partial is not None:
            self._partial.unlink(missing_ok=True)


def failure(log: Path, code: int) -> PipespecError:
    """What a process said last, as an error."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = lines[-1].removeprefix(MESSAGE) if lines else f"It ended with exit code {code}."
    return ConfigError(said) if code == ConfigError.exit_code else PipespecError(said)
