"""The pure parts of the benchmarks: no cluster is started here."""

from __future__ import annotations

import argparse
import io
import json
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from benchmarks.budgets import rank_memory, stage_time
from benchmarks.budgets.timed_stage import TimedStage, random_tree
from benchmarks.common import experiment, rank_traces, run_options
from benchmarks.common.checked_requests import CheckedRequest
from benchmarks.common.rank_traces import Span, Trace
from benchmarks.load import exact_texts, long_context, long_prompt, throughput
from benchmarks.pipeline import bookkeeping, hits, methods, overhead, scaling, timeline
from benchmarks.server import added_latency, clients
from pipespec.config.compose import compose
from pipespec.controller.log_records import CANCELLED, Accepted, Finished
from pipespec.core import SamplingParams, Verdict
from pipespec.engine.checkpoint.inspection import inspect
from pipespec.engine.runner import SliceRunner
from pipespec.instruments.bench.figures import BenchResult, RequestResult
from pipespec.instruments.emulation.machine import EmulatedMachine
from pipespec.trace import ROWS, write_chrome_trace
from tests.helpers.sampling import sample
from tools.inflate import Shape, read_config

MS = 1_000_000


@pytest.fixture
def plot():
    """The module that draws; it needs matplotlib, which belongs to the `bench` extra."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: bench)")
    from benchmarks.common import plot

    return plot


def two_ranks(steps: int, pace_ms: float = 40.0) -> Trace:
    """A head and one stage; a step lasts 1.5 ms longer than the pace."""
    head: list[Span] = []
    stage: list[Span] = []
    for step in range(steps):
        start = step * (pace_ms + 1.5)
        told = start + 0.1 + pace_ms
        stage += [
            Span("receive", start - 0.5, 0.5, step),
            Span("compute", start + 0.1, 5, step),
            Span("verify", start + 5.1, 1, step),
            Span("pace", start + 6.1, pace_ms - 6, step),
            Span("control", told, 0.1, step),
            Span("prune", told + 0.1, 0.1, step),
        ]
        head += [
            Span("draft", start, 20, step),
            Span("wait", start + 20, told + 0.3 - start - 20, step),
            Span("prune", told + 0.3, 0.1, step),
            Span("send", told + 0.6, 0.2, step),
        ]
    return Trace(["head", "stage 1"], [head, stage])


# --- drawing ------------------------------------------------------------------------------------


def draw_bars(plot, path: Path) -> None:
    with plot.figure(path, "Title", note="A note") as (axes,):
        values = {"root": [3.0, None], "level": [1.0, 2.0]}
        plot.bars(axes, ["a", "b"], values, ylabel="ms", colours=plot.METHODS)


def test_a_figure_is_written_as_png_and_as_svg(plot, tmp_path):
    draw_bars(plot, tmp_path / "v1.bars")  # a name with a dot keeps it
    assert (tmp_path / "v1.bars.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "v1.bars.svg").read_text()
    assert "Title" in svg and "A note" in svg and "ms" in svg


def test_equal_figures_are_equal_files(plot, tmp_path):
    for name in ("a", "b"):
        draw_bars(plot, tmp_path / name)
    for suffix in ("png", "svg"):
        first, second = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("a", "b"))
        assert first == second
    assert "<dc:date>" not in (tmp_path / "a.svg").read_text()


@pytest.mark.usefixtures("plot")
def test_the_timeline_draws_the_request_and_some_steps(tmp_path):
    timeline.draw(two_ranks(12), "EMULATED: a request", tmp_path / "timeline")
    drawn = sorted(path.name for path in tmp_path.iterdir())
    both = ("timeline_request", "timeline_steps")
    assert drawn == sorted(f"{name}.{kind}" for name in both for kind in ("png", "svg"))
    assert "EMULATED" in (tmp_path / "timeline_steps.svg").read_text()


@pytest.mark.usefixtures("plot")
def test_a_stored_table_of_methods_can_be_drawn(tmp_path):
    rows = [
        {"policy": policy, "width": width, "children": 8, "rounds": 1, "tokens_per_step": 0.3}
        for policy, width in [("root", 1), ("static_tree", 21), ("level", 4), ("level", 8)]
    ]
    methods.draw("Tokens per step", rows, tmp_path / "methods")
    assert (tmp_path / "methods.svg").exists()
    with pytest.raises(SystemExit, match="level and best_first"):
        methods.draw("Tokens per step", rows[:2], tmp_path / "none")


# --- timeline -----------------------------------------------------------------------------------


def test_a_trace_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "trace.json"
    head = [("wait", 3 * MS, MS, 0, {}), ("draft", MS, 2 * MS, 0, {})]
    phases = [("compute", MS, 2 * MS), ("verify", 3 * MS, MS), ("pace", 4 * MS, MS)]
    stage = [(name, start, length, 0, {}) for name, start, length in phases]
    stage.append((ROWS, 3 * MS, 0, 0, {"draft": 4}))
    write_chrome_trace(file, [(1, "stage 1: layers 0..3", stage), (0, "head: draft", head)])
    trace = Trace.read(file)
    assert trace.labels == ["head", "stage 1"]
    assert trace.ranks[0] == [Span("draft", 1, 2, 0), Span("wait", 3, 1, 0)]
    assert trace.verdicts() == {0: 5}
    assert trace.computed(1) == {0: Span("compute", 1, 4, 0)}


def test_a_window_cuts_joins_and_leaves_out():
    spans = [
        Span("compute", 0, 10, 0),  # begins before the window
        Span("receive", 10, 2, 1),
        Span("wait", 12, 3, 1),  # of one kind with the one before, and touches it
        Span("prune", 15, 0.01, 1),  # too narrow to be seen
        Span("send", 15.01, 20, 1),  # ends behind the window
        Span("compute", 40, 1, 2),  # outside
    ]
    assert timeline.visible_spans(spans, begin=5, end=20, visible=0.1) == [
        ("compute", 0, 5),
        ("wait", 5, 5),
        ("send", pytest.approx(10.01), pytest.approx(4.99)),
    ]


def test_the_steps_shown_are_from_the_middle():
    verdicts = {step: 40.0 * step for step in range(3, 23)}
    assert timeline.middle(verdicts, 4) == [11, 12, 13, 14, 15]
    assert timeline.middle({1: 0.0, 2: 40.0}, 4) == [1, 2]


def test_phases_are_medians_per_step():
    head, stage = rank_traces.phases(two_ranks(9))
    assert head["rank"] == "head" and head["draft"] == 20
    assert stage["compute"] == 5 and stage["pace"] == pytest.approx(34)
    assert stage["draft"] == 0


# --- overhead -----------------------------------------------------------------------------------


def test_the_parts_of_a_step_add_up_to_what_it_takes_beyond_its_pace():
    steps = overhead.chain(two_ranks(5), pace_ms=40.0)
    assert len(steps) == 4  # the first has none before it
    for step in steps:
        assert step["beyond"] == pytest.approx(1.5)
        assert sum(step[part] for part in overhead.PARTS) == pytest.approx(1.5)
        assert step["neighbour"] == 0
        assert step["verdict"] == pytest.approx(0.3)
        assert step["prune"] == pytest.approx(0.3)
        assert step["python"] == pytest.approx(0.1)
        assert step["late"] == pytest.approx(0.0)


def test_late_neighbour_is_distinguished_from_a_slow_verdict():
    trace = two_ranks(3)
    late = [
        Span("wait", span.end - 0.1, 0.1, span.step) if span.phase == "wait" else span
        for span in trace.ranks[0]
    ]
    for step in overhead.chain(Trace(trace.labels, [late, trace.ranks[1]]), pace_ms=40.0):
        assert step["neighbour"] == pytest.approx(0.2)
        assert step["verdict"] == pytest.approx(0.1)


def test_a_step_without_rows_is_no_step_of_the_pace():
    trace = two_ranks(5)
    short = [
        Span("pace", span.start, 0.0, 2) if (span.phase, span.step) == ("pace", 2) else span
        for span in trace.ranks[1]
    ]
    # Neither it counts nor the one that began with its verdict.
    assert len(overhead.chain(Trace(trace.labels, [trace.ranks[0], short]), pace_ms=40.0)) == 2


def test_typical_parts_add_up_and_ignore_what_is_rare():
    steps = [{"wire": float(i), "late": 1.0, "beyond": i + 1.0} for i in range(8)]
    steps += [{"wire": 500.0, "late": 1.0, "beyond": 501.0}]
    found = overhead.typical(steps)
    assert found["wire"] + found["late"] == pytest.approx(found["beyond"])
    assert found == {"wire": 4.0, "late": 1.0, "beyond": 5.0}


def test_bookkeeping_is_timed_for_head_and_stage():
    parts = bookkeeping.measure(context=700, width=4, stages=3, steps=8)
    assert set(parts) == {
        *("head_expand", "head_schedule", "head_advance"),
        *("stage_admit", "stage_apply", "stage_prune"),
    }
    assert all(ms > 0 for ms in parts.values())


# --- a stage's time -----------------------------------------------------------------------------


def measured_stage(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["stage", "--quick", "--device", "cpu", *map(str, arguments)])
    stage_time.main()


@pytest.fixture(scope="module")
def demo_stage(tmp_path_factory):
    """A stage of the demo target, measured once: what was stored, and what was printed."""
    file, printed = tmp_path_factory.mktemp("measured") / "stage.json", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        measured_stage(patch, "--dtype", "float32", "--draft", "demo", "--json", file)
    return json.loads(file.read_text()), printed.getvalue()


def test_a_stage_is_measured_beside_its_floor(demo_stage):
    result, printed = demo_stage
    assert "MEASURED" in result["title"] and "2 layers of demo, float32" in result["title"]
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


@pytest.mark.usefixtures("plot")
def test_measured_times_of_a_stage_are_settings_of_emulate(tmp_path, monkeypatch):
    file, profile = tmp_path / "stage.json", tmp_path / "here.yaml"
    given = ("--json", file, "--plot", tmp_path / "stage", "--profile", profile)
    measured_stage(monkeypatch, *given, "--draft", "demo", "--profile-context", 16)
    result = json.loads(file.read_text())
    settings = OmegaConf.load(profile)
    (cls,) = settings.pop("defaults")
    assert cls == f"{EmulatedMachine.__module__}.{EmulatedMachine.__name__}"
    machine = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(EmulatedMachine), settings))
    (curve,) = machine.curves
    measured = {
        cell["rows"]: cell["ms"]["step"]["median"]
        for cell in result["steps"]
        if cell["context"] == 16
    }
    assert dict(curve.points) == pytest.approx(measured, abs=1e-4)
    assert machine.draft_ms == pytest.approx(
        result["drafts"][-1]["ms"]["round"]["median"], abs=1e-4
    )
    said = "# MEASURED: a stage of 2 layers of demo, bfloat16, attention sdpa, on "
    assert profile.read_text().startswith(said)
    assert (tmp_path / "stage.svg").exists()


def rewrite(pool) -> None:
    with torch.inference_mode():
        pool.keys[-1] += 1


def move(pool) -> None:
    pool.values = pool.values.clone()


@pytest.mark.parametrize("touch", [rewrite, move])
def test_a_verdict_that_touches_keys_or_values_is_found_out(touch, tmp_path, monkeypatch):
    def apply(held: TimedStage, verdicts: list[Verdict]) -> None:
        SliceRunner.apply(held, verdicts)
        touch(held.model.attention_layers[0].pool)

    monkeypatch.setattr(TimedStage, "apply", apply)
    measured_stage(monkeypatch, "--json", tmp_path / "stage.json")
    verdicts = json.loads((tmp_path / "stage.json").read_text())["verdicts"]
    assert [cell["kv_in_place"] for cell in verdicts] == [False, False]


def test_emulate_settings_need_a_context_that_was_measured(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        measured_stage(monkeypatch, "--profile-context", 17)
    assert "--profile-context is 17, but must be of --contexts" in capsys.readouterr().err


def test_random_trees_are_wide_and_deep_and_of_any_size():
    for nodes in (1, 2, 7, 64, 576):
        tree = random_tree(nodes, context=100, vocab=50)
        tree.check()
        assert len(tree) == nodes + 1
    assert tree.depth.max() > 50
    assert max((tree.depth == level).sum() for level in range(1, 50)) > 8


# --- arithmetic ---------------------------------------------------------------------------------


def test_the_model_takes_the_same_time_however_it_is_cut():
    for stages in (1, 2, 8, 21):
        assert stages * scaling.stage_ms(stages) == pytest.approx(scaling.MODEL_MS)


def test_a_target_is_inflated_only_for_more_stages_than_it_has_layers(tmp_path):
    assert run_options.target(16, tmp_path) == []
    (setting,) = run_options.target(17, tmp_path)
    assert inspect(setting.removeprefix("model.target=")).num_layers == 17


def test_the_line_of_hits_goes_from_the_whole_pipeline_to_one_step():
    assert hits.expected_ms(0.0, step_ms=40, stages=8) == 320
    assert hits.expected_ms(1.0, step_ms=40, stages=8) == 40


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


def test_a_70b_has_the_published_number_of_weights():
    rows = rank_memory.computed(stages=8, width=64, context=8192, chunk=128)
    parameters = sum(row["weights"] for row in rows) * rank_memory.GIB / rank_memory.BFLOAT16
    assert parameters == pytest.approx(70.55e9, rel=1e-3)


# --- what is stored -----------------------------------------------------------------------------


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


@pytest.mark.long
def test_a_row_of_load_is_a_multiple_of_plain_decoding_with_as_many_requests(tmp_path):
    options = argparse.Namespace(
        rows=24, width=8, children=8, rounds=2, tokens=100, stages=4, machine="fixed", scale=1.0,
        stage_ms=None, draft_ms=None, link="none", sync="lockstep", curve="1:0.7,8:0.95",
        spread=0.5, emulate=False,
    )  # fmt: skip
    plain = throughput.row("root", 3, options, tmp_path, {})
    assert plain["speed_up"] == 1
    assert plain["tokens_per_step"] == pytest.approx(3 / 4, abs=0.01)
    for method in throughput.METHODS:
        found = throughput.row(method, 3, options, tmp_path, plain)
        assert found["speed_up"] == found["tokens_per_s"] / plain["tokens_per_s"]
        assert found["speed_up"] > 1.2 or method == "root"


def test_what_is_counted_of_a_crowd_lies_between_its_last_first_and_its_first_last_token():
    """Three requests, whose tokens come every 10, 20 and 10 ms."""
    results = [
        RequestResult(str(i), "b", [1], [], "", "length", 0.0, times, {}, started_ms=start)
        for i, (start, times) in enumerate(
            [
                (0.0, [10.0 * k for k in range(1, 11)]),
                (5.0, [25.0, 45.0, 65.0, 85.0, 105.0]),
                (0.0, [20.0 + 10 * k for k in range(7)]),
            ]
        )
    ]
    window = throughput.Window.of(BenchResult(results, 1.0, 3, {}))
    assert (window.tokens, window.ms) == (5 + 2 + 5, 50.0)
    assert window.worst_ms == 20.0
    both = throughput.merged([window, window])
    assert (both.tokens, both.ms, len(both.gaps)) == (24, 100.0, 2 * len(window.gaps))


def test_pair_of_long_contexts_has_few_layers_and_room_for_every_token(tmp_path: Path) -> None:
    overrides = long_context.shallow_pair(tmp_path, layers=4, positions=131072)
    assert overrides == [f"model.target={tmp_path}/target", f"model.draft={tmp_path}/draft"]
    target, draft = (inspect(tmp_path / name) for name in ("target", "draft"))
    assert (target.num_layers, target.context) == (4, 131072)
    assert (draft.num_layers, draft.context) == (3, 131072), "the draft has no more"


def test_steps_and_gaps_between_two_moments_are_those_of_the_slowest_stage_and_of_the_answer():
    trace = two_ranks(8)
    trace.ranks.append([replace(each, length=2 * each.length) for each in trace.ranks[1]])
    tokens = np.array([10.0, 50.0, 60.0, 200.0, 203.0])
    early = long_prompt.Interval.of(trace, tokens, 0.0, 60.0)
    assert early.steps == pytest.approx([40 + 34, 40 + 34])  # its wait is twice as long
    assert early.gaps.tolist() == [40.0, 10.0]
    late = long_prompt.Interval.of(trace, tokens, 60.0, 1000.0)
    assert (len(late.steps), late.gaps.tolist()) == (6, [140.0, 3.0])
    assert early.ratio(late) == pytest.approx((3 + 0.99 * 137) / (10 + 0.99 * 30))


# --- what a request got -------------------------------------------------------------------------


def checked(*events: Accepted | Finished) -> CheckedRequest:
    one = CheckedRequest([7, 7, 7], SamplingParams(), length=4, expected=[1, 2, 3, 4])
    for event in events:
        one.receive(event)
    return one


def test_tokens_that_differ_are_lost_or_come_twice_are_counted():
    end = Finished("length")
    right = checked(Accepted(3, (1, 2)), Accepted(5, (3, 4)), end)
    assert (right.wrong_positions, right.lost, right.doubled, right.reason) == ([], 0, 0, "length")
    assert checked(Accepted(3, (1, 9, 3)), Accepted(6, (9,)), end).wrong_positions == [1, 3]
    assert checked(Accepted(3, (1, 2)), Accepted(6, (4,)), end).lost == 1 + 1
    assert checked(Accepted(3, (1, 2)), Accepted(4, (2, 3, 4)), end).doubled == 1
    assert checked(Accepted(3, (1, 2, 3)), end).lost == 1
    assert checked(Accepted(3, (1,)), Finished(CANCELLED)).lost == 0


def test_hugging_face_draws_as_the_last_stage_does():
    """A draw alone, then the greedy text beside it."""
    asked = [
        CheckedRequest([5, 6, 7], drawn, 6)
        for drawn in (SamplingParams(), SamplingParams(temperature=1.0, seed=3))
    ]
    greedy, sampled = exact_texts.hugging_face("float32", asked)
    assert greedy != sampled and len(greedy) == len(sampled) == 6
    model = AutoModelForCausalLM.from_pretrained(run_options.TARGET, dtype=torch.float32)
    text = [5, 6, 7]
    for token in sampled:
        with torch.inference_mode():
            logits = model(torch.tensor([text])).logits[0, -1]
        assert token == sample(logits, asked[1].sampling, len(text))
        text.append(token)


def cell(**found: object) -> dict[str, object]:
    """A row of the crowd in which nothing is wrong."""
    same = {"dtype": "float32", "stages": 2, "method": "root", "verify": "greedy"}
    counts = dict.fromkeys(
        ("alone_not_hugging_face", "crowd_not_hugging_face", "crowd_not_alone", "lost_or_doubled"),
        0,
    )
    sizes = {"alone": 3, "crowd": 9, "put_back": 1, "cancelled": 2, "at_once": 8, "slots_held": 0}
    return {**same, **counts, **sizes, "first_token": None, **found}


def test_what_differs_in_a_crowd_is_wrong_where_nothing_may_be_rounded():
    assert exact_texts.wrong([cell(), cell(dtype="bfloat16", crowd_not_alone=4)]) == []
    assert exact_texts.wrong([cell(crowd_not_alone=2), cell()]) == ["crowd_not_alone: 2"]
    assert exact_texts.wrong([cell(dtype="bfloat16", lost_or_doubled=1)]) == ["lost_or_doubled: 1"]
    (nobody,) = exact_texts.wrong([cell(put_back=0)])
    assert nobody.startswith("put_back: 0")


def test_cells_of_a_crowd_are_summed_over_the_methods():
    rows = [
        cell(),
        cell(method="level", at_once=9, first_token=4),
        cell(verify="sampled"),
        cell(method="level", first_token=2),
    ]
    greedy, sampled = exact_texts.summary(rows)
    assert (greedy["verify"], greedy["crowd"], greedy["put_back"]) == ("greedy", 27, 3)
    assert (greedy["first_token"], greedy["at_once"]) == (2, 9)
    assert (sampled["verify"], sampled["crowd"], sampled["first_token"]) == ("sampled", 9, None)


@pytest.mark.slow
@pytest.mark.long
def test_a_small_crowd_gets_the_texts_of_hugging_face(tmp_path, monkeypatch):
    file = tmp_path / "crowd.json"
    monkeypatch.setattr(sys, "argv", ["crowd", "--quick", "--json", str(file)])
    exact_texts.main()
    result = json.loads(file.read_text())
    assert [row["dtype"] for row in result["rows"]] == ["float32"] * 2 + ["bfloat16"] * 2
    assert all(row["crowd"] == 12 and row["cancelled"] > 0 for row in result["cells"])


def test_a_tokens_way_ends_with_the_piece_that_holds_the_end_of_its_text():
    # Characters of four tokens: 2, none, 3, 1. The client read 4 of them, then 2.
    checked = added_latency.TimedRequest(sent_ns=0, pieces=[(10 * MS, 4), (20 * MS, 2)])
    checked.match(ends=[2, 2, 5, 6], redis_ns=[1 * MS, 2 * MS, 3 * MS, 4 * MS])
    assert checked.latency_ms.tolist() == [9.0, 17.0, 16.0]
    assert checked.ttft_ms == 10.0


def test_what_a_server_adds_is_the_difference_of_the_medians():
    def run(route: str, *latencies_ms: int) -> added_latency.Run:
        request = added_latency.TimedRequest(
            0, [(5 * MS, 1)], [0] * len(latencies_ms), [ms * MS for ms in latencies_ms]
        )
        return added_latency.Run(
            8, route, [request], seconds=2.0, server_cpu_s=0.001, client_cpu_s=0.0
        )

    bare, http = added_latency.rows(
        [run("bare", 1, 2, 9), run("http", 4, 4, 5), run("http", 4, 90)]
    )
    assert (bare["client"], bare["latency_ms"], bare["added_latency_ms"]) == ("bare", 2.0, None)
    assert (http["latency_ms"], http["added_latency_ms"], http["requests_per_s"]) == (4.0, 2.0, 0.5)
    assert http["server_cpu_us_per_token"] == pytest.approx(400)


def test_what_grows_in_the_later_half_of_a_stay_is_wrong():
    def clients_run(*sizes: float, keys: int = 3) -> clients.ClientsRun:
        moments = [
            {"requests": 100 * i, "rest_s": 0.1, "keys": keys if i == len(sizes) - 1 else 3}
            | {"mib": {"head": size}}
            for i, size in enumerate(sizes)
        ]
        return clients.ClientsRun(moments=moments)

    assert clients.wrong(clients_run(10, 14, 20, 20, 20, 20)) == []
    (problem,) = clients.wrong(clients_run(10, 10, 10, 10, 11, 12))
    assert problem == "head grew by 10.00 MiB in a thousand requests"
    (problem,) = clients.wrong(clients_run(10, 10, 10, 10, keys=30))
    assert problem == "Redis has 27 keys more than after the first round"
