"""Commands on a terminal: what they show there, as it comes."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from select import select

from tests.helpers.sandbox import ENDING_S, PIPESPEC, Sandbox
from tests.helpers.waiting import PATIENCE_S, until

LINES, COLUMNS = 50, 200
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
CURSOR = "\x1b[?25h"  # shown again


@dataclass
class Screen:
    """A command whose standard output and error are one terminal."""

    process: subprocess.Popen[bytes]
    _terminal: int
    _shown: bytes = field(default=b"")

    @property
    def shown(self) -> str:
        """All that was ever shown, control sequences too."""
        while select([self._terminal], [], [], 0)[0]:
            try:
                found = os.read(self._terminal, 65536)
            except OSError:  # EIO: nobody has it open any more
                break
            if not found:
                break
            self._shown += found
        return self._shown.decode()

    @property
    def text(self) -> str:
        """Without control sequences."""
        return CONTROL.sub("", self.shown)

    def wait(self, text: str) -> None:
        """Until this is shown, after all that `text` has returned before."""
        begun = len(self._shown.decode())

        def there() -> bool:
            new = CONTROL.sub("", self.shown[begun:])
            assert text in new or self.process.poll() is None, self.text
            return text in new

        until(there, PATIENCE_S, f"{text!r} was not shown")

    def interrupt(self, number: int) -> int:
        """End it with a signal; its exit code."""
        self.process.send_signal(number)
        until(lambda: (self.shown, self.process.poll())[1] is not None, ENDING_S)
        return self.process.returncode


@contextmanager
def on_screen(place: Sandbox, *arguments: str) -> Iterator[Screen]:
    """Run a command of pipespec on a terminal; it is killed if it does not end."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = place.environment | {"TERM": "xterm"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    try:
        process = subprocess.Popen(
            [*PIPESPEC, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=its,
            stderr=its,
            env=environment,
            cwd=Path(__file__).parent.parent.parent,
        )
    finally:
        os.close(its)
    try:
        yield Screen(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
