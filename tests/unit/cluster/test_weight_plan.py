"""Who sends which pieces to whom."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.cluster.weight_plan import HUB, Key, Transfer, plan_transfers
from pipespec.errors import ModelError

MIB = 2**20
HOSTS = ("a", "b", "c", "d")


def key(number: int) -> Key:
    return "target", "m.safetensors", number * 32 * MIB, (number + 1) * 32 * MIB


def plan(
    lacks: dict[str, set[Key]], holders: dict[str, set[Key]], *, on_hub: bool = False
) -> list[Transfer]:
    return plan_transfers(lacks, holders, ["target"] if on_hub else [])


def sent(transfers: list[Transfer]) -> Counter[str]:
    found = Counter[str]()
    for each in transfers:
        found[each.source] += len(each.keys)
    return found


def test_a_host_sends_no_piece_to_several_hosts_that_can_pass_it_on() -> None:
    keys = {key(number) for number in range(12)}
    transfers = plan(dict.fromkeys("bcd", keys), {"a": keys})
    # 36 pieces are sent, as evenly as can be: each to each, none of the receivers by itself.
    assert sent(transfers)["a"] == len(keys)
    assert sent(transfers).total() == 36
    assert max(sent(transfers).values()) <= 13


def test_hosts_that_all_have_a_piece_share_the_work() -> None:
    keys = {key(number) for number in range(8)}
    assert sent(plan({"d": keys}, {"a": keys, "b": keys})) == {"a": 4, "b": 4}


def test_a_busy_host_leaves_to_others_what_they_have_too() -> None:
    only, both = {key(number) for number in range(6)}, {key(number) for number in range(6, 10)}
    assert sent(plan({"c": only | both}, {"a": only | both, "b": both})) == {"a": 6, "b": 4}


def test_the_hub_sends_every_piece_once() -> None:
    keys = {key(number) for number in range(6)}
    assert sent(plan(dict.fromkeys("abc", keys), {}, on_hub=True))[HUB] == len(keys)


def test_a_piece_that_no_host_has_names_its_file() -> None:
    sentence = r"^b needs bytes of m\.safetensors of the target that no host has; copy m\.safetens"
    with pytest.raises(ModelError, match=sentence):
        plan({"b": {key(1), key(2)}}, {"a": {key(1)}})


sets = st.dictionaries(st.sampled_from(HOSTS), st.sets(st.builds(key, st.integers(0, 20))))


@given(sets, sets)
def test_every_host_gets_all_that_it_lacks_once_and_from_a_host_that_has_it_by_then(
    lacks: dict[str, set[Key]], holders: dict[str, set[Key]]
) -> None:
    lacks = {name: keys - holders.get(name, set()) for name, keys in lacks.items()}
    transfers = plan(lacks, holders, on_hub=True)
    got: defaultdict[str, list[Key]] = defaultdict(list)
    has = {name: set(holders.get(name, ())) for name in HOSTS}
    for depth in sorted({each.depth for each in transfers}):
        level = [each for each in transfers if each.depth == depth]
        for each in level:
            assert each.source == HUB or has[each.source] >= set(each.keys)
            assert each.source != each.to
            got[each.to] += each.keys
        for each in level:
            has[each.to] |= set(each.keys)
    assert {name: sorted(keys) for name, keys in lacks.items() if keys} == {
        name: sorted(keys) for name, keys in got.items()
    }
    sent_by_hub = [key for each in transfers if each.source == HUB for key in each.keys]
    assert len(sent_by_hub) == len(set(sent_by_hub))
