"""How the last stage knows what was guessed before the rows arrive: through the controller.

A lossy rule chooses among the children of the newest token, and these are still in the stages
before. The head tells of every step in which such a request is open, so the last stage has
them about as many steps ahead as there are stages.
"""

from __future__ import annotations

import numpy as np

from pipespec.core import Guesses

# Told when a request is over: the last stage may still have rows of it, and waits for no more.
NO_MORE = Guesses(2**62, *np.empty((3, 0), np.int64))


def pack(guesses: Guesses) -> bytes:
    """Little-endian int64: the step; then parents, tokens, and the bits of the log-probabilities,
    as many of each."""
    logps = guesses.logps.astype("<f8").view("<i8")
    columns = (guesses.parents, guesses.tokens, logps)
    return np.concatenate(([guesses.step], *columns)).astype("<i8").tobytes()


def unpack(payload: bytes) -> Guesses:
    """The inverse of `pack`."""
    numbers = np.frombuffer(payload, "<i8")
    parents, tokens, logps = numbers[1:].reshape(3, -1)
    return Guesses(int(numbers[0]), parents, tokens, logps.view("<f8"))
