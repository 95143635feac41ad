"""A suffix automaton of texts that grow: every run of tokens that stood in them, with what
followed it (Blumer et al. 1985).

A *place* in it is the longest ending of some text that stood before: a state and a length. Longer
texts have few: at most two states for each token, whatever the lengths of the runs. Beside the
transitions stand counts as prediction by partial matching keeps them (Cleary and Teahan 1997):
a token counts for the runs after which it is new, and for the longest one after which it is not
(update exclusion), so that a token is read in constant time on average.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

# A run and its length.
Place = tuple[int, int]
NOWHERE: Place = (0, 0)
NOBODY = -1
# Times that a token followed are held in the low bits of a transition.
COUNT_BITS = 20
MOST = (1 << COUNT_BITS) - 1
# Of what came after a state so many are listed, for so many states at a time.
LISTED = 32
LISTS = 4096


class Seen(NamedTuple):
    """What came after a run: how often anything did, how many different tokens, and the likeliest
    of them with how often each did."""

    total: int
    distinct: int
    likeliest: list[tuple[int, int]]


class SuffixAutomaton:
    """What followed every run of tokens, and how often.

    Most states lead on to one token alone, so that one stands in arrays; `_more` holds all
    transitions of the others, state and count in one number.
    """

    def __init__(self) -> None:
        self.length = 0  # tokens that were read
        self._last: Place = NOWHERE  # all of the newest text
        self._link = array("i", [NOBODY])
        self._longest = array("i", [0])
        self._token = array("i", [NOBODY])
        self._next = array("q", [0])
        self._more: dict[int, dict[int, int]] = {}
        self._seen: dict[int, Seen] = {}

    def __len__(self) -> int:
        """How many states there are."""
        return len(self._link)

    def begin(self) -> None:
        """What is read next is another text."""
        self._last = NOWHERE

    def read(self, tokens: Sequence[int]) -> None:
        """The newest text goes on with these tokens."""
        for token in tokens:
            self._append(token)
        self.length += len(tokens)

    def _append(self, token: int) -> None:
        state, longest = self._last
        known = self._to(state, token)
        if known:  # another text has gone on so before
            self._count(state, token)
            self._last = (self._split(state, token, known >> COUNT_BITS), longest + 1)
            return
        new = self._new(longest + 1)
        self._last = (new, longest + 1)
        while state != NOBODY and not (known := self._to(state, token)):
            self._set(state, token, new << COUNT_BITS | 1)
            state = self._link[state]
        if state == NOBODY:
            self._link[new] = 0
        else:
            self._count(state, token)
            self._link[new] = self._split(state, token, known >> COUNT_BITS)

    def _split(self, state: int, token: int, after: int) -> int:
        """The state whose longest run is that of `state` and the token, where `after` comes next:
        that one, or a copy of it for the shorter runs."""
        longest = self._longest[state] + 1
        if self._longest[after] == longest:
            return after
        copy = self._new(longest)
        self._token[copy], self._next[copy] = self._token[after], self._next[after]
        if after in self._more:
            self._more[copy] = dict(self._more[after])
        self._link[copy], self._link[after] = self._link[after], copy
        while state != NOBODY and (found := self._to(state, token)) >> COUNT_BITS == after:
            self._set(state, token, copy << COUNT_BITS | found & MOST)
            state = self._link[state]
        return copy

    def _new(self, longest: int) -> int:
        self._link.append(NOBODY)
        self._longest.append(longest)
        self._token.append(NOBODY)
        self._next.append(0)
        return len(self._link) - 1

    def _to(self, state: int, token: int) -> int:
        """The transition of a state, 0 if there is none."""
        if self._token[state] == token:
            return self._next[state]
        return self._more[state].get(token, 0) if state in self._more else 0

    def _set(self, state: int, token: int, transition: int) -> None:
        self._seen.pop(state, None)
        if state in self._more:
            self._more[state][token] = transition
        elif self._token[state] in (NOBODY, token):
            self._token[state], self._next[state] = token, transition
        else:
            self._more[state] = {self._token[state]: self._next[state], token: transition}
            self._token[state] = NOBODY

    def _count(self, state: int, token: int) -> None:
        found = self._to(state, token)
        if found & MOST < MOST:
            self._set(state, token, found + 1)

    # --- looking up ---------------------------------------------------------------------------

    @property
    def end(self) -> Place:
        """The longest ending of the newest text that stood somewhere before, itself left out."""
        state, _ = self._last
        if self._token[state] != NOBODY or state in self._more:
            return self._last
        shorter = max(self._link[state], 0)
        return shorter, self._longest[shorter]

    def step(self, place: Place, token: int) -> Place:
        """The longest ending that stood before of the run at `place` with one more token."""
        state, length = place
        if self._token[state] == token:
            return self._next[state] >> COUNT_BITS, length + 1
        while not (found := self._to(state, token)):
            state = self._link[state]
            if state == NOBODY:
                return NOWHERE
            length = self._longest[state]
        return found >> COUNT_BITS, length + 1

    def follow(self, tokens: Sequence[int]) -> Place:
        """The longest ending of a text that stood before."""
        place = NOWHERE
        for token in tokens:
            place = self.step(place, token)
        return place

    def runs(self, place: Place, most: int) -> list[Place]:
        """The run at `place` and its endings after which something else was seen too, the longest
        first, `most` of them."""
        state, length = place
        found: list[Place] = []
        while length > 0 and len(found) < most:
            if self._token[state] != NOBODY or state in self._more:
                found.append((state, length))
            state = self._link[state]
            if state == NOBODY:
                break
            length = self._longest[state]
        return found

    def followed(self, state: int, token: int) -> bool:
        """Whether a token has come after a state."""
        return bool(self._to(state, token))

    def seen(self, state: int) -> Seen:
        """What came after a state."""
        if (found := self._seen.get(state)) is None:
            after = self._more.get(state)
            if after is None:
                after = {self._token[state]: self._next[state]}
            counts = [(to & MOST, token) for token, to in after.items()]
            total = sum([count for count, _ in counts])
            if len(counts) > 1:
                counts.sort(reverse=True)
            likeliest = [(token, count) for count, token in counts[:LISTED]]
            found = Seen(total, len(counts), likeliest)
            if len(self._seen) >= LISTS:
                self._seen.clear()
            self._seen[state] = found
        return found
