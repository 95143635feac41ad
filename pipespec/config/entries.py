"""What may stand in a hosts file: kinds of values, each a function of `(name, value)`.

They return the value that is kept, and raise `Wrong` with a sentence that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from pipespec.limits import A_DEVICE, DEVICE, LARGEST_PORT, MAX_COUNT, fault, suggest
from pipespec.system.reading import shown

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Kind = Callable[[str, Any], Any]


class Wrong(Exception):
    """What is wrong with the file, still without the file's name."""


def text(name: str, value: Any) -> str:
    """One line that is not empty."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise Wrong(f"{name} is {shown(value)}, but must be a text.")
    return value


def argument(name: str, value: Any) -> str:
    """A text that may stand on a command line: an option in disguise is refused."""
    found = text(name, value)
    if found.startswith("-") or any(character.isspace() for character in found):
        raise Wrong(f"{name} is {shown(found)}, but must not begin with '-' or hold a space.")
    return found


def path(name: str, value: Any) -> str:
    """A path, which may hold spaces, or the name of a program."""
    found = text(name, value)
    if found.startswith("-"):
        raise Wrong(f"{name} is {shown(found)}, but must not begin with '-'.")
    return found


def host_name(name: str, value: Any) -> str:
    """A name of a host or a cluster."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise Wrong(
            f"{name} is {shown(value)}, but must be letters, digits, '_', '-', '.' and ':'; "
            "give the host another name."
        )
    return value


def whole(name: str, value: Any, least: int, most: int) -> int:
    """A whole number in a range."""
    wrong = fault(name, value, least, most)
    if wrong:
        raise Wrong(wrong)
    return int(value)


def port(name: str, value: Any) -> int:
    """A TCP port."""
    return whole(name, value, 1, LARGEST_PORT)


def gib(name: str, value: Any) -> float:
    """An amount of memory."""
    wrong = fault(name, value, 0, MAX_COUNT, whole=False, above=True, hint=" (GiB)")
    if wrong:
        raise Wrong(wrong)
    return float(value)


def filled_list(name: str, value: Any) -> list[Any]:
    """A list that is not empty."""
    if not isinstance(value, list) or not value:
        raise Wrong(f"{name} is {shown(value)}, but must be a list of at least one.")
    return value


def devices(name: str, value: Any) -> tuple[tuple[str, ...], ...]:
    """Devices of a host, one per worker, those that compute a stage together in a list of their
    own; a single one may stand without a list."""
    listed = filled_list(name, [value] if isinstance(value, str) else value)
    groups = tuple(
        tuple(filled_list(f"a group in {name}", each)) if isinstance(each, list) else (each,)
        for each in listed
    )
    found = [device for group in groups for device in group]
    for device in found:
        if not isinstance(device, str) or not DEVICE.fullmatch(device):
            raise Wrong(f"{name} holds {shown(device)}, but {A_DEVICE}.")
    if "auto" in found and len(found) > 1:
        raise Wrong(f"{name} holds 'auto' beside others; name each device, as in [cuda:0, cpu].")
    cuda = [device if ":" in device else "cuda:0" for device in found if device != "cpu"]
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
    """Variables of the environment."""
    if not isinstance(value, dict):
        raise Wrong(f"{name} must map names to texts, as in {{OMP_NUM_THREADS: 8}}.")
    for key, item in value.items():
        if not isinstance(key, str) or not VARIABLE.fullmatch(key):
            raise Wrong(f"{name} holds {shown(key)}, which cannot be the name of a variable.")
        if type(item) not in (str, int, float) or not str(item).isprintable():
            # The value itself may be a secret.
            raise Wrong(f"{name}.{key} must be a text in one line; put it in quotes.")
    return {key: str(item) for key, item in value.items()}


def known(where: str, values: Any, keys: Sequence[str]) -> dict[str, Any]:
    """`values` as a mapping of known keys; those that are null are left out."""
    if not isinstance(values, dict):
        raise Wrong(f"{where} is {shown(values)}, but must hold settings such as {keys[0]}: VALUE.")
    for key in values:
        if key not in keys:
            raise Wrong(
                f"{where} has an unknown setting {shown(key)}; {suggest(shown(key), keys)}."
            )
    return {key: value for key, value in values.items() if value is not None}
