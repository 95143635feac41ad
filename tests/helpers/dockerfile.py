"""Reads a Dockerfile: its stages, and the instructions of each."""

from __future__ import annotations

import json
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
        text = self.arguments[self.arguments.find("[") :] if "[" in self.arguments else ""
        try:
            words = json.loads(text)
        except ValueError:
            return None
        return words if all(isinstance(word, str) for word in words) else None


@dataclass
class Stage:
    """What follows one FROM; `name` is empty for the stage without one."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def of(self, name: str) -> list[Instruction]:
        return [each for each in self.instructions if each.name == name]


@dataclass(frozen=True)
class Dockerfile:
    """`arguments` are the ARGs before the first stage, with their defaults."""

    arguments: dict[str, str]
    stages: list[Stage]

    @classmethod
    def read(cls, path: Path) -> Dockerfile:
        arguments: dict[str, str] = {}
        stages: list[Stage] = []
        for instruction in _instructions(path.read_text()):
            if instruction.name == "FROM":
                base, _, name = instruction.arguments.partition(" AS ")
                stages.append(Stage(base, name))
            elif stages:
                stages[-1].instructions.append(instruction)
            else:
                assert instruction.name == "ARG", f"{instruction.name} before the first FROM"
                name, _, default = instruction.arguments.partition("=")
                arguments[name] = default
        return cls(arguments, stages)

    def stage(self, name: str) -> Stage:
        (found,) = (stage for stage in self.stages if stage.name == name)
        return found

    @property
    def final(self) -> Stage:
        return self.stages[-1]


def _instructions(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    pairs = (line.strip().partition(" ") for line in joined.splitlines())
    return [Instruction(name, " ".join(rest.split())) for name, _, rest in pairs]
