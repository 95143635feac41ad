"""Files and JSON of others: bounds, kinds of files, and values of the wrong type."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import pytest

from pipespec.cli.main import main
from pipespec.system import validation
from pipespec.system.folders import resource_dir
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


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("pipespec: ")
    assert err.count("\n") == 1
    return err


# --- files ------------------------------------------------------------------------------------


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


# --- JSON -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "why"), [*BAD, (DIGITS, "too many digits")])
def test_json_that_cannot_be(text: str, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        parse_json(text.encode(errors="surrogateescape"))


@pytest.mark.parametrize(("text", "why"), [*BAD, (f'{{"stages": {DIGITS}}}', "too many digits")])
@pytest.mark.parametrize("kind", ["profile", "figures"])
def test_files_on_the_command_line(
    kind: str, text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, hosts_file = tmp_path / "given.json", tmp_path / "two.yaml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    hosts_file.write_text("hosts: [{address: 127.0.0.1, ssh: local, devices: [cpu, cpu]}]")
    argv = {
        "profile": ["plan", "--profile", str(file)],
        "figures": ["plan", "--profile", str(file), str(hosts_file)],
    }[kind]
    assert why in refused(capsys, *argv)


@pytest.mark.parametrize("command", [["plan", "--profile"], ["generate", "--prompt-file"]])
def test_a_device_without_an_end_is_not_read_for_ever(
    command: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "more than" in refused(capsys, *command, "/dev/zero")
    assert "more than" in refused(capsys, "bench", "--dataset", "/dev/zero")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *[(text, why) for text, why in BAD if why != "not JSON"],
        ("hosts: 0x" + "f" * 9000, "a number of too many digits"),
        (f"hosts: {DIGITS}", "must be a list"),
        ("{", "is not YAML"),
    ],
)
def test_hosts_files(
    text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    # All commands read it in the same place, two of them by way of the settings.
    for argv in (["doctor", str(file)], ["up", f"cluster={file}"]):
        assert why in refused(capsys, *argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["bench", "--num-prompts", DIGITS],
        ["bench", "--concurrency", DIGITS],
        ["plan", "--tokens", DIGITS],
        ["plan", f"policy.width=8,{DIGITS}"],
        ["plan", f"curve={DIGITS}:0.5"],
        ["plan", f"stage_ms={DIGITS}:5"],
        ["generate", "--prompt", "a", f"policy.width={DIGITS}"],
        ["generate", "--prompt", "a", f"cluster.patience_s={'9' * 400}"],
        ["generate", "--prompt", "a", f"cluster.devices=[cuda:{DIGITS}]"],
        [
            "generate",
            "--prompt",
            "a",
            "sampling.temperature=1",
            f"sampling.logit_bias=['{DIGITS}:1']",
        ],
    ],
)
def test_numbers_of_very_many_digits(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, *argv)
    assert said.rstrip().endswith("."), "a whole sentence"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("\udcff", "not UTF-8 text at byte 0"),
        ("[1]", "must be texts"),
        (f"[{DIGITS}]", "too many digits"),
        ('["cluster=a\\u0000.yaml"]', "no file can have that name"),
        ('["trace=a\\u0000"]', "writes no trace"),
    ],
)
def test_settings_on_standard_input(text: str, why: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "pipespec", "up", "-"],
        input=text.encode(errors="surrogateescape"),
        capture_output=True,
    )
    assert answer.returncode == 2
    assert why in answer.stderr.decode()
    assert answer.stderr.count(b"\n") == 1


# --- values -----------------------------------------------------------------------------------


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


def test_the_bound_leaves_room_for_what_is_shipped() -> None:
    sizes = [file.stat().st_size for file in resource_dir("demo").rglob("*.json")]
    assert max(sizes) * 10 < validation.MOST_BYTES
