"""Matchers whose grammar is a list of texts."""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from pipespec.sampling.grammar import BITS_PER_WORD, GrammarFailed, Matcher
from pipespec.system.fair_thread import FairThread


class OneOf:
    """Allows the texts of a list, each followed by `eos`; fails after `fails_after` tokens."""

    def __init__(self, texts: Sequence[Sequence[int]], eos: int, fails_after: int | None = None):
        self.texts = [(*text, eos) for text in texts]
        self.eos = eos
        self.fails_after = fails_after
        self.text: list[int] = []

    def next(self) -> set[int]:
        """The tokens that may follow."""
        length = len(self.text)
        begun = [text for text in self.texts if list(text[:length]) == self.text]
        return {text[length] for text in begun if len(text) > length}

    def allowed(self) -> np.ndarray:
        if self.fails_after is not None and len(self.text) >= self.fails_after:
            raise GrammarFailed("it was made to fail")
        bits = np.zeros(8, np.int32)
        for token in self.next():
            bits.view(np.uint32)[token // BITS_PER_WORD] |= np.uint32(1 << token % BITS_PER_WORD)
        return bits

    def consume(self, tokens: Sequence[int]) -> int:
        for taken, token in enumerate(tokens):
            if token not in self.next():
                return taken
            self.text.append(token)
        return len(tokens)

    def rollback(self, count: int) -> None:
        assert count <= len(self.text)
        del self.text[len(self.text) - count :]


class PatientMasks(FairThread):
    """Lets a loop wait for every mask, however long it takes."""

    def grant_share(self, usual_ms: float | None) -> None:
        pass


def compiled(matcher: Matcher | Exception) -> Future[Matcher]:
    """A finished compilation."""
    future: Future[Matcher] = Future()
    if isinstance(matcher, Exception):
        future.set_exception(matcher)
    else:
        future.set_result(matcher)
    return future
