"""Which cluster is to be started, and `pipespec up` in a session of its own, for --detach and for
`pipespec serve`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from signal import SIGINT, SIGTERM, Signals

from pipespec.client.registry import LOG, RunningCluster, check_name, folder, held, kept_folder
from pipespec.config.hosts import load_hosts
from pipespec.console.arguments import STDIN, overrides, refuse_trace
from pipespec.console.terminal import standard_input
from pipespec.errors import ConfigError, PipespecError, print_error
from pipespec.system.exit_codes import SIGNALLED
from pipespec.system.process_identity import die_with_parent
from pipespec.system.validation import Unreadable, parse_json, readable

DEFAULT_NAME = "default"
# How often a loading cluster is checked.
LOOK_S = 0.1
MESSAGE = "pipespec: "
# The pauses before a launcher that has died is started again, one for each start in a row that does
# not last. After the last one it is given up; a request that makes it fail is given up before
# (`pipespec.controller.epoch_control.MAX_FAILED_CLUSTERS`).
PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0)
# How long a launcher must have been ready for its start to count as lasting.
LASTING_S = 30.0
# The exit codes of a launcher that `pipespec down` or a signal has ended: 0 once it is ready, that
# of its clean-up before that, and the signal itself before it has imported anything.
ENDED_ON_REQUEST = (
    0,
    *(code for number in (SIGINT, SIGTERM) for code in (SIGNALLED + number, -number)),
)


def cluster_of(
    arguments: argparse.Namespace, rest: list[str], command: str
) -> tuple[str, list[str]]:
    """Name and settings of the cluster that a command is to start. Raises ConfigError."""
    settings = overrides(rest, arguments.known_options, stdin_allowed=True)
    if STDIN in rest:
        remedy = "write one per line, or a JSON list of texts"
        with readable("The settings on standard input cannot be read", remedy):
            settings += parse_settings(standard_input())
    refuse_trace(settings, command)
    name = default_name(settings) if arguments.name is None else arguments.name
    check_name(name)
    return name, settings


def parse_settings(text: str) -> list[str]:
    """Settings: one per line, or a JSON list. Raises Unreadable."""
    if not text:  # the process that should write them may have ended
        raise Unreadable("it is empty")
    if not text.lstrip().startswith("["):
        return [line.strip() for line in text.splitlines() if line.strip()]
    settings = parse_json(text)
    if not all(isinstance(setting, str) for setting in settings):
        raise Unreadable('they must be texts, as in ["policy=level"]')
    return settings


def default_name(settings: Sequence[str]) -> str:
    for text in settings:
        key, _, value = text.partition("=")
        if key == "cluster" and value.endswith((".yaml", ".yml")):
            return load_hosts(value).name
    return DEFAULT_NAME


class LauncherEnded(PipespecError):
    """The launcher of a cluster was asked to end, and so its cluster has ended."""

    def __init__(self, name: str):
        super().__init__(
            f"The cluster {name!r} was asked to end (`pipespec down`, or a signal to its launcher)."
        )


def detached(name: str, settings: Sequence[str], flags: Sequence[str]) -> RunningCluster:
    """Start `pipespec up` in a session of its own, once it is ready. Raises what it failed with."""
    launcher = Launcher(name, settings, flags)
    try:
        return launcher.await_ready()
    except BaseException:
        launcher.end()
        raise


class Launcher:
    """`pipespec up` in a session of its own. Its output goes to the log beside the registry entry.
    `ours`: it ends with the thread that starts it, and `watch` starts it again."""

    def __init__(
        self,
        name: str,
        settings: Sequence[str],
        flags: Sequence[str] = (),
        *,
        ours: bool = False,
    ):
        self.name = name
        self._settings = settings
        self._flags = flags
        self._ours = ours
        self._process: subprocess.Popen[bytes]
        self._partial: Path | None = None  # the log of one that is not ready
        self._cluster: RunningCluster | None = None  # once it is
        self._ready_at: float | None = None  # of the process that was started last
        self._fruitless: int | None = None  # starts in a row that did not last; None: the first
        self._again_at: float | None = None  # when it is started again, if it is to be
        self._start()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def _start(self) -> None:
        self._cluster = self._ready_at = None
        with kept_folder() as here:
            # A start that is refused must not overwrite the log of another cluster. One that is
            # started again goes on with its own, which says why.
            again = self._fruitless is not None
            self._partial = here / f"{self.name}{LOG}{'' if again else f'.{os.getpid()}'}"
            mode = os.O_APPEND | (0 if again else os.O_TRUNC)  # `down` writes to it, too
            descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | mode, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipespec", "up", "--name", self.name, *self._flags, STDIN],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()) if self._ours else None,
            )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            # Settings may hold a password, which a command line would show. If this process ends
            # here, the launcher refuses the input, which is not JSON.
            stdin.write(json.dumps(self._settings).encode())

    def ready(self) -> RunningCluster | None:
        """The cluster, if it is ready. Raises what the process failed with before that."""
        if self._partial is None:
            return self._cluster
        entry = held(self.name)
        if entry is not None and entry.cluster and entry.owner.pid == self._process.pid:
            self._partial.rename(self._partial.with_name(self.name + LOG))
            self._partial = None
            self._cluster, self._ready_at = entry.cluster, time.monotonic()
        elif self.ended:
            raise failure(self._partial, self._process.returncode)
        return self._cluster

    def await_ready(self) -> RunningCluster:
        said = None
        while (cluster := self.ready()) is None:
            waits_for = (entry := held(self.name)) and entry.owner.waits_for
            if waits_for is not None and waits_for != said:
                said = waits_for
                print_error(f"{self.name}: waiting for {said}")
            time.sleep(LOOK_S)
        return cluster

    def watch(self) -> RunningCluster | None:
        """The cluster, if it is ready. If it has died, it will be started again. Raises what the
        process failed with if it was never ready, or after too many starts that did not last;
        LauncherEnded if it was asked to end."""
        if self._again_at is not None:
            if time.monotonic() >= self._again_at:
                self._again_at = None
                try:
                    self._start()
                except (OSError, ConfigError) as error:  # such as no memory for a process
                    self._schedule_restart(
                        PipespecError(f"The cluster's launcher cannot be started ({error}).")
                    )
            return None
        ended = self.ended
        if ended and self._process.returncode in ENDED_ON_REQUEST:
            raise LauncherEnded(self.name)
        try:
            cluster = self.ready()
            if not ended:
                return cluster
            problem = failure(folder() / (self.name + LOG), self._process.returncode)
        except PipespecError as error:
            if self._fruitless is None:
                raise
            problem = error
        self._schedule_restart(problem)
        return None

    def _schedule_restart(self, problem: PipespecError) -> None:
        """The process has ended after the cluster was ready once."""
        now = time.monotonic()
        lasted = self._ready_at is not None and now - self._ready_at >= LASTING_S
        self._fruitless = 0 if lasted else (self._fruitless or 0) + 1
        if self._fruitless == len(PAUSES_S):
            raise problem
        self._again_at = now + PAUSES_S[self._fruitless]
        print_error(f"{self.name}: {problem}")
        print_error(f"{self.name}: the cluster's launcher has ended; it is started again")

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()
        if self._partial is not None and self._fruitless is None:
            self._partial.unlink(missing_ok=True)


def failure(log: Path, code: int) -> PipespecError:
    """The error with which a process has ended: its last line, or the signal that ended it."""
    if code < 0:
        return PipespecError(f"The cluster's launcher was ended by {Signals(-code).name}.")
    try:
        text = log.read_text(errors="replace")
    except OSError:  # somebody has removed it
        text = ""
    lines = [line for line in text.splitlines() if line.strip()]
    message = lines[-1].removeprefix(MESSAGE) if lines else f"It ended with exit code {code}."
    return ConfigError(message) if code == ConfigError.exit_code else PipespecError(message)
