"""How many draft rounds fit into a pipeline step.

A round is free as long as it ends before the step's verdict arrives. SwiftSpec 3.1 fixes d
rounds per verification from times measured beforehand; `auto` measures while it decodes.
"""

from __future__ import annotations

from pipespec.head.policies.policy import PipelineState
from pipespec.limits import check_whole

AUTO = "auto"
MAX_ROUNDS = 1000


def check_rounds(rounds: int | str) -> None:
    """Raise ConfigError unless `rounds` is "auto" or a whole number within its limits."""
    if rounds != AUTO:
        check_whole("proposer.rounds", rounds, 1, MAX_ROUNDS, f", or {AUTO}")


def may_delay_batch(rounds: int | str, state: PipelineState) -> bool:
    """Whether a round that delays the next batch is allowed: a number of rounds counts it too."""
    return rounds == AUTO or state.rounds < int(rounds)


def has_time_for_round(rounds: int | str, state: PipelineState) -> bool:
    """Whether this step has time for another draft round.

    A number allows so many. `auto` allows one round, and more as long as the next one is expected
    to end before the verdict arrives; until both times are measured it allows one.
    """
    if rounds != AUTO:
        return state.rounds < int(rounds)
    if not state.rounds:
        return True
    if state.draft_ms is None or state.verdict_ms is None:
        return False
    return state.elapsed_ms + state.draft_ms <= state.verdict_ms
