"""The benchmarks: their pure parts, their --help, and small runs."""

import importlib
import io
import json
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from importlib.util import find_spec

import pytest

from benchmarks.budgets import rank_memory, stage_time
from benchmarks.common import experiment, run_options
from benchmarks.common.experiment import ROOT
from benchmarks.pages.stored_results import result
from pipespec.config.compose import compose
from pipespec.engine.inspection.inspection import inspect
from tools.inflate import Shape, read_config


def test_a_figure_is_written_as_equal_png_and_svg(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: bench)")
    from benchmarks.common import plot

    for name in ("a", "v1.bars"):  # a name with a dot keeps it
        with plot.figure(tmp_path / name, "Title", note="A note") as (axes,):
            values = {"root": [3.0, None], "level": [1.0, 2.0]}
            plot.bars(axes, ["a", "b"], values, ylabel="ms", colours=plot.METHODS)
    for suffix in ("png", "svg"):
        first, second = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("a", "v1.bars"))
        assert first == second
    svg = (tmp_path / "a.svg").read_text()
    assert "Title" in svg and "A note" in svg and "ms" in svg and "<dc:date>" not in svg


@pytest.fixture(scope="module")
def demo_stage(tmp_path_factory):
    """A stage of the demo target, measured once: what was stored, and what was printed."""
    file, printed = tmp_path_factory.mktemp("measured") / "stage.json", io.StringIO()
    plotted = ("--plot", str(file.with_suffix(""))) if find_spec("matplotlib") else ()
    asked = ["--quick", "--device", "cpu", "--dtype", "float32", "--draft", "demo", *plotted]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(sys, "argv", ["stage", *asked, "--json", str(file)])
        stage_time.main()
    assert file.with_suffix(".svg").exists() or not plotted
    return json.loads(file.read_text()), printed.getvalue()


def test_a_stage_is_measured_beside_its_floor(demo_stage):
    result, printed = demo_stage
    assert "Measured" in result["title"] and "2 layers of demo, float32" in result["title"]
    assert {"device", "threads", "hardware", "commit", "date", "command"} <= set(result)
    steps = result["steps"]
    sizes = [(cell["rows"], cell["context"]) for cell in steps]
    assert sizes == [(rows, context) for context in (16, 256) for rows in (1, 4, 16)]
    for cell in (*steps, *result["drafts"]):
        assert cell["floor_ms"] == max(cell["floor_bytes_ms"], cell["floor_flops_ms"])
        assert min(cell["floor_bytes_ms"], cell["floor_flops_ms"], cell["ratio"]) > 0
        for times in cell["ms"].values():
            assert times["quartile_1"] <= times["median"] <= times["quartile_3"]
    assert [cell["over_one_row"] for cell in steps if cell["rows"] == 1] == [1, 1]
    assert all(cell["kv_in_place"] for cell in result["verdicts"])
    assert "A verdict" in printed and "A draft round, its depth CUT" in printed


def test_what_a_step_must_read_and_compute_follows_from_the_shape(demo_stage):
    result, _ = demo_stage
    shape = stage_time.SHAPES["demo"]
    cell, draft = result["steps"][-1], result["drafts"][-1]
    middle = rank_memory.predict(shape, range(1, 3), 4, context=256, tree=16, batch=0)
    assert cell["weight_bytes"] == result["memory_bytes"]["weights"] == middle.weights
    assert cell["kv_bytes"] == middle.kv
    scores = 2 * 4 * shape.heads * shape.head_dim * 16 * 257
    assert cell["operations"] == 2 * 16 * middle.weights / 4 + scores
    two_layers = replace(shape, layers=2)
    whole = rank_memory.predict(two_layers, range(2), 4, context=0, tree=0, batch=0)
    assert (draft["layers"], draft["of"]) == (2, shape.layers)
    assert draft["weight_bytes"] == whole.weights


def test_a_target_is_inflated_only_for_more_stages_than_it_has_layers(tmp_path):
    assert run_options.target(16, tmp_path) == []
    _, setting = run_options.target(17, tmp_path)
    assert inspect(setting.removeprefix("model.target=")).num_layers == 17


def test_memory_is_predicted_to_the_byte_for_the_demo_target():
    info = inspect(run_options.TARGET)
    shape = Shape.of(read_config(run_options.TARGET))
    whole = rank_memory.predict(shape, range(shape.layers), 2, context=0, tree=0, batch=0)
    assert whole.weights == info.stored.total
    assert whole.kv == 0
    # Two slices hold what the whole does, and the tied embedding once more.
    parts = [
        rank_memory.predict(shape, layers, 2, context=100, tree=10, batch=1)
        for layers in (range(7), range(7, shape.layers))
    ]
    assert sum(part.weights for part in parts) == whole.weights + info.stored.embedding
    per_token = shape.layers * 2 * shape.kv_heads * shape.head_dim * 2
    assert sum(part.context for part in parts) == 100 * per_token
    assert sum(part.kv for part in parts) == 111 * per_token


def test_settings_are_whole_and_name_no_folder_of_this_machine(tmp_path):
    truth = tmp_path / "truth.jsonl"
    truth.write_text("[1,2]\n")
    given = [
        "policy=static_tree",
        "proposer=synthetic",
        f"proposer.truth={truth}",
        "emulate=rtx3090_8",
    ]
    settings = experiment.settings(compose(given), tmp_path)
    assert settings["policy"]["class"] == "StaticTree"
    assert settings["policy"]["shape"] == [1, 1, 3, 1, 1, 1, 1, 1]
    assert settings["proposer"]["truth"] == "truth.jsonl"
    assert settings["model"]["target"] == "demo/target"
    assert settings["emulate"]["draft_ms"] == 17.0
    assert str(tmp_path) not in json.dumps(settings)
    assert experiment.overrides(given, tmp_path)[2] == "proposer.truth=truth.jsonl"


PROGRAMS = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in (ROOT / "benchmarks").rglob("*.py")
    if 'if __name__ == "__main__":' in file.read_text()
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_benchmark_describes_itself(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


# Beside the arguments, the numbers that a row of its result has, and what the largest exceeds.
# Without speculation a pipeline of eight stages decodes .125 tokens per step.
SPECULATES = ("tokens_per_step", 0.25)
QUICK = {
    "budgets.head_and_stage": ("value", 0),
    "budgets.rank_memory": ("uss_beyond", 0),
    "drafts.accuracy_curves": ("top_1", 0.5),
    "drafts.counts acceptance": SPECULATES,
    "drafts.counts noise": ("top_1", 0.25),
    "drafts.stated_probabilities": SPECULATES,
    "load.throughput": ("speed_up", 2),
    "pipeline.deployments": ("tokens_per_s", 100),
    "pipeline.methods": SPECULATES,
    "pipeline.tbt": SPECULATES,
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arguments", QUICK)
def test_a_small_run_gives_rows(arguments, tmp_path):
    column, least = QUICK[arguments]
    file = tmp_path / "result.json"
    command = f"{sys.executable} -m benchmarks.{arguments} --quick --json {file}"
    done = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [row[column] for row in json.loads(file.read_text())["rows"]]
    assert found and max(found) > least


# Results that no clock changes, as they count or simulate, with options that leave most rows out.
NO_CLOCK = {
    "curves": "",
    "deployments": "--only '20 ms'",
    "foresight": "",
    "frontier": "--cells 2",
    "load": "--requests 1,4",
    "methods": "--widths 4",
    "papers": "--only meta_tpc",
}
# What another version of torch may change.
TOLERANCE = 0.03


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NO_CLOCK)
def test_command_under_a_figure_gives_it(name, tmp_path):
    stored, file = result(name), tmp_path / "again.json"
    python, *arguments = shlex.split(f"{stored['command']} --json {file} {NO_CLOCK[name]}")
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert python == "python" and done.returncode == 0, done.stderr
    known, found = (dict(figures(each["rows"])) for each in (stored, json.loads(file.read_text())))
    assert found == pytest.approx({key: known[key] for key in found}, rel=TOLERANCE, abs=0.01)
    assert len(found) > 1


def figures(rows):
    """Every figure, after what its row is called."""
    for row in rows:
        row |= {f"tbt_ms {name}": value for name, value in row.pop("tbt_ms", {}).items()}
        row.pop("ours", None)  # a figure as text
        names = [each for each in row.values() if isinstance(each, str | int)]
        for name, value in row.items():
            if isinstance(value, float):
                yield (*names, name), value
