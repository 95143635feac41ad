"""The entries of a hosts file, each with its kind: a function of `(name, value)`. It returns the
value that is kept, and raises `Wrong` with a sentence that names it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Any

from pipespec.errors import ConfigError
from pipespec.limits import A_DEVICE, DEVICE, LARGEST_PORT, MAX_COUNT, fault, suggest
from pipespec.system.validation import shown

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LONGEST_HOST = 64  # Linux's own host names are no longer
KIND = "kind"  # the key in a field's metadata

Kind = Callable[[str, Any], Any]


class Wrong(ConfigError):
    """What is wrong with the file, still without the file's name."""


def entry(kind: Kind, default: Any = None) -> Any:
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata={KIND: kind})
    return field(default=default, metadata={KIND: kind})


def kinds(cls: type) -> dict[str, Kind]:
    return {each.name: each.metadata[KIND] for each in fields(cls) if KIND in each.metadata}


def read(where: str, values: Any, known: Mapping[str, Kind], prefix: str = "") -> dict[str, Any]:
    """The known entries of a mapping; those that are null are left out."""
    names = list(known)
    if not isinstance(values, dict):
        raise Wrong(
            f"{where} is {shown(values)}, but must hold settings such as {names[0]}: VALUE."
        )
    for key in values:
        if key not in known:
            raise Wrong(
                f"{where} has an unknown setting {shown(key)}; {suggest(shown(key), names)}."
            )
    given = {key: value for key, value in values.items() if value is not None}
    return {key: known[key](prefix + key, value) for key, value in given.items()}


def matching(pattern: str, must: str, most: int = 4096) -> Kind:
    """The kind of a text in one line, of so many characters, that a regular expression matches."""

    def text(name: str, value: Any) -> str:
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise Wrong(f"{name} is {shown(value)}, but must be a text.")
        if not re.fullmatch(pattern, value):
            raise Wrong(f"{name} is {shown(value)}, but must {must}.")
        if len(value) > most:
            raise Wrong(f"{name} has {len(value)} characters, but may have {most}; shorten it.")
        return value

    return text


def number(least: float, most: float, *, whole: bool = True, **how: Any) -> Kind:
    """The kind of a number in a range (`fault`)."""

    def in_range(name: str, value: Any) -> float:
        wrong = fault(name, value, least, most, whole=whole, **how)
        if wrong:
            raise Wrong(wrong)
        return int(value) if whole else float(value)

    return in_range


def list_of(kind: Kind) -> Kind:
    """The kind of a list that is not empty, of values that are named as the list is."""

    def filled(name: str, value: Any) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise Wrong(f"{name} is {shown(value)}, but must be a list of at least one.")
        return [kind(name, each) for each in value]

    return filled


def anything(_: str, value: Any) -> Any:
    """What is checked elsewhere."""
    return value


# A text on a command line, which is never an option, and a path, which may hold spaces.
argument = matching(r"[^- ][^ ]*", "not begin with '-' or hold a space")
path = matching(r"[^-].*", "not begin with '-'")
host_name = matching(
    r"[A-Za-z0-9_][A-Za-z0-9_.:-]*",
    "be letters, digits, '_', '-', '.' and ':'; give the host another name",
    most=LONGEST_HOST,
)
port = number(1, LARGEST_PORT)
gib = number(0, MAX_COUNT, whole=False, above=True, hint=" (GiB)")


def numbered(device: str) -> str:
    return "cuda:0" if device == "cuda" else device


def devices(name: str, value: Any) -> tuple[tuple[str, ...], ...]:
    """Devices of a host, one per worker, those that compute a stage together in a list of their
    own; a single one needs no list. "cuda" is "cuda:0"."""
    listed = list_of(anything)(name, [value] if isinstance(value, str) else value)
    together = list_of(anything)
    groups = tuple(
        tuple(together(f"a group in {name}", each)) if isinstance(each, list) else (each,)
        for each in listed
    )
    for device in (device for group in groups for device in group):
        if not isinstance(device, str) or not DEVICE.fullmatch(device):
            raise Wrong(f"{name} holds {shown(device)}, but {A_DEVICE}.")
    groups = tuple(tuple(map(numbered, group)) for group in groups)
    found = [device for group in groups for device in group]
    if "auto" in found and len(found) > 1:
        raise Wrong(f"{name} holds 'auto' beside others; name each device, as in [cuda:0, cpu].")
    cuda = [device for device in found if device != "cpu"]
    twice = next((device for device in cuda if cuda.count(device) > 1), None)
    if twice is not None:
        raise Wrong(f"{name} holds {twice!r} twice; a CUDA device can hold one worker.")
    for group in groups:
        if len({device.partition(":")[0] for device in group}) > 1:
            raise Wrong(
                f"{name} has {shown(list(group))} compute together, but those must be of one kind; "
                "make each a stage of its own."
            )
    return groups


def env(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise Wrong(f"{name} must map names to texts, as in {{OMP_NUM_THREADS: 8}}.")
    for key, item in value.items():
        if not isinstance(key, str) or not VARIABLE.fullmatch(key):
            raise Wrong(f"{name} holds {shown(key)}, which cannot be the name of a variable.")
        if type(item) not in (str, int, float) or not str(item).isprintable():
            # The value itself may be a secret.
            raise Wrong(f"{name}.{key} must be a text in one line; put it in quotes.")
    return {key: str(item) for key, item in value.items()}
