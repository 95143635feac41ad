"""The message in which the head sends draft tokens of lossy requests to the last stage. A lossy
acceptance rule chooses among the children of the newest token, whose rows are still in earlier
stages. So the head publishes the draft tokens of every step of such a request through the
controller, and the last stage has them about as many steps ahead as there are stages."""

from __future__ import annotations

import numpy as np

from pipespec.core import DraftTokens

# Sent at the end of a request: the last stage, which may still have its rows, waits for no more.
END_OF_SEQUENCE = DraftTokens(2**62, *np.empty((3, 0), np.int64))


def pack_draft_tokens(draft: DraftTokens) -> bytes:
    """Little-endian int64: the step; then parents, tokens, and the bits of the log-probabilities,
    as many of each."""
    logps = draft.logps.astype("<f8").view("<i8")
    columns = (draft.parents, draft.tokens, logps)
    return np.concatenate(([draft.step], *columns)).astype("<i8").tobytes()


def unpack_draft_tokens(payload: bytes) -> DraftTokens:
    numbers = np.frombuffer(payload, "<i8")
    parents, tokens, logps = numbers[1:].reshape(3, -1)
    return DraftTokens(int(numbers[0]), parents, tokens, logps.view("<f8"))
