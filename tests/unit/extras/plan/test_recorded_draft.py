"""A recorded draft predicts its own texts, and a profile says what was measured."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipespec.cli.main import main
from pipespec.cluster.decide import decide
from pipespec.config.compose import compose
from pipespec.errors import ConfigError
from pipespec.extras.bench.figures import BenchResult
from pipespec.extras.bench.profiling import row_ms, stage_points, with_wide_hop
from pipespec.extras.emulation.machine import EmulatedMachine, TimeCurve
from pipespec.extras.emulation.synthetic_proposer import Accuracy
from pipespec.extras.plan.advice import DecodingMethod, predict
from pipespec.extras.plan.pipeline_times import MISSED, DraftRecord, Machine, Profile, TextRecord
from pipespec.extras.plan.simulation import level_equation, simulate_texts
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.level import Level
from pipespec.timing.batch_times import BatchTimes
from tests.helpers.figures import request

MACHINE = Machine((TimeCurve(((1, 10.0),)),) * 4, draft_ms=2.0)
LEVEL = Level(width=16, children=4)


def text(ranks: list[int], name: str = "t", benchmark: str = "b") -> TextRecord:
    """A draft that is as sure of each of four candidates as they are of use."""
    stated = [[0.7, 0.1, 0.05, 0.05]] * len(ranks)
    return TextRecord(name, benchmark, ranks, stated)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        # The first token of an answer finds no tree, so the second takes the whole pipeline.
        ([1] * 200, level_equation(1.0, 4)),
        ([1] * 50 + [MISSED] * 10 + [1] * 140, level_equation(189 / 199, 4)),
        ([MISSED] * 40, 1 / 4),
    ],
    ids=["all", "misses where they were", "none"],
)
def test_tokens_per_step_follow_from_which_tokens_were_proposed(ranks, expected):
    (ran,) = simulate_texts(LEVEL, MACHINE, [text(ranks)], rounds=1)
    assert ran.tokens == len(ranks) - 1
    assert ran.tokens_per_step == pytest.approx(expected, rel=0.05)


def test_hard_and_easy_texts_are_predicted_each_by_itself():
    hard = text([1, 2, MISSED, 3] * 12, "hard", "prose")
    easy = text([1, 1, 1, 2] * 12, "easy", "code")
    method = DecodingMethod("best_first", BestFirst(width=16, children=4), "auto")
    found = predict(method, MACHINE, DraftRecord([hard, easy]), num_tokens=1000)
    by_name = {each.id: each for each in found.texts}
    assert by_name["easy"].tbt_ms < by_name["hard"].tbt_ms
    assert by_name["easy"].benchmark == "code"
    whole = sum(each.tbt_ms * each.tokens for each in found.texts)
    assert found.tbt_ms == pytest.approx(whole / sum(each.tokens for each in found.texts))


def test_fewer_tokens_take_texts_at_equal_distances():
    record = DraftRecord([text([1] * 10, str(i)) for i in range(8)])
    assert [each.id for each in record.sample(20)] == ["0", "4"]
    assert len(list(record.sample(10**6))) == 8


def test_curve_of_a_record_counts_its_ranks():
    record = DraftRecord([text([1, 1, 2, MISSED]), text([1, 4, 1, 1])])
    curve = Accuracy.parse(record.curve(), record.spread())
    assert curve.hit_rate(1) == pytest.approx(5 / 8)
    assert curve.hit_rate(4) == pytest.approx(7 / 8)
    assert record.confidence() == pytest.approx(0.7)


def test_draft_off_the_path_is_as_sure_as_somewhere_else_in_the_text():
    record = TextRecord("t", "b", [1, MISSED], [[0.9, 0.1], [0.4, 0.3]])
    at, right = np.array([0, 0, 7]), np.array([True, False, True])
    stated, index = record.draw(at, right, np.full(3, 0.9), np.zeros(3))
    assert stated.tolist() == [[0.9, 0.1], [0.4, 0.3], [0.4, 0.3]]
    assert index.tolist() == [0, 2, 2]  # 2: of no candidate


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": [1]}, "number of tokens of the text 't' is 1"),
        ({"ranks": [1, 1, 1]}, "not as many candidates"),
        ({"ranks": [1, 3]}, "rank of the text 't' is 3"),
        ({"probabilities": [[0.5], [0.5, 0.1]]}, "not as many candidates"),
        ({"probabilities": [[0.9, 0.9], [0.5, 0.1]]}, "not from 0 to 1"),
    ],
)
def test_record_that_contradicts_itself_is_refused(change, message):
    values = {"ranks": [1, 2], "probabilities": [[0.6, 0.2], [0.5, 0.1]]} | change
    with pytest.raises(ConfigError, match=message):
        TextRecord("t", "b", **values)


def test_stage_times_join_both_runs_and_never_fall():
    plain = BatchTimes(((1, 5.0), (8, 9.0)))
    wide = BatchTimes(((1, 7.0), (4, 4.5), (16, 6.0)), slot_ms=0.01, slots=100)
    points = stage_points(plain, wide)
    assert points == [(1, 5.0), (4, 5.5), (16, 7.0)]
    assert TimeCurve.parse([f"{rows}:{ms}" for rows, ms in points]) == TimeCurve(tuple(points))


def test_step_that_takes_longer_than_simulated_is_put_down_to_the_hop():
    texts = (text([1] * 40),)
    found = Profile(stages=4, stage_ms=("1:10",), draft_ms=2.0, hop_ms=("1:1",), texts=texts)
    config = compose(["cluster.stages=4", "policy=level", "policy.width=16"])
    slow = ran(step_ms=15.0)
    wide = with_wide_hop(found, config, slow).machine().hop
    assert wide.ms(1) == 1 and wide.ms(16) == pytest.approx(5, rel=0.1)
    assert with_wide_hop(found, config, ran(step_ms=10.5)) == found


def test_hop_beyond_what_was_measured_takes_its_bytes_on_the_slowest_link(tmp_path, capsys):
    """6 ms for one row and 47 for two are no 2,589 for 64."""
    file = profile(tmp_path, hop_ms=["1:6", "2:47"], row_ms=0.01)
    hop = Profile.read(file).machine().hop
    assert [hop.ms(rows) for rows in (1, 2, 64)] == pytest.approx([6, 47, 47.62])
    assert main(["plan", "--profile", file, "policy=level", "--tokens", "50"]) == 0
    assert "measured with up to 2 rows; each row beyond is taken" in capsys.readouterr().out
    slowest = {"links": ({"gbit_s": 10.0}, {"gbit_s": 1.0})}
    deployment = decide(compose(["model=demo", "cluster.stages=2", "model.dtype=float32"]))
    row_bytes = deployment.target.hidden_size * 4
    assert row_ms(deployment, SimpleNamespace(**slowest)) == pytest.approx(row_bytes * 8 / 1e6)
    assert row_ms(deployment, None) == 0


def ran(step_ms: float) -> BenchResult:
    """A request of 40 tokens, one a step."""
    times = [step_ms * i for i in range(40)]
    return BenchResult([request(times, stats={"step_ms": step_ms})], 1.0, 1, {})


def profile(tmp_path: Path, **more: Any) -> str:
    values = {"stages": 2, "stage_ms": [["1:5", "16:8"], ["1:6"]], "draft_ms": ["1:2", "8:4"]}
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(values | more))
    return str(file)


def test_draft_rounds_of_a_profile_take_longer_for_more_nodes(tmp_path):
    machine = Profile.read(profile(tmp_path)).machine()
    assert [machine.round_ms(nodes) for nodes in (1, 8, 15)] == [2, 4, 6]


def test_slots_may_cost_another_time_on_each_stage(tmp_path):
    read = Profile.read(profile(tmp_path, slot_ms=[0.001, 0.002], slots=[1000, 500]))
    later = read.at_context(3000).machine()
    assert [curve.ms(1) for curve in later.stages] == [7, 11]
    assert [curve.ms(16) for curve in later.stages] == [10, 11]


def test_slot_times_of_another_number_of_stages_are_refused(tmp_path):
    read = Profile.read(profile(tmp_path, slot_ms=[0.001, 0.002, 0.003]))
    with pytest.raises(ConfigError, match=r"slot_ms is given for 3 stages, but there are 2\."):
        read.at_context(3000)


@pytest.mark.parametrize(
    ("more", "stage_ms", "draft_ms"),
    [({}, [16, 12], 4), ({"stage_ms": ["1:5", "16:8"], "draft_ms": 3.0}, [16, 16], 3)],
)
def test_profile_is_a_machine_to_emulate(tmp_path, more, stage_ms, draft_ms):
    file = profile(tmp_path, **more)
    config = compose([f"emulate={file}", "cluster.stages=2", "emulate.scale=2"])
    clock = config.emulate
    assert isinstance(clock, EmulatedMachine)
    assert [clock.min_stage_ms(rank, 0, 16) for rank in (1, 2)] == stage_ms
    assert clock.draft.ms(8) == draft_ms and config.time_scale == 2


def test_profile_that_is_missing_or_no_profile_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"profile '.*none.json' cannot be read"):
        compose([f"emulate={tmp_path / 'none.json'}"])
    (tmp_path / "other.json").write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"other.json' has no times of stages; make it with"):
        compose([f"emulate={tmp_path / 'other.json'}"])
    with pytest.raises(ConfigError, match=r"emulate.stage_ms: 'soon' is no time of a stage"):
        compose([f"emulate={profile(tmp_path, stage_ms=['soon'])}"])
