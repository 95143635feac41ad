"""Writes the sections of docs/settings.md from the dataclasses of settings and the files of conf/.

python -m tools.settings_reference
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from dataclasses import Field, dataclass, fields
from typing import Any

from pipespec.config.choices import (
    Choice,
    default,
    default_choices,
    options,
    read_choice,
    written,
)
from pipespec.config.schema import RunConfig
from pipespec.settings import about, kinds
from pipespec.system.folders import resource_dir
from pipespec.system.validation import alternatives
from tools.docs.markdown import ROOT, by_hand, table

PAGE = ROOT / "docs" / "settings.md"
CHOICE = ("choice", "what it is", "sets")
SETTING = ("setting", "type", "default", "unit", "what it does")
UNLIMITED = 10**6  # a limit from here on is there for safety alone, and is not shown
# What holds a cluster to other times, for benchmarks.
INSTRUMENTS = ("emulate", "emulate_link")
SYNTHETIC = "synthetic"  # the choices of `proposer` that are instruments too
# The groups whose choices are of different classes; the others are described by their class.
GROUPS = {
    "policy": "The decoding method: which draft tokens are made, and which are computed at a step.",
    "proposer": "Where draft tokens come from.",
}
NAMES = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    list[str]: "list of texts",
    list[int]: "list of whole numbers",
    list[float]: "list of numbers",
    types.NoneType: "null",
}


@dataclass(frozen=True)
class Row:
    """A setting of a group, with the choices that have it and the default of each."""

    name: str
    kind: str
    unit: str
    help: str
    defaults: dict[str, str]
    experimental: bool = False

    @property
    def instrument(self) -> bool:
        """Whether it is one of an instrument."""
        group = self.name.partition(".")[0]
        of_synthetic = all(choice.startswith(SYNTHETIC) for choice in self.defaults)
        return not self.experimental and (group in INSTRUMENTS or of_synthetic)

    @property
    def line(self) -> str:
        """It in one line."""
        return f"{code(self.name)} ({self.default}): {self.help}"

    def cells(self, num_choices: int) -> list[str]:
        """The cells of its line in the table of a group of so many choices."""
        some = len(self.defaults) < num_choices
        only = f" Only with {listed(map(code, self.defaults))}." if some else ""
        return [code(self.name), self.kind, self.default, self.unit, self.help + only]

    @property
    def default(self) -> str:
        """The default; where choices differ, that of each."""
        by_value: dict[str, list[str]] = {}
        for choice, value in self.defaults.items():
            by_value.setdefault(value, []).append(choice)
        (first, _), *others = by_value.items()
        differing = [f"{shown(value)} with {listed(map(code, of))}" for value, of in others]
        return "; ".join([shown(first), *differing])


def page() -> str:
    """The whole page."""
    return "\n".join([by_hand(PAGE), *map(section, default_choices()), last(), *others()])


def others() -> list[str]:
    """A line for each setting that is no user's: experimental ones, then those of instruments."""
    lines = ["## Experimental settings", "", "They may change or go.", ""]
    found = {group: rows_of(group) for group in default_choices()}
    lines += [f"- {row.line}" for rows in found.values() for row in rows if row.experimental]
    lines += ["", "## Instruments", "", "They hold a cluster to other times, or make draft tokens "]
    lines[-1] += "of a stated accuracy, for benchmarks; results are labelled."
    lines += ["", *(f"- {row.line}" for rows in found.values() for row in rows if row.instrument)]
    return [*lines, ""]


def rows_of(group: str) -> list[Row]:
    """All settings of a group."""
    return settings_of([read_choice(group, name) for name in sorted_options(group)])


def sorted_options(group: str) -> list[str]:
    """The choices of a group, its default first."""
    usual = default_choices()[group]
    return sorted(options(group), key=lambda name: name != usual)


def section(group: str) -> str:
    """A group: its choices and its settings."""
    usual = default_choices()[group]
    choices = [read_choice(group, name) for name in sorted_options(group)]
    purpose = GROUPS.get(group) or (choices[0].cls.__doc__ or "").partition("\n\n")[0]
    lines = [f"## {group}", "", " ".join(purpose.split()), ""]
    cells = (
        [code(c.name) + " (default)" * (c.name == usual), comment(c), changes(c)] for c in choices
    )
    lines.append(table(CHOICE, cells))
    rows = [row for row in settings_of(choices) if not (row.experimental or row.instrument)]
    if rows:
        lines.append(table(SETTING, (row.cells(len(choices)) for row in rows)))
    return "\n".join(lines)


def last() -> str:
    """The settings without a group."""
    rows = [row(entry, RunConfig, entry.name, None) for entry in fields(RunConfig)]
    lines = table(SETTING, (each.cells(1) for each in rows))
    return "\n".join(["## Settings without a group", "", lines])


def settings_of(choices: Sequence[Choice]) -> list[Row]:
    """All settings of a group; one of the same name and meaning in several choices is one row."""
    found: dict[tuple[str, str], Row] = {}
    for choice in choices:
        for entry in fields(choice.cls):
            new = row(entry, choice.cls, f"{choice.group}.{entry.name}", choice)
            found.setdefault((new.name, new.help), new).defaults.update(new.defaults)
    return list(found.values())


def row(entry: Field[Any], cls: type, name: str, choice: Choice | None) -> Row:
    """A setting of one choice."""
    its, of_type = about(entry), alternatives(kinds(cls)[entry.name])
    if its.choices:
        kind = listed(map(code, its.choices), "or")
    else:
        kind = listed([NAMES[each] for each in of_type if each is not types.NoneType], "or")
    if its.limits is not None:
        least, most = its.limits
        kind += f" {'above' if its.above else 'from'} {least:.0f}"
        kind += f" to {most:.0f}" if most < UNLIMITED else ""
    kind += ", or null" if types.NoneType in of_type else ""
    usual = default(entry) or choice.default(entry) if choice else default(entry)
    defaults = {choice.name if choice else "": usual}
    return Row(name, kind, its.unit, its.help, defaults, its.experimental)


def changes(choice: Choice) -> str:
    """What the file of a choice sets; a long list is not repeated."""
    found = [
        f"{name}={text if len(text := written(value)) < 60 else '[…]'}"
        for name, value in choice.values.items()
    ]
    return listed(map(code, found))


def comment(choice: Choice) -> str:
    """The comment at the head of a choice's file."""
    file = resource_dir("conf") / choice.group / f"{choice.name}.yaml"
    lines = file.read_text(encoding="utf-8").splitlines()
    text = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
    return text if text.endswith(".") else f"{text}."


def shown(value: str) -> str:
    """A default as the table shows it."""
    return code(value) if value else "required"


def code(text: str) -> str:
    """Text as code."""
    return f"`{text}`"


def listed(words: Iterable[str], last_word: str = "and") -> str:
    """Words as a list in a sentence."""
    *rest, last_one = [*words] or [""]
    return f"{', '.join(rest)} {last_word} {last_one}" if rest else last_one


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
