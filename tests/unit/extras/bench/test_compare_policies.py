"""Ways to decode: how they are read, what a cluster for all of them needs, what is said of them."""

from dataclasses import replace
from typing import Any

import pytest

from pipespec.cluster.decide import decide
from pipespec.cluster.ranks.rank_components import num_profiled_rows, scheduler_config
from pipespec.config.compose import compose
from pipespec.controller.log_records import pack_requests, unpack_request, unpack_shared
from pipespec.core import Request
from pipespec.errors import ConfigError
from pipespec.extras.bench.comparison import Comparison, composed, policies_of
from pipespec.head.policies.level import Level
from pipespec.head.policies.root import Root
from pipespec.placement.measurements import draft_slots
from tests.helpers.figures import result


def test_policies_are_listed_with_commas_and_have_settings_of_their_own() -> None:
    listed = "root, level  policy.width=8 policy.children=2,static_tree policy.shape=[1,2,1]"
    assert policies_of(listed) == [
        "policy=root",
        "policy=level policy.width=8 policy.children=2",
        "policy=static_tree policy.shape=[1,2,1]",
    ]


@pytest.mark.parametrize(
    ("listed", "part"),
    [
        ("root, root ", "'policy=root' is given twice"),
        ("level proposer.rounds=2", "holds 'proposer.rounds=2', but a policy sets policy.* alone"),
    ],
)
def test_what_is_no_way_is_refused(listed: str, part: str) -> None:
    with pytest.raises(ConfigError) as refused:
        policies_of(listed)
    assert part in str(refused.value)


@pytest.mark.parametrize(
    ("policy", "part"),
    [
        ("policy=levle", "did you mean"),
        ("policy=level policy.width=99", "feeds up to 99 rows"),
    ],
)
def test_every_way_is_checked(policy: str, part: str) -> None:
    with pytest.raises(ConfigError) as refused:
        composed(["scheduler.max_num_batched_tokens=64"], ["policy=root", policy])
    assert part in str(refused.value)


def test_the_cluster_is_made_for_the_most_that_any_way_needs() -> None:
    settings = ["cluster.stages=2", "decode.prefill_chunk=1"]
    policies = ["policy=root", "policy=level policy.width=32", "policy=best_first policy.width=8"]
    config = composed(settings, policies)
    wide = compose([*settings, "policy=level", "policy.width=32"])
    assert (config.policy, list(config.request_policies)) == (Root(), policies)
    assert config.request_policies[policies[1]] == Level(32)
    assert config.max_rows == wide.max_rows == 32
    assert config.fed_rows == wide.fed_rows
    assert draft_slots(config, num_ranks=3, head=False) == draft_slots(
        wide, num_ranks=3, head=False
    )
    assert config.max_nodes == max(each.max_nodes for each in config.policies) > Root().max_nodes
    alone = replace(config, scheduler=replace(config.scheduler, max_num_seqs=1))
    assert num_profiled_rows(alone) == 32, "best_first asks what rows cost"
    decides = scheduler_config(decide(config), kv_tokens=100)
    assert decides.policy_of("") == decides.policy_of("policy=root") == Root()
    assert decides.policy_of(policies[1]) == Level(32)
    assert decides.rows == 32


def test_what_one_way_allows_is_allowed_in_any_order() -> None:
    settings, policies = ["proposer.overlap=no"], ["policy=root", "policy=best_first"]
    for ordered in (policies, policies[::-1]):
        assert list(composed(settings, ordered).request_policies) == ordered
    with pytest.raises(ConfigError, match=r"leave proposer\.overlap out"):
        composed(settings, policies[:1])


def test_children_of_every_way_must_be_in_the_vocabulary() -> None:
    config = composed([], ["policy=root", "policy=level policy.children=4096 policy.width=1"])
    with pytest.raises(ConfigError, match=r"policy\.children is 4096"):
        decide(config)


def test_the_log_keeps_the_way_of_a_request_and_knows_older_requests() -> None:
    request = Request(7, (1, 2), 3, policy="policy=level policy.width=4")
    shared, (own,) = pack_requests([request])
    assert unpack_request(7, unpack_shared(shared.encode()), own.encode()) == request
    old = unpack_shared(shared.replace(',"policy":"policy=level policy.width=4"', "").encode())
    assert unpack_request(7, old, own.encode()) == replace(request, policy="")


def test_figures_are_beside_those_of_the_first_way() -> None:
    done = Comparison(
        {
            "policy=root": result([1, 2, 3], between_ms=20.0),
            "policy=level": result([1, 2, 3], between_ms=5.0),
        }
    )
    first, second = done.rows()
    assert (first["policy"], second["policy"]) == ("policy=root", "policy=level")
    assert (first["tokens_per_s"], second["tokens_per_s"]) == pytest.approx((50.0, 200.0))
    assert (first["speed_up"], second["speed_up"]) == pytest.approx((1.0, 4.0))
    assert second["tokens_per_step"] == pytest.approx(0.5)
    assert done.differing == {}


@pytest.mark.parametrize("other", [[1, 2, 4], [1, 2], [1, 2, 3, 4]])
def test_answers_that_differ_in_a_token_or_in_length_are_counted(other: list[int]) -> None:
    same: list[Any] = [[5], [1, 2, 3]]
    done = Comparison({"a": result(*same), "b": result([5], other), "c": result(*same)})
    assert done.differing == {"b": 1}
    assert [row["differing_answers"] for row in done.rows()] == [0, 1, 0]
