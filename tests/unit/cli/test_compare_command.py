"""What `pipespec compare` refuses before anything starts, and what it makes of figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pipespec.client.compare
from pipespec.cli.compare import Board, end_of
from pipespec.cli.main import main
from pipespec.cli.terminal import show
from pipespec.client.compare import Comparison, Standing
from tests.helpers.figures import LABELS, result

WAYS = ["feed=root", "feed=level"]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command; it must end with one sentence before any agent starts."""
    import pipespec.cluster.session

    def none(*_: object, **__: object) -> None:
        raise AssertionError("an agent was started")

    monkeypatch.setattr(pipespec.cluster.session, "Cluster", none)

    def run(*arguments: str) -> str:
        code = main(["compare", *arguments])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert err.startswith("pipespec: ")
        assert err.count("\n") == 1
        return err

    return run


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--prompt", "a"], "No way was given"),
        ([*WAYS], "Pass the prompt in one way"),
        ([*WAYS, "--prompt", "a", "-"], "Pass the prompt in one way"),
        ([*WAYS, "--prompt", "a", "num_prompts=2"], "A prompt and a data set are both given"),
        ([*WAYS, "dataset=/no/such/file"], "/no/such/file"),
        ([*WAYS, "num_prompts=0"], "num_prompts is 0"),
        ([*WAYS, "--prompt", "a", "prompt_tokens=0"], "prompt_tokens is 0"),
        ([*WAYS, "--prompt", "a", "--on", "lab"], "'--on' does not exist"),
        ([*WAYS, "--prompt", "a", "cluster.stages=17"], "only 16 layers"),
        ([*WAYS, "--prompt", "a", "feed=level feed.width=-1"], "feed.width is -1"),
        ([*WAYS, "--prompt", "a", "feed=best_first pace=fixed"], "a way sets feed.* alone"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(
    refused: Any, arguments: list[str], part: str
) -> None:
    assert part in refused(*arguments)


# --- the table --------------------------------------------------------------------------------


def test_ways_fill_the_table_one_after_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    board = Board(WAYS)

    def row(way: str) -> list[str]:
        show(board.table())
        (line,) = (x for x in capsys.readouterr().out.splitlines() if x.strip().startswith(way))
        return line.split()

    assert row("feed=root") == ["feed=root"]
    root = Standing("feed=root", LABELS, "of a king", 2, 4.0)
    board.change(root)
    assert row("feed=root") == ["feed=root", "of", "a", "king", "2", "4.00", "-", "-"]
    root.finish(result([1, 2, 3], between_ms=20.0))
    assert row("feed=root") == ["feed=root", "2", "50.00", "0.50", "1.00x"]
    board.change(Standing("feed=level", LABELS, "of a", 1, 125.0))
    assert row("feed=level") == ["feed=level", "of", "a", "1", "125.00", "-", "2.50x"]


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_end_of_the_text_has_the_room_that_there_is(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    way = "feed=best_first feed.children=16"
    board = Board([way])
    standing = Standing(way, LABELS | {"emulated": True}, "", 12345, 1234.56)
    standing.finish(result([1, 2, 3], between_ms=0.5))
    standing.text = "x" * 300
    board.change(standing)
    show(board.table())
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    for part in ("feed=best_first", "feed.children=16", "12345", "2000.00", "0.50", "1.00x"):
        assert part in out
    assert "x" * 12 in out
    assert ("x" * 64 in out) == (columns == 200)


def test_what_is_not_measured_on_this_machine_is_labelled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    board = Board(WAYS)
    plain = Standing("feed=root", LABELS)
    plain.finish(result([1, 2, 3]))
    board.change(plain)
    show(board.table())
    out = capsys.readouterr().out
    assert not {"EMULATED", "overruns"} & set(out.split())
    board.change(replace(plain, labels=LABELS | {"emulated": True}))
    show(board.table())
    out = capsys.readouterr().out
    assert "times EMULATED" in out
    assert "overruns" in out


def test_the_end_of_a_text_is_one_line_without_control_characters() -> None:
    assert end_of("before" + "a" * 4 + "\n\nb\x1b[2Jc  d", 13) == "aaaa b [2Jc d"


# --- how it ends ------------------------------------------------------------------------------


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("lossy", "other", "code", "told"),
    [
        (False, [1, 2, 3], 0, "equal, token for token"),
        (False, [1, 2, 4], 1, "Texts differ from those of feed=root: 1 with feed=level."),
        (True, [1, 2, 4], 0, "as the verifier is LOSSY: 1 with feed=level."),
    ],
)
def test_texts_that_differ_are_an_error_unless_the_verifier_is_lossy(
    as_json: bool,
    lossy: bool,
    other: list[int],
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = result([1, 2, 3]), result(other)
    for each in (first, second):
        each.labels.update(LABELS)
    done = Comparison({"feed=root": first, "feed=level": second})
    monkeypatch.setattr(Comparison, "labels", LABELS | {"lossy": lossy})

    def decoded(*_: object, **given: Any) -> Comparison:
        for way, each in done.results.items():
            standing = Standing(way, done.labels)
            standing.finish(each)
            given["on_change"](standing)
        return done

    monkeypatch.setattr(pipespec.client.compare, "compare", decoded)
    arguments = [*WAYS, "--prompt", "a", *["--json"] * as_json]
    assert main(["compare", *arguments]) == code
    out, err = capsys.readouterr()
    if as_json:
        found = json.loads(out)
        assert found["equal"] is (other == [1, 2, 3])
        assert [way["answers"][0]["token_ids"] for way in found["ways"]] == [[1, 2, 3], other]
    else:
        assert "feed=level" in out
        assert told in (err if code else out)
    if code:
        assert err == f"pipespec: {told}\n"


def test_a_data_set_that_is_no_folder_is_named(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    assert "empty.jsonl" in refused(*WAYS, f"dataset={tmp_path / 'empty.jsonl'}")
