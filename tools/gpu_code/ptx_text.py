"""Reads the PTX text of one kernel as Triton writes it: instructions, labels and parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"\.entry\s+(\w+)")
_PARAM = re.compile(r"^\s*\.param\s+\.(\w+)[^,\n]*?(\w+_param_\d+),?\s*$", re.MULTILINE)
_THREADS = re.compile(r"\.reqntid\s+(\d+)")
_STATEMENT = re.compile(r"^(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)
_ADDRESS = re.compile(r"^\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]$")


@dataclass(frozen=True)
class Address:
    """`[base + offset]`; the base is a register, or the name of a parameter or of shared memory."""

    base: str
    offset: int


Operand = str | tuple[str, ...] | Address


@dataclass(frozen=True)
class Instruction:
    """`@guard opcode operands`; `parts` is the opcode split at its dots."""

    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: str | None
    negated: bool
    text: str


@dataclass(frozen=True)
class Program:
    """A kernel: `params` are the types of its parameters by name, in order, and `labels` the
    indices of instructions."""

    name: str
    params: dict[str, str]
    threads: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


def read_program(text: str) -> Program:
    """The only kernel of this PTX. Raises ValueError where the text is not what Triton writes."""
    text = re.sub(r"//[^\n]*", "", text)
    names, threads = _NAME.findall(text), _THREADS.search(text)
    if len(names) != 1 or threads is None:
        raise ValueError(f"PTX of one kernel with a fixed number of threads, not of {names}")
    begin = text.index("{", threads.end())
    end = text.index("\n}", begin)
    instructions, labels = [], dict[str, int]()
    # Inline assembly is a statement of its own, without braces of its own.
    for statement in text[begin + 1 : end].split(";"):
        lines = [line.strip() for line in statement.split("\n")]
        while lines and (not lines[0] or lines[0].startswith(".") or lines[0].endswith(":")):
            line = lines.pop(0)
            if line.endswith(":"):
                labels[line[:-1]] = len(instructions)
        body = " ".join(line for line in lines if line and not line.startswith(".loc"))
        if body:
            instructions.append(_instruction(body))
    params = {name: kind for kind, name in _PARAM.findall(text)}
    return Program(names[0], params, int(threads.group(1)), tuple(instructions), labels)


def _instruction(text: str) -> Instruction:
    match = _STATEMENT.match(text)
    if match is None:
        raise ValueError(f"no PTX instruction: {text!r}")
    negated, guard, opcode, rest = match.groups()
    operands = tuple(_operand(each) for each in _split(rest))
    return Instruction(tuple(opcode.split(".")), operands, guard, bool(negated), text)


def _split(text: str) -> list[str]:
    """Operands, which commas outside of braces separate."""
    found, depth, current = [], 0, ""
    for char in text:
        depth += (char == "{") - (char == "}")
        if char == "," and not depth:
            found.append(current.strip())
            current = ""
        else:
            current += char
    return [*found, current.strip()] if current.strip() else found


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(each.strip() for each in text.strip("{} ").split(","))
    if text.startswith("["):
        match = _ADDRESS.match(text)
        if match is None:
            raise ValueError(f"no PTX address: {text!r}")
        return Address(match.group(1), int(match.group(2) or 0))
    return text
