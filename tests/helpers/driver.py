"""A cluster over the hosts of a test bed, asked and watched through `tools.rig.driver`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tools.rig.testbed import Testbed

ROOT = Path(__file__).parents[2]
PATIENCE = 120


class Driver:
    """A cluster over the hosts of a test bed, started from host a, whose first worker is the head.

    `devices` are so many of each host; `settings` are further ones.
    """

    def __init__(self, bed: Testbed, devices: Mapping[str, int], *settings: str):
        self.bed = bed
        hosts_file = bed.hosts_file(devices=devices, draft="a/0")
        self.process = bed.popen(
            "a",
            [
                sys.executable,
                "-m",
                "tools.rig.driver",
                f"cluster={hosts_file}",
                "decode.ignore_eos=true",
                "model.context=256",
                *settings,
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.workers = self.hear("ready")["ready"]

    def hear(self, what: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        heard = []
        for line in self.process.stdout:
            message = json.loads(line)
            if what in message:
                return message
            heard.append(line)
        raise AssertionError("the cluster ended: " + "".join(heard[-20:]))

    def say(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def ask(self, settings: list[str], at: int = 0) -> list[int] | dict[str, Any]:
        """The answer; with `at` what is known when so many tokens have come."""
        self.say({"settings": settings, "at": at})
        return self.hear("at") if at else self.hear("tokens")["tokens"]

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(PATIENCE)


def leftovers(bed: Testbed, host: str, *others: bytes) -> list[int]:
    """Processes in a host that are not its SSH server: Python's, or those of the others' names."""
    found = []
    for pid in set(bed.processes(host)) - bed.servers:
        with suppress(FileNotFoundError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if any(name in line for name in (b"python", *others)):
                found.append(pid)
    return found
