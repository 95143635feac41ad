"""Files and JSON of others: bounds, kinds of files, and values of the wrong type."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import pytest

from pipespec.system.validation import (
    LONGEST_SHOWN,
    Missing,
    Unreadable,
    from_fields,
    parse_json,
    read_bytes,
    shown,
    typed,
)

NESTED = "[" * 3000 + "]" * 3000
DIGITS = "9" * 5000
# What no reader of JSON or YAML can take.
BAD = [
    (NESTED, "nested too deeply"),
    (f'{{"a": {NESTED}}}', "nested too deeply"),
    ("\udcff", "not UTF-8 text at byte 0"),
    ("{", "not JSON"),
]


def test_no_more_is_read_than_is_allowed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    assert read_bytes(file, most=3) == b"abc"
    with pytest.raises(Unreadable, match="more than 2 bytes"):
        read_bytes(file, most=2)
    with pytest.raises(Unreadable, match="more than 1000 bytes"):
        read_bytes("/dev/zero", most=1000, pipe=True)


def test_a_pipe_is_read_only_where_one_is_expected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(Unreadable, match="no regular file"):
            read_bytes(other)
    writer = "import sys; open(sys.argv[1], 'w').write('abc')"
    with subprocess.Popen([sys.executable, "-c", writer, str(tmp_path / "pipe")]):
        assert read_bytes(tmp_path / "pipe", pipe=True) == b"abc"


@pytest.mark.parametrize("name", ["missing", "a\0b", "\ud800", "file/below"])
def test_a_file_that_is_not_there(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Missing):
        read_bytes(tmp_path / name)


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="File name too long"):
        read_bytes(tmp_path / ("n" * 300))


@pytest.mark.parametrize(("text", "why"), [*BAD, (DIGITS, "too many digits")])
def test_json_that_cannot_be(text: str, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        parse_json(text.encode(errors="surrogateescape"))


class Part(TypedDict):
    size: int


@dataclass(frozen=True)
class Whole:
    count: int
    secret: str = field(default="", repr=False)
    part: Part | None = None
    names: tuple[str, ...] = ()


def test_an_object_becomes_a_dataclass() -> None:
    value = {"count": 1, "part": {"size": 2, "other": 3}, "names": ["a"]}
    assert from_fields(Whole, value) == Whole(1, part={"size": 2}, names=("a",))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([], "it must be a JSON object of count, secret, part, names"),
        ({}, "it must be a JSON object"),
        ({"count": 1, "more": 2}, "it must be a JSON object"),
        ({"count": True}, "count is True, but must be a whole number"),
        ({"count": 1, "secret": 3}, "secret must be a text"),
        ({"count": 1, "part": {"size": 1.5}}, "part.size is 1.5, but must be a whole number"),
        ({"count": 1, "part": {}}, "part.size is missing"),
        ({"count": 1, "names": "ab"}, "names is 'ab', but must be a list"),
        ({"count": 1, "names": ["a", None]}, r"names\[1\] is None, but must be a text"),
    ],
)
def test_an_object_of_another_kind(value: Any, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        from_fields(Whole, value)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (float("nan"), float),
        (float("inf"), float),
        (10**400, float),
        ({"a": "1"}, Mapping[str, float]),
        ([1, "2", 3], Sequence[int]),
        ([[1]], Sequence[str | float]),
    ],
)
def test_a_value_of_another_type(value: Any, hint: Any) -> None:
    with pytest.raises(Unreadable, match="but must be"):
        typed("it", value, hint)


def test_a_message_shows_a_part_of_what_is_long() -> None:
    assert shown([1, 2]) == "[1, 2]"
    assert len(shown("x" * 10**6)) <= LONGEST_SHOWN
    assert len(shown([["y" * 1000] * 1000] * 1000)) <= LONGEST_SHOWN + 1
    assert shown(16**9000) == "a number of too many digits"
