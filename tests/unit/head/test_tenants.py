"""What the requests of several tenants get of one pipeline."""

from collections import Counter
from itertools import count

import numpy as np
import pytest

from pipespec.core import DRAFT, KIND, LAST_COMMITTED, SEQUENCE, Request, Verdict
from pipespec.head.policies.root import Root
from pipespec.head.scheduler import Scheduler
from pipespec.head.scheduler_types import SchedulerConfig
from pipespec.head.sequence import TURN
from pipespec.timing.batch_times import BatchTimes

PLACES = 4
LONG = 400  # tokens of an answer


class Tenants:
    """A scheduler whose pipeline decides a token of each row that needs one, two steps later."""

    def __init__(self, num_slots: int = 2**62, places: int = PLACES):
        config = SchedulerConfig(Root(), 2, 1, 64, 10_000, places, 64, num_slots, max_retained=16)
        self.scheduler = Scheduler(config)
        self.admission = self.scheduler.admission
        self.ids = count()
        self.tokens: Counter[str | int] = Counter()  # decided, by tenant and by request
        self.started: dict[int, int] = {}  # the step of the first token, by request
        self.ended: list[int] = []
        self.rows = 0  # of the last batch
        self._leaving: list[set[int]] = [set(), set()]  # sequences whose next tokens are computed

    def add(self, tenant: str, new_tokens: int = LONG, prompt: int = 2, priority: int = 0) -> int:
        number = next(self.ids)
        tokens = tuple(1000 * number + i for i in range(prompt))  # nothing is shared
        request = Request(number, tokens, new_tokens, priority=priority, tenant=tenant)
        self.admission.add(request, lambda token: False, 0)
        return number

    def run(self, steps: int) -> None:
        for _ in range(steps):
            on = self.scheduler
            list(on.admit())
            on.begin_step()
            for number in self._leaving.pop(0):
                if (sequence := self.admission.sequences.get(number)) is None:
                    continue
                request = sequence.request
                update = on.apply(Verdict(number, len(sequence.context.tokens), (7,)), 0)
                self.tokens.update((request.tenant, request.id))
                self.started.setdefault(request.id, on.step)
                if update is not None and update.reason:
                    self.ended.append(request.id)
            on.end_verdicts(0.0, 1.0)
            self.admission.preempt()
            batch = on.next_batch(on.plan_batch(0.0))
            self.rows = len(batch)
            last = batch.rows[np.isin(batch.rows[:, KIND], (DRAFT, LAST_COMMITTED)), SEQUENCE]
            self._leaving.append({*last.tolist()})
            on.end_step(1.0)

    def steps_to_start(self, tenant: str, **request: int) -> int:
        """Steps from the arrival of a short request to its first token."""
        number, before = self.add(tenant, 8, **request), self.scheduler.step
        while number not in self.started:
            assert self.scheduler.step < before + 1000, "it starves"
            self.run(1)
        return self.started[number] - before


# Whose requests are there already, and how many steps a short one of another tenant may take to its
# first token (without any other, 3).
CROWDS = {
    "one tenant": (["crowd"] * 50, {}, 2**62, 6),
    "long prompts": (["crowd"] * 50, {"prompt": 640}, 2**62, 6),
    "of more urgent requests": (["crowd"] * 50, {"priority": -9}, 2**62, 6),
    "all KV slots": (["crowd"] * 50, {}, 300, 12),
    "a tenant for each place but one": ([*"abc"] * 10, {}, 2**62, 6),
    "a tenant for each place": ([*"abcd"] * 10, {}, 2**62, 8),
    "more tenants than places": ([*"abcdefgh"], {}, 2**62, 16),
    "more tenants with long prompts": ([*"abcdefgh"], {"prompt": 640}, 2**62, 80),
    "requests without a key": ([""] * 50, {}, 2**62, 6),
}


@pytest.mark.parametrize(("crowd", "of_crowd", "num_slots", "most"), CROWDS.values(), ids=CROWDS)
@pytest.mark.parametrize("after", [0, 40])
def test_short_request_starts_at_once_beside_many_long_ones_of_others(
    crowd: list[str], of_crowd: dict[str, int], num_slots: int, most: int, after: int
):
    on = Tenants(num_slots)
    for tenant in crowd:
        on.add(tenant, **of_crowd)
    on.run(after)
    assert on.steps_to_start("short") <= most
    on.run(12 + most)
    assert len(on.ended) == 1, "it goes on to its end"


def test_urgent_request_takes_the_place_of_another_of_its_tenant():
    on = Tenants()
    for _ in range(20):
        on.add("")
    on.run(30)
    assert on.steps_to_start("", priority=-1) <= 6
    later = on.add("", 8)
    on.run(200)
    assert later not in on.started, "of equal priority the first to arrive goes first"


def test_tenants_with_many_requests_get_as_many_tokens_as_each_other():
    """Whatever the number, the priority and the prompts of their requests."""
    on = Tenants()
    for tenant, requests, fields in (
        ("many", 100, {"priority": -5}),
        ("few", 10, {"priority": 5}),
        ("long prompts", 30, {"prompt": 100}),
        ("one", 1, {}),
    ):
        for _ in range(requests):
            on.add(tenant, **fields)
    on.run(LONG // 2)
    tokens = [on.tokens[tenant] for tenant in ("many", "few", "long prompts", "one")]
    assert max(tokens) <= 1.2 * min(tokens)
    preemptions = on.admission.preemptions
    on.run(LONG // 4)
    assert on.admission.preemptions == preemptions, "who has a share keeps it"


def test_more_tenants_than_places_take_turns_and_all_end():
    on = Tenants(num_slots=500)
    numbers = [on.add(f"tenant {i}", 60, prompt=20) for i in range(3 * PLACES)]
    on.run(12 * 60)
    assert max(on.started.values()) <= 8 * TURN, "no tenant waits for another's end"
    assert sorted(on.ended) == numbers
    assert on.admission.preemptions <= 3 * PLACES * 60 / TURN, (
        "a turn is long enough to be worth it"
    )


def test_tenant_that_was_away_has_saved_up_no_turns():
    on = Tenants()
    on.add("early", 8)
    for i in range(2 * PLACES):
        on.add(f"tenant {i}")
    on.run(300)
    early, before = on.add("early"), on.tokens.copy()
    on.run(200)
    assert early in on.started
    others = [on.tokens[name] - before[name] for name in before if name not in (0, "early")]
    assert on.tokens[early] <= 2 * np.median(others)


DEAR = [(1, 11.0), (2, 12.0), (4, 14.0), (8, 18.0), (16, 26.0), (32, 42.0), (64, 74.0)]
CHEAP = [(1, 11.0), (64, 12.0)]


@pytest.mark.parametrize(
    ("times", "answers", "most_rows"),
    [
        pytest.param(DEAR, {"victim": 1, "crowd": 40}, 4, id="rows are dear"),
        pytest.param(DEAR, {"victim": 1, "crowd": 20, "other crowd": 20}, 8, id="two crowds"),
        pytest.param(DEAR, {"victim": 10, "crowd": 10}, 20, id="as many of each"),
        pytest.param(DEAR, {"crowd": 40}, 40, id="one tenant"),
        pytest.param(CHEAP, {"victim": 1, "crowd": 40}, 41, id="rows cost nothing"),
        pytest.param([], {"victim": 1, "crowd": 40}, 41, id="nothing is measured"),
    ],
)
def test_many_answers_of_a_tenant_do_not_lengthen_the_steps_of_others(
    times: list[tuple[int, float]], answers: dict[str, int], most_rows: int
):
    """A step lasts at most 1.5 times as long as with the roots of the others alone."""
    on = Tenants(places=64)
    on.scheduler.update_stage_times(BatchTimes(tuple(times)))
    numbers = {tenant: [on.add(tenant) for _ in range(n)] for tenant, n in answers.items()}
    on.run(20)
    before, rows = on.tokens.copy(), []
    for _ in range(80):
        on.run(1)
        rows.append(on.rows)
    gained = on.tokens - before
    assert max(rows) <= most_rows
    smallest = min(answers, key=lambda tenant: answers[tenant])
    assert all(gained[number] >= 39 for number in numbers[smallest]), "it loses no step"
    for own in numbers.values():
        tokens = [gained[number] for number in own]
        assert max(tokens) - min(tokens) <= 3, "the answers of a tenant take turns"
        assert min(tokens) > 0
