"""Ways to decode: how they are read, what a cluster for all of them needs, what is said of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipespec.client.compare import Comparison, composed, parts, ways_of
from pipespec.cluster.build import profiled_rows, scheduler_config
from pipespec.cluster.deployment import decide
from pipespec.config.compose import compose
from pipespec.controller.records import pack_request, unpack_request
from pipespec.core import Request
from pipespec.errors import ConfigError
from pipespec.head.feed.level import Level
from pipespec.head.feed.root import Root
from pipespec.planning.placement import guess_slots
from tests.helpers.figures import result

# --- what is asked ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way",
    [
        "feed=static_tree feed.shape=[1,2,1] feed.width=8",
        "feed=static_tree,feed.shape=[1,2,1],feed.width=8",
        " feed=static_tree, feed.shape=[1,2,1]  feed.width=8,",
    ],
)
def test_the_settings_of_a_way_have_blanks_or_commas_between_them(way: str) -> None:
    assert parts(way) == ["feed=static_tree", "feed.shape=[1,2,1]", "feed.width=8"]


def test_what_sets_feed_is_a_way_and_the_rest_is_for_all() -> None:
    texts = [
        "cluster.stages=2",
        "feed=root",
        "pace=fixed",
        "feed=level,feed.width=4",
        "feed.width=2",
    ]
    assert ways_of(texts) == (
        ["feed=root", "feed=level feed.width=4", "feed.width=2"],
        ["cluster.stages=2", "pace=fixed"],
    )


@pytest.mark.parametrize(
    ("texts", "part"),
    [
        ([], "No way was given"),
        (["cluster.stages=2"], "No way was given"),
        (["feed=root", " feed=root "], "'feed=root' is given twice"),
        (["feed=level source.rounds=2"], "holds 'source.rounds=2', but a way sets feed.* alone"),
    ],
)
def test_what_is_no_way_is_refused(texts: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ways_of(texts)
    assert part in str(refused.value)


@pytest.mark.parametrize(
    ("way", "part"),
    [
        ("feed=levle", "did you mean"),
        ("feed=root feed.width=4", "'feed.width' does not exist with feed=root"),
        ("feed=level feed.width=0", "feed.width is 0"),
        ("feed=level feed.width=99", "feeds up to 99 rows"),
        ("feed=level feed.width=a", "feed.width is 'a'"),
    ],
)
def test_every_way_is_checked(way: str, part: str) -> None:
    with pytest.raises(ConfigError) as refused:
        composed(["scheduler.max_num_batched_tokens=64"], ["feed=root", way])
    assert part in str(refused.value)


# --- the cluster for all ----------------------------------------------------------------------


def test_the_cluster_is_made_for_the_most_that_any_way_needs() -> None:
    settings = ["cluster.stages=2", "decode.prefill_chunk=1"]
    ways = ["feed=root", "feed=level feed.width=32", "feed=best_first feed.width=8"]
    config = composed(settings, ways)
    wide = compose([*settings, "feed=level", "feed.width=32"])
    assert (config.feed, list(config.ways)) == (Root(), ways)
    assert config.ways[ways[1]] == Level(32)
    assert config.max_rows == wide.max_rows == 32
    assert config.fed_rows == wide.fed_rows
    assert guess_slots(config, num_ranks=3, head=False) == guess_slots(
        wide, num_ranks=3, head=False
    )
    assert config.capacity == max(policy.capacity for policy in config.policies) > Root().capacity
    alone = replace(config, scheduler=replace(config.scheduler, max_num_seqs=1))
    assert profiled_rows(alone) == 32, "best_first asks what rows cost"
    decides = scheduler_config(decide(config), kv_tokens=100)
    assert decides.policy_of("") == decides.policy_of("feed=root") == Root()
    assert decides.policy_of(ways[1]) == Level(32)
    assert decides.rows == 32


def test_children_of_every_way_must_be_in_the_vocabulary() -> None:
    config = composed([], ["feed=root", "feed=level feed.children=4096 feed.width=1"])
    with pytest.raises(ConfigError, match=r"feed\.children is 4096"):
        decide(config)


def test_the_log_keeps_the_way_of_a_request_and_knows_older_requests() -> None:
    request = Request(7, (1, 2), 3, feed="feed=level feed.width=4")
    assert unpack_request(7, pack_request(request).encode()) == request
    old = pack_request(request).replace(', "feed": "feed=level feed.width=4"', "")
    assert unpack_request(7, old.encode()) == replace(request, feed="")


# --- what is said -----------------------------------------------------------------------------


def test_figures_are_beside_those_of_the_first_way() -> None:
    done = Comparison(
        {
            "feed=root": result([1, 2, 3], between_ms=20.0),
            "feed=level": result([1, 2, 3], between_ms=5.0),
        }
    )
    first, second = done.rows()
    assert (first["way"], second["way"]) == ("feed=root", "feed=level")
    assert (first["tokens_per_s"], second["tokens_per_s"]) == pytest.approx((50.0, 200.0))
    assert (first["speed_up"], second["speed_up"]) == pytest.approx((1.0, 4.0))
    assert second["tokens_per_step"] == pytest.approx(0.5)
    assert done.differing() == {"feed=root": 0, "feed=level": 0}


def test_one_token_has_no_rate() -> None:
    (row,) = Comparison({"feed=root": result([1])}).rows()
    assert (row["tokens_per_s"], row["speed_up"]) == (None, None)


@pytest.mark.parametrize("other", [[1, 2, 4], [1, 2], [1, 2, 3, 4]])
def test_answers_that_differ_in_a_token_or_in_length_are_counted(other: list[int]) -> None:
    same: list[Any] = [[5], [1, 2, 3]]
    done = Comparison({"a": result(*same), "b": result([5], other), "c": result(*same)})
    assert done.differing() == {"a": 0, "b": 1, "c": 0}
    assert [row["differing_answers"] for row in done.rows()] == [0, 1, 0]
