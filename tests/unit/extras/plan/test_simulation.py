"""Predictions against closed forms, against each other, and against one another's limits."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from pipespec.cli.main import main
from pipespec.errors import ConfigError
from pipespec.extras.emulation.machine import TimeCurve, with_experts
from pipespec.extras.emulation.synthetic_proposer import Accuracy
from pipespec.extras.plan.advice import (
    DecodingMethod,
    Division,
    PlannedLayout,
    choices,
    divisions,
    predict,
    predict_all,
    recommend,
)
from pipespec.extras.plan.pipeline_times import Machine, Profile
from pipespec.extras.plan.simulation import TokenArrival, level_equation, simulate
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.level import Level
from pipespec.head.policies.root import Root
from pipespec.head.policies.static_tree import StaticTree
from tests.helpers.matrix import some_of

PUBLISHED = Accuracy({1: 0.81, 8: 0.99}, spread=0.8)
ONE_B = Accuracy({1: 0.74, 32: 0.99}, spread=0.8)
PERFECT = Accuracy({1: 1.0})
POOR = Accuracy({1: 0.3, 32: 0.8}, spread=0.8)
DRAFTS = {"published": PUBLISHED, "poor": POOR}


def hop(ms: float) -> TimeCurve:
    """A hop that takes as long for any rows."""
    return TimeCurve(((1, ms),))


def machine(num_stages: int, stage_ms: float = 10.0, **times: Any) -> Machine:
    return Machine((TimeCurve(((1, stage_ms),)),) * num_stages, **times)


def methods(*names: str, **grid: list) -> list[DecodingMethod]:
    shape = {"widths": [16], "children": [8], "rounds": [1], **grid}
    return list(choices(names, shape["widths"], shape["children"], shape["rounds"]))


@pytest.mark.parametrize("num_stages", [1, 3, 8])
def test_without_guesses_a_token_takes_a_whole_pipeline(num_stages):
    ran = simulate(Root(), machine(num_stages), PUBLISHED, rounds=1, num_tokens=20)
    assert ran.tokens_per_step == pytest.approx(1 / num_stages)
    assert ran.delays[-1] == ran.tokens == 20
    assert ran.hits == 0 and ran.error == 0


def test_arrivals_agree_with_the_counts_of_many_requests():
    arrivals: list[TokenArrival] = []
    ran = simulate(
        BestFirst(16, 8),
        machine(4, draft_ms=4.0),
        PUBLISHED,
        rounds="auto",
        num_tokens=300,
        num_requests=3,
        max_rows=16,
        on_token=arrivals.append,
    )
    assert sum(each.hit for each in arrivals) == ran.hits
    assert [*map([each.delay for each in arrivals].count, range(5))] == ran.delays.tolist()
    assert [each.ms for each in arrivals] == sorted(each.ms for each in arrivals)
    assert {each.request for each in arrivals} == {0, 1, 2}


def test_a_draft_that_works_only_while_the_stage_waits_takes_its_time_from_it():
    asked = {"rounds": "auto", "num_tokens": 150}
    beside, alone = (
        simulate(BestFirst(8, 8), machine(1, draft_ms=3.0, overlap=overlap), PUBLISHED, **asked)
        for overlap in (True, False)
    )
    assert beside.ms / beside.steps < alone.ms / alone.steps - 3.0


def test_a_quick_draft_has_nodes_to_expand_for_the_whole_step_of_a_lone_stage():
    """Six rounds fit beside a step; with too few nodes the last ones would come after it."""
    quick = machine(1, stage_ms=26.0, draft_ms=4.0)
    likely = Accuracy.parse(["1:0.81", "8:0.99"], 0.8)
    ran = simulate(BestFirst(64, 8), quick, likely, rounds=6, num_tokens=400)
    assert ran.rounds / ran.steps == pytest.approx(6, rel=0.05)
    assert ran.ms / ran.steps < 26.0 + 4.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage_ms", "draft", "requests"), some_of(["1:20 64:60", "1:20 64:1280"], DRAFTS, [4, 16])
)
def test_where_rows_are_dear_guesses_make_nothing_slower(stage_ms, draft, requests):
    dear = Machine((TimeCurve.parse(stage_ms),) * 8, draft_ms=10.0)
    plain, guessing = (
        simulate(
            policy,
            dear,
            DRAFTS[draft],
            rounds=1,
            num_tokens=240,
            num_requests=requests,
            max_rows=32,
        )
        for policy in (Root(), BestFirst(32, 8))
    )
    assert guessing.ms / guessing.tokens <= plain.ms / plain.tokens / 0.97


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_perfect_draft_gives_best_first_a_token_per_round(rounds):
    ran = simulate(BestFirst(8, 1), machine(8), PERFECT, rounds=rounds, num_tokens=300)
    assert ran.tokens_per_step == pytest.approx(rounds, rel=0.05)
    assert ran.delays[0] > 0, "parents and children share a batch"


def test_one_chain_is_classic_speculative_decoding():
    """Four right guesses and the token after them, once per pipeline length, or one step later
    where the chain is drafted when the verdict has come."""
    ran = simulate(StaticTree([1] * 4), machine(8), PERFECT, rounds=4, num_tokens=100)
    assert 0.97 * 5 / 9 <= ran.tokens_per_step <= 1.03 * 5 / 8


def test_trees_of_eight_requests_wait_for_no_draft_round_of_another():
    """A tree that is not drafted when its request needs it is drafted beside the stages, which
    compute those of the others: steps stay as long as a stage takes, or the round."""
    ran = simulate(
        StaticTree([1] * 8),
        machine(8, draft_ms=8.0),
        PUBLISHED,
        rounds="auto",
        num_tokens=600,
        num_requests=8,
        max_rows=64,
    )
    assert ran.ms / ran.steps == pytest.approx(10.0, rel=0.1)
    assert ran.rounds / ran.steps == pytest.approx(1, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("top_1", [pytest.param(0.5, marks=pytest.mark.long), 0.9])
def test_level_follows_the_equation_where_the_width_cuts_nothing(top_1):
    """A chain: a token is guessed exactly if it has rank 1."""
    accuracy = Accuracy({1: top_1}, spread=0.5)
    ran = simulate(Level(4, 1), machine(6), accuracy, rounds=1, num_tokens=600)
    assert ran.tokens_per_step == pytest.approx(level_equation(top_1, 6), rel=0.08)
    assert ran.tokens_per_step == pytest.approx(level_equation(ran.hits / ran.tokens, 6), rel=1e-3)


def test_times_follow_the_rows():
    curve = TimeCurve(((2, 10.0), (4, 14.0), (8, 30.0)))
    assert [curve.ms(rows) for rows in (0, 1, 2, 3, 4, 6, 8, 10)] == [0, 10, 10, 12, 14, 22, 30, 38]
    uneven = Machine((TimeCurve(((1, 10.0),)), TimeCurve(((1, 30.0),))), hop=TimeCurve(((1, 1.0),)))
    assert uneven.plain_tbt_ms == 42
    assert uneven.stage_ms([1, 0]) == [10, 0]
    ran = simulate(Root(), uneven, PUBLISHED, rounds=1, num_tokens=10)
    assert ran.ms / ran.tokens == pytest.approx(42)


@pytest.mark.parametrize(
    ("in_flight", "ms"),
    [
        ([4], 2 * 30 + 20 + 2),  # a lone batch: a pass, at the end of which one row is sent
        ([4, 1], 30 + 20),  # as many as stages: the slowest stage and the hop after it
        ([0, 1, 4, 0], (30 + 30) / 2),  # half of the way of a batch between two stages
        ([4, 0, 0, 0, 0, 0, 0, 0], 30),  # a stage computes one batch after another
        ([0, 4, 0, 0, 0, 0, 0, 0], 20 / 3),  # what is left of its way to the next stage
        ([0, 0], 0),
    ],
)
def test_a_batch_follows_another_by_how_many_are_in_flight(in_flight, ms):
    stage, link = TimeCurve(((1, 10.0), (4, 30.0))), TimeCurve(((1, 2.0), (4, 20.0)))
    pipeline = Machine((stage, stage), hop=link)
    assert pipeline.batch_ms(in_flight) == pytest.approx(ms)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hop_ms", "windows"),
    [
        *((0, [4]), (5, [4]), (25, [4, 1, 8, 16])),
        pytest.param(120, [4, 1, 8, 16, 32], marks=pytest.mark.long),
    ],
)
def test_long_links_hold_more_batches_and_the_fastest_number_is_advised(hop_ms, windows):
    pipeline = machine(4, stage_ms=6.0, hop=hop(hop_ms), draft_ms=4.0)
    assert pipeline.windows() == windows
    (method,) = methods("best_first", rounds=["auto"])
    each = [
        simulate(
            method.policy, pipeline, PUBLISHED, rounds="auto", num_tokens=60, in_flight=in_flight
        )
        for in_flight in windows
    ]
    best = min(each, key=lambda ran: ran.tbt_ms)
    found = predict(method, pipeline, PUBLISHED, num_tokens=60)
    assert (found.in_flight, found.tbt_ms) == (best.in_flight, best.tbt_ms)
    assert len({ran.in_flight for ran in each}) == len(windows)


@pytest.mark.parametrize(("overlap", "windows"), [(True, [1, 2, 4, 8]), (False, [1])])
def test_a_lone_stage_far_away_holds_more_batches_where_the_draft_works_beside_it(overlap, windows):
    far = machine(1, stage_ms=6.0, hop=hop(70.0), draft_ms=4.0, overlap=overlap)
    assert far.windows() == windows
    (method,) = methods("best_first", rounds=["auto"])
    assert predict(method, far, PUBLISHED, num_tokens=50).in_flight in windows


@pytest.mark.parametrize("in_flight", [1, 4, 16])
def test_a_plain_token_takes_a_pass_however_many_batches_are_in_flight(in_flight):
    pipeline = machine(4, hop=hop(20.0))
    ran = simulate(Root(), pipeline, PUBLISHED, rounds=1, num_tokens=20, in_flight=in_flight)
    assert ran.tbt_ms == pytest.approx(pipeline.plain_tbt_ms)


def test_a_mixture_reads_the_experts_of_its_rows():
    curve = with_experts(TimeCurve(((1, 10.0), (64, 12.0))), 256, 8, 0.9)
    assert curve.ms(1) == pytest.approx(10)
    # 256 (1 - (1 - 8 / 256) ** 64) = 222.4 experts instead of 8.
    assert curve.ms(64) == pytest.approx(12 + 9 * (222.43 / 8 - 1), rel=1e-3)
    assert with_experts(TimeCurve(((1, 10.0),)), 8, 8, 0.9).ms(64) == pytest.approx(10)
    dense = Profile(stages=2, stage_ms=[10.0])
    assert replace(dense, experts=[256, 8, 0.9]).machine().stages[1].ms(64) > 200
    alike = replace(dense, experts=[256, 8, 0.9, 0.5]).machine().stages[1]
    assert 10 < alike.ms(64) < replace(dense, experts=[256, 8, 0.9]).machine().stages[1].ms(64)
    assert replace(dense, experts=[256, 8, 0.9, 1]).machine().stages[1].ms(64) == 10


@pytest.mark.slow
def test_on_a_mixture_the_default_is_fast_where_whole_levels_are_slower_than_no_speculation():
    machine = Profile(stages=8, stage_ms=[10.0], experts=[256, 8, 0.22], draft_ms=3.0).machine()
    root, level, default = (
        simulate(policy, machine, ONE_B, rounds="auto", num_tokens=150)
        for policy in (Root(), Level(64, 8), BestFirst())
    )
    ms = [each.ms / each.tokens for each in (root, level, default)]
    assert ms[0] == 80 and ms[1] > ms[0] and ms[2] < ms[0] / 2.8


def test_a_hop_takes_longer_with_more_rows_and_the_verdict_is_one():
    link = Machine((TimeCurve(((1, 10.0),)),) * 3, hop=TimeCurve(((1, 0.1), (64, 8.4))))
    assert link.plain_tbt_ms == pytest.approx(3 * 10.1)
    assert link.hop_ms([64, 0, 64]) == pytest.approx([8.4, 0.0, 0.1])
    assert link.full_ms(64) == pytest.approx([18.4, 18.4, 10.1])


def test_all_are_simulated_for_as_many_tokens_and_sorted_by_time():
    """A first look at fewer would make what is not looked at again seem slower."""
    asked = methods("level", widths=[12, 24], rounds=[1])
    done: list[tuple[int, int]] = []
    layouts = [PlannedLayout(str(n), machine(n)) for n in (4, 8)]
    found = predict_all(
        layouts, asked, PUBLISHED, num_tokens=60, on_done=lambda *each: done.append(each)
    )
    each = [
        predict(method, layout.machine, PUBLISHED, num_tokens=60, layout=layout)
        for layout in layouts
        for method in asked
    ]
    assert found == sorted(each, key=lambda one: one.tbt_ms)
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_slow_draft_lengthens_the_step_and_auto_leaves_out_what_does_not_fit():
    slow = machine(4, stage_ms=10, draft_ms=8)
    two, auto = (
        predict(method, slow, PUBLISHED, num_tokens=100)
        for method in methods("best_first", rounds=[2, "auto"])
    )
    assert two.step_ms == pytest.approx(16, rel=0.05)
    assert auto.rounds_per_step == pytest.approx(1, abs=0.1)
    assert auto.step_ms == pytest.approx(10, rel=0.05)


def test_a_good_draft_is_advised_and_a_bad_one_is_not():
    good = [predict(w, machine(8), PUBLISHED, num_tokens=200) for w in methods("root", "level")]
    advised = recommend(good)
    assert advised is not None and advised.policy == "level"
    assert advised.settings[:2] == ("policy=level", "policy.width=16")
    assert advised.settings[2:] == ("policy.children=8", "proposer.rounds=1")
    poor, slow = Accuracy({1: 0.05}, spread=0.0), machine(2, draft_ms=100)
    assert recommend([predict(w, slow, poor, num_tokens=50) for w in methods("level")]) is None


def test_of_equal_ways_the_one_with_fewer_rows_is_advised():
    narrow, wide = (
        predict(method, machine(4), PERFECT, num_tokens=60)
        for method in methods("best_first", widths=[2, 32])
    )
    assert recommend([wide, narrow]) == narrow


def test_ways_that_do_not_differ_are_predicted_once():
    grid = {"widths": [8, 16], "children": [4, 8], "rounds": [1, 2]}
    assert len(methods("root", **grid)) == 1
    assert [method.settings for method in methods("static_tree", **grid)] == [
        ("policy=static_tree", f"proposer.rounds={rounds}") for rounds in (1, 2)
    ]
    assert {method.policy for method in methods("root", **grid)} == {Root()}
    assert len(methods("level", **grid)) == 4
    assert len(methods("best_first", **grid)) == 8
    with pytest.raises(ConfigError, match="not known"):
        methods("nothing")


FLAT = {1: 2.0, 2: 2.0, 3: 2.0}
HALVED = {1: 40.0, 2: 20.0, 3: 15.0}


def test_every_division_uses_all_devices_once():
    assert [*divisions(4)] == [
        Division(1, 3, 1),
        Division(1, 1, 3),
        Division(2, 2, 1),
        Division(2, 1, 2),
        Division(3, 1, 1),
    ]
    assert all(sum(each.sizes) == 6 for each in divisions(6))


@pytest.mark.parametrize(("target_ms", "draft_ms", "best"), [(HALVED, FLAT, 1), (FLAT, HALVED, 3)])
def test_devices_go_where_they_shorten_the_time_most(target_ms, draft_ms, best):
    layouts = [
        each.layout(machine(1, target_ms[each.members], draft_ms=draft_ms[each.draft]))
        for each in divisions(4)
        if each.stages == 1
    ]
    method = DecodingMethod("best_first", BestFirst(8, 8), "auto")
    predicted = predict_all(layouts, [method], PUBLISHED, num_tokens=80)
    assert len(predicted) == 3
    assert predicted[0].layout.startswith(f"{best} + 1 x ")


def test_json_holds_the_input_and_the_predictions(capsys):
    options = ["stages=4", "stage_ms=1:20,64:30", "hop_ms=1", "--tokens", "50"]
    assert main(["plan", "--json", "policy.width=8", "proposer.rounds=1,auto", *options]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["plain_tbt_ms"] == 84
    assert answer["profile"]["stages"] == 4
    found = {(p["policy"], p["rounds"]) for p in answer["predictions"]}
    assert {("root", 1), ("level", 1), ("best_first", 1), ("best_first", "auto")} <= found
    assert answer["recommended"] in answer["predictions"]
    root = next(p for p in answer["predictions"] if p["policy"] == "root")
    assert root["tbt_ms"] == pytest.approx(84) and root["speedup"] == pytest.approx(1)


@pytest.mark.slow
def test_the_table_fits_a_terminal_and_advises(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "policy.width=8", "proposer.rounds=1", "--tokens", "50"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    assert "Recommended: policy=" in out


def test_where_speculation_loses_it_says_so(capsys):
    options = ["stages=2", "stage_ms=10", "draft_ms=90", "curve=1:0.1"]
    assert main(["plan", "policy.width=8", "proposer.rounds=1", "--tokens", "30", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "No combination would be faster than plain pipeline parallelism.",
        "Recommended: policy=root",
    ]


def test_what_the_plan_found_is_a_sentence_a_line(capsys):
    options = ["stages=4", "stage_ms=10", "draft_ms=12", "--tokens", "60"]
    policies = ["policy=root,static_tree,best_first", "policy.width=8", "proposer.rounds=1,4"]
    assert main(["plan", *options, *policies]) == 0
    said = capsys.readouterr().out.partition("TBT is the time")[2].splitlines()
    assert all(line.endswith(".") or line.startswith("Recommended: ") for line in said), said
    assert any(re.search(r"\d of \d speculating combinations would be slower", x) for x in said)


def test_a_profile_is_read_and_options_come_before_it(tmp_path, capsys):
    file = tmp_path / "profile.json"
    few = ["plan", "policy=root", "--tokens", "5", "--json", "--profile", str(file)]
    two = {"stages": 2, "stage_ms": [["1:5"], [7.0]], "hop_ms": 1}
    for options, tbt_ms in (([], 14), (["hop_ms=0"], 12)):
        file.write_text(json.dumps(two))
        assert main([*few, *options]) == 0
        assert json.loads(capsys.readouterr().out)["plain_tbt_ms"] == tbt_ms
    # A draft that shared the only stage works beside several.
    for options, overlap in (([], False), (["stages=1"], False), (["stages=4"], True)):
        file.write_text(json.dumps({"stages": 1, "stage_ms": ["1:5"], "overlap": False}))
        assert main([*few, *options]) == 0
        assert json.loads(capsys.readouterr().out)["profile"]["overlap"] == overlap


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object of stages, stage_ms"),
        ('{"stage": 2}', "must be a JSON object of stages, stage_ms"),
        ('{"stages": 3, "stage_ms": [[1], [2]]}', "stage_ms is given for 2 stages"),
        ('{"hop_ms": "1"}', "hop_ms is '1'"),
        ('{"stages": true}', "stages is True"),
        ('{"curve": 3}', "curve is 3"),
        ('{"stage_ms": {}}', "stage_ms is {}"),
    ],
)
def test_a_profile_that_is_wrong_is_one_sentence(tmp_path, capsys, content, part):
    file = tmp_path / "profile.json"
    file.write_text(content)
    assert main(["plan", "--profile", str(file)]) == 2
    assert part in capsys.readouterr().err
