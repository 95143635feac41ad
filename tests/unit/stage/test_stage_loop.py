"""The loop of a stage in one thread: what it sends for which batches and verdicts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipespec.controller.task_graph import TaskKind
from pipespec.controller.verdict_exchange import unpack_verdicts
from pipespec.core import NODE, NUM_COLUMNS, Batch, SamplingParams, SequenceStart, Verdict
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.runner import SliceRunner
from pipespec.errors import RankFailed
from pipespec.head.proposer import Context
from pipespec.sampling.wire_format import pack
from pipespec.stage.stage_loop import StageLoop, StageSettings
from pipespec.timing.stats import merge_periods
from pipespec.timing.trace import Timeline
from tests.helpers import models
from tests.helpers.story import StoryController, StoryLink

NUM_SLOTS = 64
PROMPT = [3, 1, 4]
TIP = len(PROMPT) - 1
# The seventh sequence is the one life of the fifth request.
OPENING = SequenceStart(7, 5, len(PROMPT), len(PROMPT), pack(SamplingParams(), ()))
A, B, BELOW_A, BELOW_B = 10, 11, 12, 13  # nodes


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return models.build("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def first(folder: Path) -> ModelSlice:
    return ModelSlice.load(folder, range(1), num_slots=NUM_SLOTS)


@pytest.fixture(scope="module")
def last(folder: Path) -> ModelSlice:
    return ModelSlice.load(folder, range(1, 2), num_slots=NUM_SLOTS)


def prompt(step: int) -> Batch:
    return Batch(step, Context(7, PROMPT, [0, 1, 2]).rows(0), started=(OPENING,))


def guesses(step: int, *rows: tuple[int, int, int, int]) -> Batch:
    """Rows of (node, parent, token, position) of that sequence."""
    found = np.zeros((len(rows), NUM_COLUMNS), np.int64)
    found[:, :5] = [(7, *row) for row in rows]
    return Batch(step, found)


def loop_of(
    stage: SliceRunner,
    link: StoryLink,
    controller: StoryController,
    timeline: Timeline | None = None,
    **settings: Any,
) -> StageLoop:
    told = StageSettings(**{"num_stages": 2, **settings})
    return StageLoop(stage, link, controller, told, timeline or Timeline())


def ran(
    model: ModelSlice,
    rank: int,
    batches: list[Batch],
    verdicts: dict[int, list[Verdict]] | None = None,
) -> tuple[list[Batch], StoryController, SliceRunner]:
    """What a stage sends for its batches, an empty one and a stop."""
    stop = [Batch(len(batches)), Batch(len(batches) + 1, stop=True)]
    told = verdicts or {}
    controller = StoryController(verdicts=lambda step: told.get(step, []))
    link = StoryLink(rank, [*batches, *stop])
    stage = SliceRunner(model, NUM_SLOTS)
    loop_of(stage, link, controller).run_until_stop()
    stage.check_integrity()
    return link.sent, controller, stage


class CutLink(StoryLink):
    """A link that breaks when nothing more is to come."""

    def recv(self) -> Batch:
        try:
            return super().recv()
        except StopIteration as error:
            raise RankFailed("the neighbour is gone") from error


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("loses", [True, False])
def test_lost_kv_slot_is_detected_however_the_epoch_ends(first, stopped, loses):
    stage = SliceRunner(first, NUM_SLOTS)
    if loses:
        stage.slots.allocate(1)
    batches = [prompt(0), *([Batch(1, stop=True)] if stopped else [])]
    loop = loop_of(stage, CutLink(1, batches), StoryController())
    if loses:
        with pytest.raises(AssertionError, match="other owners than are counted"):
            loop.run_until_stop()
    elif stopped:
        loop.run_until_stop()
    else:
        with pytest.raises(RankFailed, match="the neighbour is gone"):
            loop.run_until_stop()


def test_batches_are_sent_on_as_they_arrive(first):
    sent, controller, _ = ran(first, 1, [prompt(0)])
    assert [batch.step for batch in sent] == list(range(len(sent)))
    assert [len(batch) for batch in sent] == [3, 0, 0]
    assert sent[0].hidden.shape == (3, first.hidden_size)
    assert sent[-1].stop
    steps = {kind: [t.step for t in controller.completed if t.kind is kind] for kind in TaskKind}
    for kind in (TaskKind.COMPUTE, TaskKind.PRUNE, TaskKind.TRANSFER):
        assert steps[kind] == [0, 1, 2]


def test_stages_share_cores_while_other_batches_are_in_the_pipeline(first):
    told: list[bool] = []
    level = guesses(1, (A, TIP, 5, 3), (B, TIP, 6, 3))
    level.beside = True
    link = StoryLink(1, [prompt(0), level, Batch(2, stop=True)])
    runner = SliceRunner(first, NUM_SLOTS)
    loop_of(runner, link, StoryController(), share_cores=told.append).run_until_stop()
    assert told == [False, True, False]
    assert [batch.beside for batch in link.sent] == told, "later stages are told the same"


def test_pruned_rows_are_not_sent_on(first):
    level = guesses(1, (A, TIP, 5, 3), (B, TIP, 6, 3))
    below = guesses(2, (BELOW_A, A, 7, 4), (BELOW_B, B, 8, 4))
    verdict = {0: [Verdict(7, 3, (6,))]}  # the token of B
    sent, controller, stage = ran(first, 1, [prompt(0), level, below], verdict)
    assert sent[1].rows[:, NODE].tolist() == [B]
    assert sent[2].rows[:, NODE].tolist() == [BELOW_B], "its sibling came after the verdict"
    assert stage.length(7) == 4
    assert controller.reports == {}


def test_miss_prunes_the_whole_tree(first):
    level = guesses(1, (A, TIP, 5, 3), (B, TIP, 6, 3))
    root = guesses(2, (20, TIP, 9, 3))
    sent, _, stage = ran(first, 1, [prompt(0), level, root], {0: [Verdict(7, 3, (9,))]})
    assert [len(batch) for batch in sent[:3]] == [3, 0, 1]
    assert stage.length(7) == 4
    assert stage.slots.num_free == NUM_SLOTS - 4


def test_preempted_sequence_frees_its_kv_slots_without_a_report(first):
    again = replace(OPENING, sequence=8)
    rows = Context(8, PROMPT, [0, 1, 2]).rows(0)
    back = Batch(1, rows, started=(again,), preempted=(7,))
    sent, controller, stage = ran(first, 1, [prompt(0), back])
    assert stage.slots.num_free == NUM_SLOTS - 3
    assert (sent[1].preempted, sent[1].started, len(sent[1])) == ((7,), (again,), 3)
    assert controller.reports == {}


def test_retained_prefix_is_shared_before_any_slot_is_freed(first):
    """The newcomer shares with one whose text is cut in the same batch."""
    again = replace(OPENING, sequence=8, parent=7, shared_len=2)
    context = Context(8, PROMPT, [0, 1, 2])
    batches = [
        prompt(0),
        Batch(1, finished=(7,), retained_prefixes=((7, 3),)),
        Batch(2, context.rows(2), started=(again,), retained_prefixes=((7, 1),)),
        Batch(3, finished=(8,)),
    ]
    sent, controller, stage = ran(first, 1, batches)
    assert [batch.retained_prefixes for batch in sent[:3]] == [(), ((7, 3),), ((7, 1),)]
    assert len(sent[2]) == 1 and controller.reports[5]["rows"] == 1
    assert stage.cached == {7: 1}
    assert stage.slots.num_free == NUM_SLOTS - 1


def test_last_stage_decides_tokens_and_prunes_its_tree(first, last):
    (computed, *_), _, _ = ran(first, 1, [prompt(0)])
    _, controller, stage = ran(last, 2, [computed])
    said = [unpack_verdicts(payload)[0] for payload in controller.payloads]
    (verdict,) = [verdict for verdicts in said for verdict in verdicts]
    logits = last.logits(SliceRunner(last, NUM_SLOTS).compute(computed).hidden)
    assert verdict == Verdict(7, 3, (int(logits[-1].argmax()),))
    assert stage.length(7) == 3


def test_stage_publishes_how_long_batches_take(first):
    seconds = iter(range(1000))
    timeline = Timeline(clock=lambda: next(seconds) * 10**8)
    controller = StoryController()
    link = StoryLink(1, [prompt(0), Batch(1), Batch(2, stop=True)])
    loop_of(SliceRunner(first, NUM_SLOTS), link, controller, timeline).run_until_stop()
    ((rows, ms),) = controller.times.points
    assert rows == 3 and ms > 0


def test_stage_publishes_its_work_when_it_becomes_idle_without_idle_time(first):
    class Clock:
        now = 0

        def __call__(self) -> int:
            self.now += 1000  # so long does everything take
            return self.now

    clock = Clock()
    told: list[dict[str, int]] = []

    class Link(StoryLink):
        def recv(self) -> Batch:
            told.append(controller.counts)
            clock.now += 10 if len(told) in (2, 5) else 10**12  # nothing is open
            return super().recv()

    again = replace(OPENING, sequence=8)
    second = Batch(3, Context(8, PROMPT, [0, 1, 2]).rows(0), started=(again,))
    batches = [prompt(0), Batch(1, finished=(7,)), Batch(2), second, Batch(4, finished=(8,))]
    controller = StoryController()
    link = Link(1, [*batches, Batch(5, stop=True)])
    timeline = Timeline(clock=clock)
    loop_of(SliceRunner(first, NUM_SLOTS), link, controller, timeline).run_until_stop()
    assert told[0] == {}, "nothing yet"
    assert told[2] == told[3], "nothing new while it is idle"
    assert controller.counts.keys() == {"active_ns", "busy_ns", "receive_ns", "send_ns"}
    for name, once in told[2].items():
        assert 0 < once < controller.counts[name] < 10**9
    parts = sum(told[2][name] for name in ("busy_ns", "receive_ns", "send_ns"))
    assert parts < told[2]["active_ns"]


def test_concurrent_requests_report_one_common_period(first):
    def begins(step: int, request: int) -> Batch:
        opening = replace(OPENING, sequence=request, request=request)
        return Batch(step, Context(request, PROMPT, [0, 1, 2]).rows(0), started=(opening,))

    ends = [Batch(step, finished=(7 + number,)) for number, step in enumerate((2, 3, 5))]
    batches = [begins(0, 7), begins(1, 8), *ends[:2], begins(4, 9), ends[2]]
    _, controller, _ = ran(first, 1, batches)
    told = controller.reports
    assert [told[request]["steps"] for request in (7, 8, 9)] == [2, 2, 1]
    periods = [told[request]["period"] for request in (7, 8, 9)]
    assert periods[0]["since_ns"] == periods[1]["since_ns"] < periods[2]["since_ns"]
    whole = merge_periods(periods)
    assert (whole["steps"], whole["rows"]) == (3 + 1, 9)
    assert whole["elapsed_ns"] == periods[1]["elapsed_ns"] + periods[2]["elapsed_ns"]
    assert 0 < whole["busy_ns"] < whole["elapsed_ns"]
