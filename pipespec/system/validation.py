"""Reads and validates files and JSON that other programs wrote. Errors are `Unreadable`, whose text
is a clause: the caller, which knows the purpose of the file, adds the file's name and the remedy to
make a sentence."""

from __future__ import annotations

import errno
import json
import math
import os
import reprlib
import stat
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipespec.errors import ConfigError, PipespecError

# More than any settings, registry entries, figures or index of a checkpoint take.
MOST_BYTES = 64 * 2**20
LONGEST_SHOWN = 200
LONGEST_REASON = 400
T = TypeVar("T")


class Unreadable(Exception):
    """Why something cannot be read, as a clause."""


def reason(error: Exception, *, named: bool = True) -> str:
    """A library's message on one line, short enough for a sentence; `named`: after its type."""
    text = " ".join(str(error).split())
    if named or not text:
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return text[:LONGEST_REASON]


class Missing(Unreadable):
    """There is no such file."""


@contextmanager
def readable(
    what: str, remedy: str = "", kind: type[PipespecError] = ConfigError
) -> Iterator[None]:
    """Around what raises Unreadable: its clause between others, as the sentence of an error."""
    try:
        yield
    except Unreadable as error:
        raise kind(f"{what}: {error}{remedy and f'; {remedy}'}.") from error


# --- files ------------------------------------------------------------------------------------


def read_bytes(
    file: str | os.PathLike[str], *, most: int = MOST_BYTES, pipe: bool = False
) -> bytes:
    """What a file holds, up to `most` bytes; with `pipe` it may also be a pipe or a device. Raises
    Unreadable; Missing if there is none."""
    # Without a writer a pipe would be waited for, even to learn that it is one.
    extra = 0 if pipe else os.O_NONBLOCK
    try:
        with open(file, "rb", opener=lambda name, flags: os.open(name, flags | extra)) as stream:
            if not pipe and not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise Unreadable("it is no regular file")
            data = stream.read(most + 1)
    except OSError as error:
        kind = Missing if error.errno in (errno.ENOENT, errno.ENOTDIR) else Unreadable
        raise kind(error.strerror or "unknown error") from None
    except ValueError:  # a NUL, or half a character
        raise Missing("no file can have that name") from None
    if len(data) > most:
        raise Unreadable(f"it has more than {most} bytes")
    return data


def read_text(file: str | os.PathLike[str], *, most: int = MOST_BYTES, pipe: bool = False) -> str:
    return decode(read_bytes(file, most=most, pipe=pipe))


def decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is not UTF-8 text at byte {error.start}") from None


def is_whole(text: str) -> bool:
    """Whether a text holds no half characters (lone surrogates), which UTF-8 cannot have."""
    try:
        text.encode()  # a loop over the characters takes 200 times as long
    except UnicodeEncodeError:
        return False
    return True


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether there is such a folder; unlike `Path.is_dir` this takes any name."""
    return os.path.isdir(path)


def home_expanded(path: str | os.PathLike[str]) -> Path:
    """The path with `~` made a folder, if there is one of that user."""
    return Path(os.path.expanduser(path))


# --- JSON -------------------------------------------------------------------------------------


def parse_json(text: str | bytes) -> Any:
    if isinstance(text, bytes):
        text = decode(text)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise Unreadable(f"it is not JSON: {error}") from None
    except RecursionError:
        raise Unreadable("it is nested too deeply") from None
    except ValueError:
        raise Unreadable("it holds a number of too many digits") from None


def read_json(file: str | os.PathLike[str], *, pipe: bool = False) -> Any:
    return parse_json(read_text(file, pipe=pipe))


# --- values -----------------------------------------------------------------------------------

TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    list[str]: "a list of texts, as in [a,'1']",
    list[int]: "a list of whole numbers, as in [1,3,1]",
    list[float]: "a list of finite numbers, as in [8,2,0.5]",
    types.NoneType: "null",
}


def typed(name: str, value: Any, hint: Any) -> Any:
    """`value` as the type `hint`, made from what JSON or YAML has. A hint is bool, int, float, str,
    None, a sequence or a mapping of one, a tuple, a dataclass, a TypedDict, or one of several; a
    list may also be given as its only item, and with Any the value stays as it is. Raises
    Unreadable."""
    kinds = alternatives(hint)
    for kind in kinds:
        origin, inner = typing.get_origin(kind), typing.get_args(kind)
        if kind is Any:
            return value
        if origin is list:
            items = value if isinstance(value, list) else [value]
            if all(_is_plain(item, inner[0]) for item in items):
                return [inner[0](item) for item in items]
        elif origin in (tuple, Sequence):
            if isinstance(value, list | tuple):
                alike = inner[1:] in ((), (...,))
                hints = inner[:1] * len(value) if alike else inner
                if len(hints) == len(value):
                    pairs = zip(value, hints, strict=True)
                    return tuple(typed(f"{name}[{i}]", *pair) for i, pair in enumerate(pairs))
        elif origin is not None and issubclass(origin, Mapping):
            if isinstance(value, dict):
                return {key: typed(f"{name}.{key:.40}", value[key], inner[1]) for key in value}
        elif is_dataclass(kind):
            if isinstance(value, dict):
                return from_fields(typing.cast(type, kind), value, f"{name}.")
        elif typing.is_typeddict(kind):
            if isinstance(value, dict):
                return _entries(kind, value, f"{name}.")
        elif _is_plain(value, kind):
            return float(value) if kind is float else value
    wanted = " or ".join(map(_type_name, kinds))
    raise Unreadable(f"{name} is {shown(value)}, but must be {wanted}")


def _is_plain(value: Any, kind: Any) -> bool:
    """Whether a value is of a type without parts. True is no number, and a whole one is finite."""
    if kind is float and type(value) in (int, float):
        return _finite(value)
    return type(value) is kind


def from_fields(kind: type[T], value: Any, prefix: str = "") -> T:
    """The dataclass `kind` from an object of its fields; those with a default may be missing. The
    message does not show the values of fields that the class leaves out of its repr. Raises
    Unreadable."""
    assert is_dataclass(kind)
    known = {field.name: field for field in fields(kind)}
    needed = {
        name
        for name, field in known.items()
        if field.default is MISSING and field.default_factory is MISSING
    }
    if not isinstance(value, dict) or not needed <= value.keys() <= known.keys():
        what = prefix.rstrip(".") or "it"
        raise Unreadable(f"{what} must be a JSON object of {', '.join(known)}")
    hints = typing.get_type_hints(kind)
    values = {}
    for name, given in value.items():
        try:
            values[name] = typed(prefix + name, given, hints[name])
        except Unreadable:
            if known[name].repr:
                raise
            wanted = " or ".join(map(_type_name, alternatives(hints[name])))
            raise Unreadable(f"{prefix}{name} must be {wanted}") from None
    return kind(**values)


def _entries(kind: Any, value: dict[str, Any], prefix: str) -> dict[str, Any]:
    """A TypedDict; entries that it does not know are left out."""
    absent = sorted(kind.__required_keys__ - value.keys())
    if absent:
        raise Unreadable(f"{prefix}{absent[0]} is missing")
    hints = typing.get_type_hints(kind)
    return {n: typed(prefix + n, value[n], hint) for n, hint in hints.items() if n in value}


def alternatives(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return typing.get_args(hint)
    return (hint,)


def shown(value: Any) -> str:
    try:
        text = _SHORT.repr(value)
    except ValueError:
        return "a number of too many digits"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def _finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number beyond all floats
        return False


def _type_name(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if kind in TYPE_NAMES:
        return TYPE_NAMES[kind]
    if origin in (tuple, Sequence):
        return "a list"
    return "an object"


_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = 20
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = LONGEST_SHOWN
