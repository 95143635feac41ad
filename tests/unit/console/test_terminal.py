"""What commands print stands there as it is: nothing in it is markup."""

import pytest

from pipespec.cli.generate import print_statistics
from pipespec.client.answers import Result
from pipespec.console.terminal import show, table_of
from pipespec.extras.bench.figures import BenchResult, RequestResult
from pipespec.extras.commands import bench
from pipespec.extras.device_check.machine_check import QUANTIZE, table

NASTY = "[/red] [bold]x[/bold] :smile: [link=a]"
PLAIN = {"emulated": False, "synthetic": False, "lossy": False, "seed": None}
STATS = {"tokens_per_step": None, "steps": 1, "rows_per_step": None, "stage_busy": [0.5]}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


def test_a_sentence_and_a_table_are_shown_as_they_are(capsys):
    show(NASTY)
    show(NASTY, stderr=True)
    assert capsys.readouterr() == (NASTY + "\n", NASTY + "\n")
    named = table_of(NASTY, NASTY)
    named.add_row(NASTY)
    show(named)
    assert capsys.readouterr().out.count(NASTY) == 3


def test_install_command_is_shown_in_full(capsys):
    lacking = {"usable": False, "why_not": QUANTIZE}
    show(
        table(
            {
                "python": "3",
                "packages": {},
                "devices": [],
                "attention": {},
                "quantization": {"int8": lacking},
                "checkpoints": {},
                "transport": {},
                "redis": None,
                "ok": True,
            }
        )
    )
    assert "pip install 'pipespec[quantize]'" in capsys.readouterr().out


@pytest.mark.parametrize("emulated", [False, True])
def test_overruns_are_shown_only_where_times_are_emulated(emulated, capsys):
    label = {**PLAIN, "emulated": emulated}
    stats = {**STATS, "hit_rate": 0.0, "overruns": 0}
    print_statistics(Result("a", [1], None, 1, 1, "length", {**stats, **label}), full=True)
    request = RequestResult("q", "b", [1], [2], "a", "length", 1.0, [1.0], stats)
    bench.print_figures(BenchResult([request], 1.0, 1, label))
    out, err = capsys.readouterr()
    assert ("overruns" in out, "overruns" in err) == (emulated, emulated)


def test_cached_tokens_are_shown_also_where_there_were_none(capsys):
    stats = PLAIN | {"cached_tokens": 0}
    print_statistics(Result("a", [1], None, 1, 1, "length", stats), full=True)
    assert "tokens of the prompt found in KV" in capsys.readouterr().err


def test_statistics_that_ended_in_any_way(capsys):
    print_statistics(Result("a", [1], None, 1, 1, "[/red]", {**PLAIN, "a": NASTY}), full=True)
    err = capsys.readouterr().err
    assert NASTY in err
    assert "ended by [/red]" in err


def test_an_answer_is_summarised_in_one_line(capsys):
    first = PLAIN | {"tokens_per_step": None, "tbt_ms": {"mean": None}, "hit_rate": 0.0}
    more = PLAIN | {"tokens_per_step": 1.917, "tbt_ms": {"mean": 16.88}, "hit_rate": 0.75}
    for count, stats in ((1, first), (24, more)):
        print_statistics(Result("a", [1], None, 5, count, "length", stats))
    assert capsys.readouterr().err == (
        "1 tokens after 5 of the prompt, ended by length.\n"
        "24 tokens after 5 of the prompt, ended by length: 16.9 ms per token, 1.92 tokens per "
        "step, 75% of the tokens were accepted draft tokens.\n"
    )
    print_statistics(Result("a", [1], None, 5, 1, "length", first), "2026, epoch 3: b/0 ended.")
    assert capsys.readouterr().err == (
        "1 tokens after 5 of the prompt, ended by length; it stood still after the fault of 2026, "
        "epoch 3: b/0 ended.\n"
    )
