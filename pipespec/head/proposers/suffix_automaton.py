"""A suffix automaton of growing texts: every run of tokens that occurs in them, with what followed
it (Blumer et al. 1985).

A *match* is a run that occurs in the texts, as a state and a length. There are at most two states
for each token, whatever the lengths of the runs. Transitions have counts as in prediction by
partial matching (Cleary and Teahan 1997): a token counts for the runs after which it is new, and
for the longest run after which it is not (update exclusion), so that a token is read in constant
time on average.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

# The state of a run, and the run's length.
Match = tuple[int, int]
NO_MATCH: Match = (0, 0)
NO_STATE = -1
# The low bits of a transition count how often its token followed.
COUNT_BITS = 20
MAX_COUNT = (1 << COUNT_BITS) - 1
# Followers that are listed per state, and states whose lists are cached.
MAX_LISTED = 32
MAX_CACHED = 4096


class FollowCounts(NamedTuple):
    """What followed a run: how many tokens, how many distinct ones, and the most frequent of these
    with their counts."""

    total: int
    distinct: int
    likeliest: list[tuple[int, int]]


class SuffixAutomaton:
    """What followed every run of tokens, and how often.

    Most states have one transition, which arrays hold; `_branches` holds all transitions of the
    other states. A transition is a state and a count in one number.
    """

    def __init__(self) -> None:
        self.length = 0  # tokens read
        self._last: Match = NO_MATCH  # the whole of the newest text
        self._link = array("i", [NO_STATE])
        self._longest = array("i", [0])
        self._token = array("i", [NO_STATE])
        self._next = array("q", [0])
        self._branches: dict[int, dict[int, int]] = {}
        self._counts_cache: dict[int, FollowCounts] = {}

    def __len__(self) -> int:
        return len(self._link)

    def start_text(self) -> None:
        """The tokens read next are of another text."""
        self._last = NO_MATCH

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._append(token)
        self.length += len(tokens)

    def _append(self, token: int) -> None:
        state, longest = self._last
        known = self._transition(state, token)
        if known:  # another text has continued so before
            self._count_token(state, token)
            self._last = (self._split(state, token, known >> COUNT_BITS), longest + 1)
            return
        new = self._new_state(longest + 1)
        self._last = (new, longest + 1)
        while state != NO_STATE and not (known := self._transition(state, token)):
            self._set_transition(state, token, new << COUNT_BITS | 1)
            state = self._link[state]
        if state == NO_STATE:
            self._link[new] = 0
        else:
            self._count_token(state, token)
            self._link[new] = self._split(state, token, known >> COUNT_BITS)

    def _split(self, state: int, token: int, after: int) -> int:
        """The state of the longest run of `state` with the token appended, to which `state` has a
        transition: `after`, or a copy of it for the shorter runs."""
        longest = self._longest[state] + 1
        if self._longest[after] == longest:
            return after
        copy = self._new_state(longest)
        self._token[copy], self._next[copy] = self._token[after], self._next[after]
        if after in self._branches:
            self._branches[copy] = dict(self._branches[after])
        self._link[copy], self._link[after] = self._link[after], copy
        while (
            state != NO_STATE and (found := self._transition(state, token)) >> COUNT_BITS == after
        ):
            self._set_transition(state, token, copy << COUNT_BITS | found & MAX_COUNT)
            state = self._link[state]
        return copy

    def _new_state(self, longest: int) -> int:
        self._link.append(NO_STATE)
        self._longest.append(longest)
        self._token.append(NO_STATE)
        self._next.append(0)
        return len(self._link) - 1

    def _transition(self, state: int, token: int) -> int:
        """The transition of a state, 0 if there is none."""
        if self._token[state] == token:
            return self._next[state]
        return self._branches[state].get(token, 0) if state in self._branches else 0

    def _set_transition(self, state: int, token: int, transition: int) -> None:
        self._counts_cache.pop(state, None)
        if state in self._branches:
            self._branches[state][token] = transition
        elif self._token[state] in (NO_STATE, token):
            self._token[state], self._next[state] = token, transition
        else:
            self._branches[state] = {self._token[state]: self._next[state], token: transition}
            self._token[state] = NO_STATE

    def _count_token(self, state: int, token: int) -> None:
        found = self._transition(state, token)
        if found & MAX_COUNT < MAX_COUNT:
            self._set_transition(state, token, found + 1)

    # --- looking up ---------------------------------------------------------------------------

    @property
    def longest_suffix(self) -> Match:
        """The longest suffix of the newest text that occurs elsewhere too."""
        state, _ = self._last
        if self._token[state] != NO_STATE or state in self._branches:
            return self._last
        shorter = max(self._link[state], 0)
        return shorter, self._longest[shorter]

    def advance(self, match: Match, token: int) -> Match:
        """The longest suffix that occurs of the run `match` with one more token."""
        state, length = match
        if self._token[state] == token:
            return self._next[state] >> COUNT_BITS, length + 1
        while not (found := self._transition(state, token)):
            state = self._link[state]
            if state == NO_STATE:
                return NO_MATCH
            length = self._longest[state]
        return found >> COUNT_BITS, length + 1

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest suffix of a text that occurs."""
        match = NO_MATCH
        for token in tokens:
            match = self.advance(match, token)
        return match

    def suffixes(self, match: Match, limit: int) -> list[Match]:
        """The run `match` and those of its suffixes that more tokens followed, the longest first;
        at most `limit`, and none that nothing followed."""
        state, length = match
        found: list[Match] = []
        while length > 0 and len(found) < limit:
            if self._token[state] != NO_STATE or state in self._branches:
                found.append((state, length))
            state = self._link[state]
            if state == NO_STATE:
                break
            length = self._longest[state]
        return found

    def has_followed(self, state: int, token: int) -> bool:
        return bool(self._transition(state, token))

    def follow_counts(self, state: int) -> FollowCounts:
        if (found := self._counts_cache.get(state)) is None:
            after = self._branches.get(state)
            if after is None:
                after = {self._token[state]: self._next[state]}
            counts = [(to & MAX_COUNT, token) for token, to in after.items()]
            total = sum([count for count, _ in counts])
            if len(counts) > 1:
                counts.sort(reverse=True)
            likeliest = [(token, count) for count, token in counts[:MAX_LISTED]]
            found = FollowCounts(total, len(counts), likeliest)
            if len(self._counts_cache) >= MAX_CACHED:
                self._counts_cache.clear()
            self._counts_cache[state] = found
        return found
