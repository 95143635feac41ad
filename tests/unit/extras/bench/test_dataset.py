"""A data set is read whole and in order; what is wrong with it is one sentence with its place."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from pipespec.errors import ConfigError
from pipespec.extras.bench.dataset import Load, Sample, load

SHIPPED = Path(__file__).parents[3] / "benchmarks" / "data"


def line(number: int, **more: object) -> str:
    return json.dumps({"id": f"q{number}", "benchmark": "quiz", "prompt": f"Why {number}?"} | more)


def write(file: Path, *lines: str) -> Path:
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def test_a_file_is_read_in_order_and_other_keys_are_ignored(tmp_path):
    file = write(tmp_path / "a.jsonl", line(1, reference="Because."), "", line(2))
    assert load(file) == [Sample("q1", "quiz", "Why 1?"), Sample("q2", "quiz", "Why 2?")]
    assert load(str(file)) == load(file)


def test_a_text_may_hold_what_unicode_calls_the_end_of_a_line(tmp_path):
    text = "one\u2028two\u0085three"
    item = {"id": "q", "benchmark": "quiz", "prompt": text}
    file = write(tmp_path / "a.jsonl", json.dumps(item, ensure_ascii=False))
    assert load(file)[0].prompt == text


@pytest.mark.parametrize(
    ("limit", "chosen"), [(1, [0]), (2, [0, 4]), (4, [0, 2, 4, 6]), (8, range(8)), (99, range(8))]
)
def test_a_limit_takes_at_equal_distances_of_the_files_of_a_folder(tmp_path, limit, chosen):
    write(tmp_path / "b.jsonl", *map(line, range(4, 8)))
    write(tmp_path / "a.jsonl", *map(line, range(4)))
    write(tmp_path / "notes.txt", "no data")
    assert [sample.id for sample in load(tmp_path, limit)] == [f"q{i}" for i in chosen]


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        ('{"id": "q9"', "is not JSON"),
        ('["q9"]', "is not a JSON object"),
        ('{"id": "q9", "prompt": "Why?"}', "has no 'benchmark'"),
        ('{"benchmark": "quiz", "prompt": "Why?"}', "has no 'id'"),
        (line(9, prompt=["Why?"]), "'prompt' is ['Why?'], but must be a text"),
        (line(9, id=9), "'id' is 9, but must be a text"),
        (line(9, prompt=""), "'prompt' is empty"),
        (line(9, prompt="\ud800"), "'prompt' holds half a character"),
    ],
)
def test_a_bad_line_is_named(tmp_path, bad, part):
    file = write(tmp_path / "a.jsonl", line(1), bad)
    with pytest.raises(ConfigError) as refused:
        load(file)
    assert str(refused.value).startswith(f"{file}, line 2")
    assert part in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_id_is_given_once(tmp_path):
    first = write(tmp_path / "a.jsonl", line(1))
    again = write(tmp_path / "b.jsonl", line(2), line(1))
    with pytest.raises(ConfigError) as refused:
        load(tmp_path)
    assert str(refused.value).startswith(f"{again}, line 2: the id 'q1'")
    assert f"{first}, line 1" in str(refused.value)


def test_what_is_no_data_set_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match=r"holds no file \*\.jsonl"):
        load(tmp_path)
    empty = write(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match="holds no sample"):
        load(empty)
    empty.write_bytes(b'{"id": "\xff"}')
    with pytest.raises(ConfigError, match="line 1: it is not UTF-8 text at byte 8"):
        load(empty)
    with pytest.raises(ConfigError, match="num_prompts is 0"):
        load(write(empty, line(1)), 0)


@pytest.mark.skipif(not SHIPPED.is_dir(), reason="only a checkout has benchmarks/")
def test_the_shipped_data_set_is_whole_and_a_limit_takes_of_every_benchmark():
    samples = load(SHIPPED)
    assert len(samples) == 320
    names = {sample.benchmark for sample in samples}
    assert {sample.benchmark for sample in load(SHIPPED, 4)} == names
    assert len(names) == 4


def test_a_rate_is_exact_over_all_requests():
    due = Load(None, 4.0).due_s(50)
    assert due == sorted(due)
    assert due[0] > 0
    assert due[-1] == pytest.approx(50 / 4)


def test_gaps_are_those_of_a_poisson_process():
    due = Load(None, 5.0).due_s(20_000)
    gaps = [b - a for a, b in pairwise(due)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 5, rel=0.01)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.01)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({}, (1, math.inf)),
        ({"concurrency": 8}, (8, math.inf)),
        ({"request_rate": 2.5}, (None, 2.5)),
        ({"request_rate": math.inf}, (None, math.inf)),
        ({"request_rate": 2.5, "concurrency": 8}, (8, 2.5)),
    ],
)
def test_one_at_a_time_unless_more_is_said(given, meant):
    load = Load.of(**given)
    assert (load.concurrency, load.request_rate) == meant


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"concurrency": 0}, "concurrency is 0"),
        ({"request_rate": 0.0}, "request_rate is 0.0, but must be a number from 1e-06 to"),
        ({"request_rate": -1}, "request_rate is -1"),
        ({"request_rate": math.nan}, "request_rate is nan"),
        ({"request_rate": -math.inf}, "1000000000, or inf"),
    ],
)
def test_a_load_that_cannot_be_is_refused(given, part):
    with pytest.raises(ConfigError, match=part):
        Load.of(**given)
