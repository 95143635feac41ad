"""What `pipespec compare` refuses before anything starts, and what it makes of figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pipespec.instruments.bench.comparison
from pipespec.cli.main import main
from pipespec.console.terminal import show
from pipespec.instruments.bench.comparison import Comparison, Standing
from pipespec.instruments.commands.compare import Board, end_of
from tests.helpers.figures import LABELS, result

POLICIES = ["policy=root", "policy=level"]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command; it must end with one sentence before any agent starts."""
    import pipespec.cluster.session

    def none(*_: object, **__: object) -> None:
        raise AssertionError("an agent was started")

    monkeypatch.setattr(pipespec.cluster.session, "WorkerGroup", none)

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
        (["--prompt", "a"], "No policy was given"),
        ([*POLICIES], "Pass the prompt in one way"),
        ([*POLICIES, "--prompt", "a", "-"], "Pass the prompt in one way"),
        ([*POLICIES, "--prompt", "a", "num_prompts=2"], "A prompt and a data set are both given"),
        ([*POLICIES, "dataset=/no/such/file"], "/no/such/file"),
        ([*POLICIES, "num_prompts=0"], "num_prompts is 0"),
        ([*POLICIES, "--prompt", "a", "prompt_tokens=0"], "prompt_tokens is 0"),
        ([*POLICIES, "--prompt", "a", "--on", "lab"], "'--on' does not exist"),
        ([*POLICIES, "--prompt", "a", "cluster.stages=17"], "only 16 layers"),
        ([*POLICIES, "--prompt", "a", "policy=level policy.width=-1"], "policy.width is -1"),
        ([*POLICIES, "--prompt", "a", "policy=best_first emulate=fixed"], "sets policy.* alone"),
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
    board = Board(POLICIES)

    def row(policy: str) -> list[str]:
        show(board.table())
        (line,) = (x for x in capsys.readouterr().out.splitlines() if x.strip().startswith(policy))
        return line.split()

    assert row("policy=root") == ["policy=root"]
    root = Standing("policy=root", LABELS, "of a king", 2, 4.0)
    board.change(root)
    assert row("policy=root") == ["policy=root", "of", "a", "king", "2", "4.00", "-", "-"]
    root.finish(result([1, 2, 3], between_ms=20.0))
    assert row("policy=root") == ["policy=root", "2", "50.00", "0.50", "1.00x"]
    board.change(Standing("policy=level", LABELS, "of a", 1, 125.0))
    assert row("policy=level") == ["policy=level", "of", "a", "1", "125.00", "-", "2.50x"]


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_end_of_the_text_has_the_room_that_there_is(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    policy = "policy=best_first policy.children=16"
    board = Board([policy])
    standing = Standing(policy, LABELS | {"emulated": True}, "", 12345, 1234.56)
    standing.finish(result([1, 2, 3], between_ms=0.5))
    standing.text = "x" * 300
    board.change(standing)
    show(board.table())
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    for part in ("policy=best_first", "policy.children=16", "12345", "2000.00", "0.50", "1.00x"):
        assert part in out
    assert "x" * 12 in out
    assert ("x" * 64 in out) == (columns == 200)


def test_what_is_not_measured_on_this_machine_is_labelled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    board = Board(POLICIES)
    plain = Standing("policy=root", LABELS)
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
        (False, [1, 2, 4], 1, "Texts differ from those of policy=root: 1 with policy=level."),
        (True, [1, 2, 4], 0, "as the verifier is LOSSY: 1 with policy=level."),
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
    done = Comparison({"policy=root": first, "policy=level": second})
    monkeypatch.setattr(Comparison, "labels", LABELS | {"lossy": lossy})

    def decoded(*_: object, **given: Any) -> Comparison:
        for policy, each in done.results.items():
            standing = Standing(policy, done.labels)
            standing.finish(each)
            given["on_change"](standing)
        return done

    monkeypatch.setattr(pipespec.instruments.bench.comparison, "compare", decoded)
    arguments = [*POLICIES, "--prompt", "a", *["--json"] * as_json]
    assert main(["compare", *arguments]) == code
    out, err = capsys.readouterr()
    if as_json:
        found = json.loads(out)
        assert found["equal"] is (other == [1, 2, 3])
        token_ids = [each["answers"][0]["token_ids"] for each in found["policies"]]
        assert token_ids == [[1, 2, 3], other]
    else:
        assert "policy=level" in out
        assert told in (err if code else out)
    if code:
        assert err == f"pipespec: {told}\n"


def test_a_data_set_that_is_no_folder_is_named(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    assert "empty.jsonl" in refused(*POLICIES, f"dataset={tmp_path / 'empty.jsonl'}")
