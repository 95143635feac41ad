"""The head's loop in one thread: it sends what the scheduler chooses, and logs the accepted tokens.

The stages are a story: they decide what a text says, n steps after a row was fed.
"""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from pipespec.controller.task_graph import Task, TaskKind
from pipespec.core import (
    DRAFT,
    EXACT,
    GRAMMAR,
    KIND,
    PARENT,
    RELAXED,
    SEQUENCE,
    STRICT,
    TOKEN,
    Batch,
    Request,
    SamplingParams,
)
from pipespec.extras.emulation.machine import TimeCurve
from pipespec.extras.emulation.synthetic_proposer import Accuracy, SyntheticProposer
from pipespec.extras.plan.pipeline_times import Machine
from pipespec.extras.plan.simulation import VOCABULARY, SimulatedPipeline
from pipespec.head.decoding_modes import BESIDE, ONE_TREE, LearntSteps, Modes, deep
from pipespec.head.head_loop import HeadLoop, HeadSettings
from pipespec.head.in_flight import InFlight
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.level import Level
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.head.policies.root import Root
from pipespec.head.policies.static_tree import StaticTree
from pipespec.head.scheduler import Scheduler
from pipespec.head.scheduler_types import SchedulerConfig
from pipespec.sampling.grammar import Compile, GrammarFailed, Matcher
from pipespec.timing.trace import Timeline
from tests.helpers.grammar import OneOf, PatientMasks, compiled
from tests.helpers.story import StoryController, StoryLink, StoryOver, StoryStages

NUM_STAGES = 4
ACCURACY = Accuracy({1: 0.7, 4: 0.95}, spread=0.5)
TEXT = np.random.default_rng(5).integers(VOCABULARY, size=120).tolist()


def head(
    policy: SpeculationPolicy,
    requests: list[Request],
    texts: dict[int, list[int]],
    *,
    rounds: int = 2,
    chunk: int = 1,
    at_once: int = 1,
    most: int = 1000,
    compile_grammar: Compile | None = None,
    **told: object,
) -> tuple[HeadLoop, StoryLink, StoryController]:
    """A head whose stages decide what the texts say, what it sends, and what it logs."""
    link = StoryLink(0, most=most)
    stages = StoryStages(link, texts)
    controller = StoryController(requests, stages.verdicts, NUM_STAGES, **told)
    draft = SyntheticProposer(ACCURACY, list(texts.values()), VOCABULARY, 1)
    loop = HeadLoop(
        Scheduler(SchedulerConfig(policy, NUM_STAGES, rounds, chunk, 1000, at_once)),
        draft,
        link,
        controller,
        HeadSettings(
            NUM_STAGES,
            lambda request: lambda token: False,
            compile_grammar=compile_grammar,
            masks=PatientMasks(),
        ),
        Timeline(),
    )
    return loop, link, controller


def run(*story: object, **settings: object) -> tuple[list[Batch], StoryController]:
    """What a head has sent and logged when its story is over."""
    loop, link, controller = head(*story, **settings)
    loop.run_until_done()
    return link.sent, controller


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize(
    "policy",
    [Root(), Level(16, 4), BestFirst(16, 4, row_cost=0.0)],
    ids=lambda policy: type(policy).__name__,
)
def test_head_feeds_the_same_rows_as_the_simulation(policy: SpeculationPolicy, rounds: int):
    """One scheduler: with the same verdicts both choose the same rows; a head that waits for a
    verdict sends nothing meanwhile, where the simulation has a step without rows."""
    curve = TimeCurve(((1, 10.0),))
    simulated = SimulatedPipeline(policy, Machine((curve,) * NUM_STAGES), ACCURACY, rounds, 40, 1)
    (text,) = simulated.texts
    request = Request(0, tuple(text[:1]), max_new_tokens=len(text))
    loop, link, _ = head(policy, [request], {0: text}, rounds=rounds, most=40)
    with pytest.raises(StoryOver):
        loop.run_until_done()
    compared = 0
    for batch in link.sent:
        while not len(expected := simulated.step()):
            pass
        assert batch.rows.tolist() == expected.rows.tolist()
        compared += len(batch)
    assert compared >= 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "fastest", "most"),
    [
        (Root(), "", 1),
        (Level(8, 4), "", 7),  # as many as keep the pipeline busy
        (BestFirst(8, 4, row_cost=0.0), "", 7),
        (BestFirst(8, 4), ONE_TREE, 1),
        (BestFirst(8, 4), BESIDE, NUM_STAGES),
        (BestFirst(8, 4), deep(2 * NUM_STAGES), 2 * NUM_STAGES),
    ],
)
def test_head_decides_how_many_batches_are_in_flight(
    policy: SpeculationPolicy, fastest: str, most: int, monkeypatch: pytest.MonkeyPatch
):
    """Verdicts arrive as late as they can."""
    monkeypatch.setattr(InFlight, "depth", lambda *_: 7)
    request = Request(0, tuple(TEXT[:1]), max_new_tokens=len(TEXT) - 1)
    loop, link, controller = head(policy, [request], {0: TEXT}, most=400)
    if policy.refills:

        def choose(modes: Modes, *_: float | None) -> str:
            modes.mode = fastest
            return fastest

        monkeypatch.setattr(Modes, "next_mode", choose)
        learnt = LearntSteps(NUM_STAGES)
        learnt.deepen(2 * NUM_STAGES)
        learnt.modes.mode = fastest
        loop.scheduler.learn(learnt)
    wait, counts = controller.wait, []

    def late(task: Task, timeout: float | None = None, **_: bool) -> bytes | None:
        if timeout is not None:
            return None
        counts.append(len(link.sent) - task.step)
        return wait(task)

    controller.wait = late
    loop.run_until_done()
    assert controller.accepted == {0: TEXT[1:]}
    assert max(counts) == most
    assert any(batch.beside for batch in link.sent if len(batch)) == (most > 1)
    assert policy != Root() or len(link.sent) == len(TEXT) + 1, "no empty batch but the last"


def test_accepted_tokens_are_logged_before_the_request_finishes_with_its_report():
    request = Request(3, tuple(TEXT[:10]), max_new_tokens=20)
    sent, controller = run(BestFirst(16, 4), [request], {3: TEXT}, chunk=4)
    assert controller.accepted == {3: TEXT[10:30]}
    assert controller.finished == {3: "length"}
    report = controller.reports[3]
    assert len(report["token_ns"]) == 20 and report["counts"]["rounds"] > 0
    assert [opening.request for batch in sent for opening in batch.started] == [3]
    assert [batch.finished for batch in sent if batch.finished] == [(0,)]
    assert sent[-1].stop and not any(batch.stop for batch in sent[:-1])
    assert [batch.step for batch in sent] == list(range(len(sent)))
    assert controller.submitted == list(range(sent[-1].step + 1))
    kinds = {task.kind for task in controller.completed}
    assert kinds == {TaskKind.COMPUTE, TaskKind.PRUNE, TaskKind.TRANSFER}


def test_next_request_starts_in_the_step_after_the_last_one_ended():
    requests = [Request(i, tuple(TEXT[i : i + 3]), max_new_tokens=5) for i in (1, 2)]
    sent, controller = run(Level(8, 4), requests, {i: TEXT[i:] for i in (1, 2)}, chunk=8)
    assert controller.accepted == {i: TEXT[i + 3 : i + 8] for i in (1, 2)}
    released = next(batch.step for batch in sent if batch.finished == (0,))
    assert sent[released + 1].rows[:, KIND].tolist() == [1, 1, 2]


def test_verdicts_of_one_step_are_logged_in_one_call():
    requests = [Request(i, tuple(TEXT[i : i + 3]), max_new_tokens=5) for i in range(3)]
    texts = {i: TEXT[i:] for i in range(3)}
    _, controller = run(Root(), requests, texts, chunk=16, at_once=3)
    assert controller.accepted == {i: TEXT[i + 3 : i + 8] for i in range(3)}
    assert [0, 1, 2] in controller.logged
    assert all(controller.logged)


@pytest.mark.parametrize("cancelled", [False, True])
def test_draft_tokens_of_lossy_requests_are_sent_in_every_step_until_they_end(cancelled: bool):
    requests = [
        Request(i, tuple(TEXT[:9]), max_new_tokens=12, sampling=SamplingParams(acceptance=kind))
        for i, kind in enumerate((RELAXED, EXACT, STRICT))
    ]
    texts = dict.fromkeys(range(3), TEXT)
    cancels = [0] if cancelled else []
    sent, controller = run(Level(8, 4), requests, texts, chunk=4, cancels=cancels)
    # Sequences are numbered as they are opened; the first may be cancelled before.
    assert controller.draft_tokens.keys() == ({2} if cancelled else {0, 2})
    for number, told in controller.draft_tokens.items():
        steps = [guesses.step for guesses in told]
        assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else cancelled
        # What is told are the guesses of that step's batch, as they were sent.
        for guesses in told:
            rows = sent[guesses.step].rows
            mine = rows[(rows[:, SEQUENCE] == number) & (rows[:, KIND] == DRAFT)]
            assert guesses.parents.tolist() == mine[:, PARENT].tolist()
            assert guesses.tokens.tolist() == mine[:, TOKEN].tolist()
            assert (guesses.logps <= 0).all()
    told = controller.draft_tokens[2]
    assert sum(len(guesses.tokens) for guesses in told) > 20


EOS = 255
FORMED = [7, 8, 9, *range(40, 60), EOS]  # of a grammar that leaves one choice, the fourth token
FORM = [FORMED[3:-1], [200, *FORMED[4:-1]]]


def formed(number: int = 1) -> Request:
    return Request(number, (7, 8, 9), 50, eos=(EOS,), sampling=SamplingParams(grammar="form"))


@pytest.mark.parametrize("policy", [StaticTree([1, 2, 1]), Level(4, 2), BestFirst(4, 2)])
def test_grammar_saves_steps_and_keeps_draft_tokens_within_it(policy: SpeculationPolicy):
    steps = {}
    for grammar in ("", "form"):
        asked = replace(formed(), sampling=SamplingParams(grammar=grammar))
        sent, controller = run(
            policy,
            [asked],
            {1: FORMED},
            chunk=3,
            compile_grammar=lambda _: compiled(OneOf(FORM, EOS)),
        )
        assert controller.accepted == {1: FORMED[3:]} and controller.finished == {1: "stop"}
        steps[grammar] = len(sent)
        if grammar:
            guessed = np.concatenate([batch.rows[batch.rows[:, KIND] == DRAFT] for batch in sent])
            assert set(guessed[:, TOKEN].tolist()) <= {200, *FORMED}
    assert steps["form"] < steps[""]


def test_requests_do_not_wait_for_the_grammar_of_another():
    requests = [formed(1), Request(2, tuple(TEXT[:3]), max_new_tokens=5)]
    later: Future[Matcher] = Future()
    loop, _, controller = head(
        BestFirst(4, 2),
        requests,
        {1: FORMED, 2: TEXT},
        chunk=3,
        at_once=4,
        compile_grammar=lambda _: later,
    )
    finish, order = controller.finish, []

    def finished(request: int, *told: object) -> None:
        order.append(request)
        finish(request, *told)
        if request == 2:
            later.set_result(OneOf(FORM, EOS))

    controller.finish = finished
    loop.run_until_done()
    assert order == [2, 1]
    assert controller.accepted == {1: FORMED[3:], 2: TEXT[3:8]}


def test_grammar_that_cannot_be_compiled_ends_only_its_request():
    requests = [formed(1), Request(2, tuple(TEXT[:3]), max_new_tokens=5)]
    _, controller = run(
        BestFirst(4, 2),
        requests,
        {1: FORMED, 2: TEXT},
        at_once=4,
        compile_grammar=lambda _: compiled(GrammarFailed("no")),
    )
    assert controller.finished == {1: GRAMMAR, 2: "length"}
    assert controller.accepted == {2: TEXT[3:8]}
