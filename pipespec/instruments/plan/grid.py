"""All decoding methods of a grid, predicted: coarsely first, then the best again with more tokens.

The simulations are independent of each other, so they run on all processors.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from typing import Any

from pipespec.instruments.emulation.synthetic_proposer import Accuracy
from pipespec.instruments.plan.advice import DecodingMethod, Prediction, predict
from pipespec.instruments.plan.pipeline_times import Machine
from pipespec.instruments.plan.recorded_draft import DraftRecord
from pipespec.instruments.plan.simulation import MAX_TOKENS
from pipespec.limits import check_whole
from pipespec.system.process_identity import die_with_parent

# The first look at a method takes this share of the tokens, but not fewer than LEAST.
COARSE = 0.2
LEAST = 100
# So many methods are looked at again.
REFINED = 4
# Fewer simulated tokens than these in all are not worth another process.
WORTH_A_PROCESS = 500


def predictions(
    methods: Sequence[DecodingMethod],
    machine: Machine,
    accuracy: Accuracy | DraftRecord,
    *,
    num_tokens: int,
    seed: int = 0,
    mid: Accuracy | None = None,
    on_done: Callable[[int, int], None] = lambda done, of: None,
) -> list[Prediction]:
    """What each of the methods will do on a machine with a draft of that accuracy; see `predict`.

    The fastest are predicted from `num_tokens` simulated tokens, the others from a fifth of
    them. `on_done` is called with how many simulations have ended, and of how many.
    """
    check_whole("tokens", num_tokens, 1, MAX_TOKENS)
    coarse = min(num_tokens, max(int(num_tokens * COARSE), LEAST))
    again = 0 if coarse == num_tokens else min(REFINED, len(methods))
    simulate = partial(predict, machine=machine, accuracy=accuracy, seed=seed, mid=mid)
    found: dict[int, Prediction] = {}
    done = 0
    with _executor(len(methods) * coarse) as pool:

        def run(places: Iterable[int], tokens: int) -> None:
            nonlocal done
            # The long ones first. Ctrl-C must not meet a process before it knows what to do.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                jobs = {
                    pool.submit(simulate, methods[place], num_tokens=tokens): place
                    for place in sorted(places, key=lambda place: -_work(methods[place]))
                }
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for job in as_completed(jobs):
                found[jobs[job]] = job.result()
                done += 1
                on_done(done, max(len(methods) + again, done))

        run(range(len(methods)), coarse)
        # What looked fastest may not be: whatever is, in the end, has been looked at closely.
        closely: set[int] = set()
        while again and (left := [p for p in _by_time(found)[:again] if p not in closely]):
            run(left, num_tokens)
            closely.update(left)
    return [found[place] for place in range(len(methods))]


def _by_time(found: Mapping[int, Prediction]) -> list[int]:
    """Places of predictions, the fastest first."""
    return sorted(sorted(found), key=lambda place: found[place].tbt_ms)


@contextmanager
def _executor(num_tokens: int) -> Iterator[Executor]:
    """Processes for the simulation of so many tokens, or this one where they are few."""
    processors = len(os.sched_getaffinity(0))
    if num_tokens < WORTH_A_PROCESS or processors == 1:
        yield _Here()
        return
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(
        processors,
        # A fork would take over the threads of a progress bar.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(os.getpid(),),
    )
    try:
        yield pool
    except BaseException:
        # What is under way is of no use any more, and may take seconds.
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Here(Executor):
    """Does at once, in this process, what it is given."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _begin(parent: int) -> None:
    """A process of the pool: Ctrl-C is for the one that asked, whose end is ours too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    die_with_parent(parent)()


def _work(method: DecodingMethod) -> int:
    """About how long a simulation takes, beside others."""
    return method.policy.max_rows * (method.rounds if isinstance(method.rounds, int) else 2)
