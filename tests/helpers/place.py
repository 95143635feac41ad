"""Commands that run as processes of their own, and what they leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipespec.client import registry

PIPESPEC = [sys.executable, "-m", "pipespec"]
MARK = "PIPESPEC_TEST_RUN"
PATIENCE_S = 120  # a loaded machine takes its time to import torch
ENDING_S = 60


@dataclass
class Place:
    """A folder for registry and temporary files, and a mark that every process here carries."""

    folder: Path
    mark: str

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

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*PIPESPEC, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            cwd=Path(__file__).parent.parent.parent,
        )

    def run(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        process = self.start(*arguments)
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
        """What lies there, logs of what was detached excepted."""
        told = [*(self.folder / "tmp").iterdir(), *(self.folder / "pipespec").iterdir()]
        return [path.name for path in told if path.suffix != registry.LOG]

    def log(self, name: str) -> str:
        return (self.folder / "pipespec" / f"{name}{registry.LOG}").read_text()

    def kill(self) -> None:
        """End what is left; its resource trackers clear up if they are asked first."""
        left = self.processes()
        for process in left:
            with suppress(psutil.NoSuchProcess):  # it was about to end by itself
                process.terminate()
        for process in psutil.wait_procs(left, ENDING_S)[1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
