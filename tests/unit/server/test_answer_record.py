"""The record of token ids that `pipespec serve` keeps where a user asks for it."""

import json
from pathlib import Path

import pytest

from pipespec.cli.main import main
from pipespec.errors import ConfigError
from pipespec.server import answer_record
from pipespec.server.answer_record import AnswerRecord


def keep(folder: Path, *answers: list[int]) -> None:
    """Write them in a server's life."""
    record = AnswerRecord(str(folder), "a model")
    for answer in answers:
        record.add([([1, 2], answer)])


def kept(folder: Path) -> list[int]:
    """The first tokens of all answers."""
    lines = [line for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()]
    return [json.loads(line)["answer"][0] for line in lines]


def test_the_oldest_answers_go_beyond_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(answer_record, "FILE_BYTES", 500)
    monkeypatch.setattr(answer_record, "MOST_BYTES", 2500)
    folder = tmp_path / "kept"
    keep(folder, *([number] * 20 for number in range(40)))
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 2500
    first = kept(folder)
    assert first == [*range(first[0], 40)] and 0 < first[0] < 30
    keep(folder, [40])  # another start has a file of its own
    assert kept(folder)[-2:] == [39, 40]


def test_answers_without_tokens_are_left_out(tmp_path):
    keep(tmp_path / "kept", [], [7])
    assert kept(tmp_path / "kept") == [7]


def test_a_folder_that_others_may_open_is_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="is open to others or closed to you; run chmod 700"):
        AnswerRecord(str(tmp_path / "open"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be kept in .*: File exists"):
        AnswerRecord(str(tmp_path / "file"))


def test_a_disk_that_fails_ends_the_record_with_one_sentence(tmp_path, capsys):
    record = AnswerRecord(str(tmp_path / "kept"), "a model")
    record.folder.rmdir()
    for _ in range(3):
        record.add([([1], [2])])
    (line,) = capsys.readouterr().err.splitlines()
    assert "Answers are no longer kept in" in line and "No such file" in line


def test_serve_refuses_such_a_folder_before_it_starts_anything(tmp_path, monkeypatch, capsys):
    (tmp_path / "open").mkdir(mode=0o755)
    monkeypatch.setenv("PIPESPEC_ANSWERS", str(tmp_path / "open"))
    assert main(["serve", "--on", "none", "--port", "0"]) == 2
    assert "is open to others or closed to you" in capsys.readouterr().err
