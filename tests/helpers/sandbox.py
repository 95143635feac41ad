"""Commands that run as processes, and what they leave behind."""

import os
import resource
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from pipespec.client import registry

ROOT = Path(__file__).parents[2]
PIPESPEC = [sys.executable, "-m", "pipespec"]
MARK = "PIPESPEC_TEST_RUN"
PATIENCE_S = 120  # a loaded machine takes its time to import torch
ENDING_S = 60


@dataclass
class Sandbox:
    """A folder for registry and temporary files, and a mark in the environment of each process.

    As a context manager it ends all its processes.
    """

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def environment(self) -> dict[str, str]:
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        return os.environ | {
            MARK: self.mark,
            "XDG_STATE_HOME": str(self.folder),
            "TMPDIR": str(temporary),
            "PYTHONUNBUFFERED": "1",
        }

    def enter(self, patch: pytest.MonkeyPatch) -> None:
        """Let this process belong to it."""
        for name, value in self.environment.items():
            patch.setenv(name, value)

    def start(
        self,
        *arguments: str,
        program: Sequence[str | Path] = PIPESPEC,
        cwd: Path = ROOT,
        environment: Mapping[str, str] | None = None,
        files: int | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command, which may have so many files open."""

        def limit() -> None:
            if files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

        return subprocess.Popen(
            [*program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment if environment is None else environment,
            cwd=cwd,
            preexec_fn=limit,
        )

    def run(self, *arguments: str, stdin: str = "", **how: Any) -> tuple[int, str, str]:
        process = self.start(*arguments, **how)
        out, err = process.communicate(stdin, timeout=PATIENCE_S)
        return process.returncode, out, err

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def files(self) -> list[str]:
        """The files in the folder, except logs of detached commands."""
        found = [*(self.folder / "tmp").iterdir(), *(self.folder / "pipespec").iterdir()]
        return [path.name for path in found if path.suffix != registry.LOG]

    def log(self, name: str) -> str:
        return (self.folder / "pipespec" / f"{name}{registry.LOG}").read_text()

    def kill(self) -> None:
        """End all processes; their resource trackers clean up if they are terminated first."""
        left = self.processes()
        for process in left:
            with suppress(psutil.NoSuchProcess):  # it was about to end by itself
                process.terminate()
        for process in psutil.wait_procs(left, ENDING_S)[1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
