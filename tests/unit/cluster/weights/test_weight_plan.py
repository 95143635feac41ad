from collections import Counter
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.cluster.weights.plan import HUB, Block, plan_round
from pipespec.errors import ModelError

HOSTS = ("a", "b", "c", "d")
Held = dict[str, set[Block]]


def block(number: int) -> Block:
    return "m.safetensors", number


def some(*numbers: int) -> set[Block]:
    return set(map(block, numbers))


def rounds(lacks: Held, holders: Held, *, on_hub: Collection[str] = ()) -> list[Counter[str]]:
    """How many blocks each source sends in each round, until no host lacks any."""
    found = []
    while any(lacks.values()):
        sent, moved = Counter[str](), Counter[Block]()
        plan = plan_round(lacks, holders, on_hub=on_hub)
        transfers = {(to, source): of for to, each in plan.items() for source, of in each.items()}
        for (to, source), blocks in transfers.items():
            assert to in on_hub if source == HUB else holders[source] >= set(blocks)
            assert lacks[to] >= set(blocks) and source != to
            sent[source] += len(blocks)
            moved.update(blocks)
        for each, count in moved.items():  # as many get a block as have it
            assert count <= max(1, sum(each in has for has in holders.values()))
        got = {
            to: {each for (one, _), of in transfers.items() if one == to for each in of}
            for to in lacks
        }
        holders = {name: holders.get(name, set()) | got.get(name, set()) for name in HOSTS}
        lacks = {name: blocks - got[name] for name, blocks in lacks.items()}
        found.append(sent)
    return found


@pytest.mark.parametrize(
    ("lacks", "holders", "on_hub", "sent"),
    [
        # What one host has, it sends once, and the others pass it on.
        (
            dict.fromkeys("bcd", some(*range(12))),
            {"a": some(*range(12))},
            "",
            [{"a": 12}, {"a": 7, "b": 5, "c": 6, "d": 6}],
        ),
        # A busy host leaves to others what they have too.
        (
            {"c": some(*range(10))},
            {"a": some(*range(10)), "b": some(*range(6, 10))},
            "",
            [{"a": 6, "b": 4}],
        ),
        # What is on no host, the hub sends once.
        (dict.fromkeys("ab", some(1, 2)), {}, "ab", [{HUB: 2}, {"a": 1, "b": 1}]),
        # To those who can read there.
        (dict.fromkeys("abc", some(1, 2)), {}, "b", [{HUB: 2}, {"b": 2}, {"a": 1, "b": 1}]),
    ],
    ids=["passed on", "busy", "from the hub", "from the hub to one"],
)
def test_blocks_are_sent_as_evenly_as_can_be(lacks, holders, on_hub, sent):
    assert rounds(lacks, holders, on_hub=on_hub) == sent


def test_a_block_that_no_host_has_names_its_file():
    sentence = r"^b needs bytes of m\.safetensors that no host has; copy it to one of them"
    with pytest.raises(ModelError, match=sentence):
        plan_round({"b": some(1, 2)}, {"a": some(1)}, on_hub=["a"])


sets = st.dictionaries(st.sampled_from(HOSTS), st.sets(st.builds(block, st.integers(0, 20))))


@given(sets, sets)
def test_every_host_gets_all_that_it_lacks_and_the_hub_sends_nothing_twice(lacks, holders):
    lacks = {name: blocks - holders.get(name, set()) for name, blocks in lacks.items()}
    found = rounds(lacks, holders, on_hub=HOSTS)
    on_hosts = set[Block]().union(*holders.values())
    assert sum(each[HUB] for each in found) == len(set[Block]().union(*lacks.values()) - on_hosts)
