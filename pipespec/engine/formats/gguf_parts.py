"""Names of GGUF checkpoints that are several files: `NAME-00001-of-00003.gguf` and so on. Such a
checkpoint is called by its first file."""

from __future__ import annotations

import re
from pathlib import Path

_PART = re.compile(r"(.+-)(\d{5})-of-(\d{5})\.gguf")


def part_names(name: str) -> tuple[str, ...]:
    """The names of all files of a checkpoint, given one of them; most have no other."""
    found = _PART.fullmatch(name)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        return (name,)
    return tuple(
        f"{found[1]}{number:05}-of-{found[3]}.gguf" for number in range(1, int(found[3]) + 1)
    )


def parts_of(path: Path) -> tuple[Path, ...]:
    """The files of a checkpoint, given one of them."""
    return tuple(path.with_name(name) for name in part_names(path.name))


def first_part(path: Path) -> Path:
    """The file by which a checkpoint is called, given any of its files."""
    return path.with_name(part_names(path.name)[0])
