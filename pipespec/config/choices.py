"""What may be set: the groups, choices and values of `conf/`, with their defaults and notes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipespec.system.resources import resource_dir


@dataclass(frozen=True)
class Setting:
    """One line of the help text."""

    name: str
    default: str
    note: str


def settings() -> Iterator[Setting]:
    """Every group and value of the default configuration, read from `conf/`."""
    from omegaconf import OmegaConf

    conf = resource_dir("conf")
    root = conf / "config.yaml"
    for entry in OmegaConf.load(root).defaults:
        if entry == "_self_":
            continue
        ((group, option),) = entry.items()
        yield Setting(group, option, "one of " + ", ".join(options(group)))
        yield from _lines(f"{group}.", conf / group / f"{option}.yaml")
    yield from _lines("", root)


def _lines(prefix: str, file: Path) -> Iterator[Setting]:
    for line in file.read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(r"([a-z]\w*): ([^#]+?)(?: *# (.*))?", line)
        if match:
            name, default, note = match.groups(default="")
            default = re.sub(r"\$\{resource:(\w+)\}", r"<\1>", default)
            yield Setting(prefix + name, default, note)


def groups() -> list[str]:
    """The folders of `conf/`."""
    return sorted(folder.name for folder in resource_dir("conf").iterdir() if folder.is_dir())


def options(group: str) -> list[str]:
    """The files of `conf/<group>/`, without their ending."""
    return sorted(file.stem for file in (resource_dir("conf") / group).glob("*.yaml"))
