"""Reads a Dockerfile: its stages, and the instructions of each."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """`arguments` is the rest of the line, with its continuations joined."""

    name: str
    arguments: str

    @property
    def exec_form(self) -> list[str] | None:
        """The words of the JSON list that a command is; None if a shell would read it."""
        try:
            words: list[str] = json.loads("[" + self.arguments.partition("[")[2])
        except ValueError:
            return None
        return words


@dataclass
class Stage:
    """What follows one FROM; `name` is empty for the stage without one."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def of(self, name: str) -> list[Instruction]:
        return [each for each in self.instructions if each.name == name]

    def copy(self, root: Path, into: Path) -> None:
        """Copy what the stage copies from its context, the files of `root` that .dockerignore
        leaves: none but those that it names after "!"."""
        first, *names, last = (root / ".dockerignore").read_text().splitlines()[1:]
        assert (first, last) == ("*", "**/__pycache__"), "other patterns are not read"
        for each in self.of("COPY"):
            *sources, target = each.arguments.split()
            for name in sources:
                assert f"!{name}" in names, f"{name} is not in the context"
                if (root / name).is_dir():
                    ignored = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(root / name, into / target, ignore=ignored)
                else:
                    shutil.copy(root / name, into / target)


class Dockerfile:
    """`arguments` are the ARGs before the first stage, with their defaults."""

    def __init__(self, path: Path):
        self.arguments: dict[str, str] = {}
        self.stages: list[Stage] = []
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        text = "\n".join(line for line in lines if not line.startswith("#"))
        for line in text.replace("\\\n", " ").splitlines():
            name, *words = line.split()
            if name == "FROM":
                self.stages.append(Stage(words[0], words[2] if "AS" in words else ""))
            elif self.stages:
                self.stages[-1].instructions.append(Instruction(name, " ".join(words)))
            else:
                assert name == "ARG", f"{name} before the first FROM"
                self.arguments |= dict([words[0].split("=")])

    def stage(self, name: str) -> Stage:
        (found,) = (stage for stage in self.stages if stage.name == name)
        return found

    @property
    def final(self) -> Stage:
        return self.stages[-1]
