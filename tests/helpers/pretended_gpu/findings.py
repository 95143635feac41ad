"""What the pretended GPU reports, and what of it a step needs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[3]
# A finding there is its caller's.
_PASSED = (Path(__file__).parent, ROOT / "pipespec/device_copy.py")
_INSTALLED = "site-packages"  # which may be in a folder of the project


class Kind(StrEnum):
    """What is reported. All but MIXED make the host wait for the GPU."""

    MIXED = "an operation mixes devices"
    READ = "the host reads a value"
    SIZE = "the size of a result depends on values"
    INDEX = "an index is in main memory"
    UNPINNED = "a copy from or to memory that is not pinned"
    BLOCKING = "a copy that the host waits for"
    WAIT = "the host waits for an event or for the device"
    CAPTURE = "a graph captures a copy from main memory"


@dataclass(frozen=True)
class Finding:
    """`place`: the innermost function of the project, `file:function`; `line` its line there;
    `library`: the function of a library that did it for that one, or ""; `operation`: torch's
    name; `captured`: whether a graph was being captured or replayed."""

    kind: Kind
    operation: str
    place: str
    line: int
    library: str
    captured: bool

    def __str__(self) -> str:
        file, _, function = self.place.partition(":")
        by = f" (in {self.library})" if self.library else ""
        graph = ", in a graph" if self.captured else ""
        return f"{file}:{self.line} {function}{by}: {self.kind}: {self.operation}{graph}"


def finding(kind: Kind, operation: str, *, captured: bool) -> Finding:
    """A finding at the code that runs now."""
    frame: FrameType | None = sys._getframe(1)
    library = ""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if _INSTALLED in path.parts:
            where = path.parts[path.parts.index(_INSTALLED) + 1 :]
            if not library and where[0] != "torch":
                library = f"{'/'.join(where)}:{frame.f_code.co_qualname}"
        elif path.is_relative_to(ROOT) and not any(map(path.is_relative_to, _PASSED)):
            name = f"{path.relative_to(ROOT)}:{frame.f_code.co_qualname}"
            return Finding(kind, operation, name, frame.f_lineno, library, captured)
        frame = frame.f_back
    raise AssertionError("no code of the project is running")
