"""Steps of the system clock that only the processes of a cluster see.

    clock = SteppedClock(folder)
    process = subprocess.Popen(argv, env={**os.environ, **clock.environment})
    clock.step(3600)    # its wall clock is an hour ahead from now on; monotonic clocks are not

Our own library (clock.c) is preloaded, because libfaketime 0.9.10 works with neither kind of
process: a redis-server that uses jemalloc does not start with it, and in Python 3.11 and later
`time.sleep` raises EINVAL once the clock was stepped. Needs a C compiler; `missing()` returns what
is missing.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
COMPILER = "cc"


def missing() -> str | None:
    """What this machine lacks for a stepped clock, as a reason to skip; None if nothing."""
    if sys.platform != "linux":
        return "a stepped clock needs Linux"
    if shutil.which(COMPILER) is None:
        return f"a stepped clock needs a C compiler ({COMPILER})"
    return None


class SteppedClock:
    """The wall clock of all processes that are started with its environment.

    Attributes:
        environment: variables for those processes.
        offset_s: by how many seconds their wall clock is ahead of the machine's.
    """

    def __init__(self, folder: Path):
        """Builds the library in `folder`. Raises subprocess.CalledProcessError."""
        library, self._file = folder / "clock.so", folder / "clock.offset"
        build = [COMPILER, "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE)]
        subprocess.run(build, check=True, capture_output=True)
        self._file.write_bytes(struct.pack("=q", 0))
        self.offset_s = 0
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(self._file)}

    def step(self, offset_s: int) -> None:
        """Set their clock so many seconds ahead of the machine's; negative: behind."""
        with open(self._file, "r+b") as file:
            file.write(struct.pack("=q", offset_s))
        self.offset_s = offset_s

    def remove(self) -> None:
        """Remove what was built, once no process needs it."""
        Path(self.environment["LD_PRELOAD"]).unlink()
        self._file.unlink()
