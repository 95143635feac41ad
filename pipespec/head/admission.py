"""Which requests are in the pipeline, and the KV slots that they hold.

Requests wait until there are slots for their text. Slots are counted here as the stages will hold
them (`Sequence.held`), so nobody is asked. What only texts hold that were retained
(`pipespec.head.prefix_cache`) can be had: it is freed in the batch that needs it. When a root has
no slot, the last request is put back: it leaves the pipeline, is opened again later and reads what
it had said. That is recovery, of one request. (Guesses are not fed before it comes to that:
`pipespec.head.scheduler`.)

A request shares the text that it begins with and that is in KV. While one that runs is reading
more of the same, it waits for that: so many with one long prompt read it once.

Who is opened first and put back last has the least priority, and of equal ones came first
(`Request.place`). Nobody is put back because somebody of less priority waits.

All that are open name the same policy (`Request.feed`): who names another waits until nobody is.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import takewhile

from pipespec.core import MAX_OPENED_BYTES, NOBODY, Batch, Request
from pipespec.head.guide import Guide
from pipespec.head.prefix_cache import WORTH, PrefixCache, as_key, first_tokens, num_tokens
from pipespec.head.sequence import Sequence, StopCheck
from pipespec.head.tree import ROOT


class Admission:
    """The requests of a scheduler.

    Args:
        max_num_seqs: requests that are open or wait here at most.
        num_slots: tokens and guesses of all requests that every stage can hold.
        context_limit: tokens of the longest sequence.
        batch_rows: slots that are left free when a request is opened beside others, so that it
            is not put back at once.
        root_rows: slots that a root needs.
        max_retained: requests that have left whose text may stay in KV; 0: nothing is shared.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        num_slots: int,
        context_limit: int,
        batch_rows: int,
        root_rows: int,
        max_retained: int = 0,
    ):
        self.sequences: dict[int, Sequence] = {}  # that are open, by number, in their order
        self.waiting: list[Sequence] = []  # to be opened, by their places
        self.preemptions = 0
        self.cache = PrefixCache(max_retained)
        self.feed = ""  # what those that are open name, or those before them
        self.num_slots = num_slots
        self._max_num_seqs = max_num_seqs
        self._context_limit = context_limit
        self._batch_rows = batch_rows
        self._root_rows = root_rows
        self._next_number = 0
        self._opened: list[Sequence] = []  # that the stages have not been told of
        self._released: list[int] = []  # sequences that the stages have not been told to free
        self._preempted: list[int] = []  # the same of those that were put back

    @property
    def idle(self) -> bool:
        """Whether there is no request."""
        return not self.sequences and not self.waiting

    @property
    def room(self) -> int:
        """How many more requests can be added."""
        return self._max_num_seqs - len(self.sequences) - len(self.waiting)

    @property
    def requests(self) -> list[Sequence]:
        """Of every request that is open or waits."""
        return [*self.sequences.values(), *self.waiting]

    @property
    def free_slots(self) -> int:
        """KV slots that every stage can have when the next batch comes there: nobody who is open
        holds them."""
        return self.num_slots - self.cache.pinned - self._filled

    @property
    def _filled(self) -> int:
        """Slots that open sequences have filled themselves: the others they share."""
        return sum([each.held - each.opening.shared for each in self.sequences.values()])

    @property
    def promised_slots(self) -> int:
        """Slots that open sequences need for the text that they have not read, and for a root."""
        return sum(each.prompt_left + 1 for each in self.sequences.values())

    def add(
        self,
        request: Request,
        stops: StopCheck,
        now: int,
        answer: tuple[int, ...] = (),
        guide: Guide | None = None,
    ) -> Sequence:
        """Take in a request, of which `answer` was decided before, at a moment of the caller's
        clock. It waits until it is opened. `guide` stands at the end of that answer.

        If that answer is the whole of it (`Sequence.ended`), it is over.
        """
        assert self.room > 0, "more requests than were asked for"
        sequence = Sequence.open(request, stops, self._context_limit, now, answer, guide)
        if not sequence.ended:
            self._wait(sequence)
        return sequence

    def admit(self) -> Iterator[Sequence]:
        """Open those that wait, by their places, as long as there are slots for their text, and
        room in a batch for what the stages must know of them.

        Who waits for a text that another is reading does not hold up those behind. The source is
        to be told of each before the next draft round.
        """
        openings = MAX_OPENED_BYTES - sum(each.opening.num_bytes for each in self._opened)
        for sequence in self.waiting.copy():
            if self._awaits(sequence):
                continue
            parent, shared, awaited = self._shareable(sequence)
            if awaited:
                sequence.awaits = awaited
                continue
            openings -= sequence.opening.num_bytes
            if openings < 0 or not self._fits(sequence, parent, shared):
                break
            self.waiting.remove(sequence)
            self._open(sequence, parent, shared)
            yield sequence

    def _open(self, sequence: Sequence, parent: int, shared: int) -> None:
        if sequence.cached is None and sequence.reads_cache and self.cache.most:
            self.cache.queries += len(sequence.context.tokens)
            self.cache.hits += shared
        if sequence.request.feed != self.feed:
            self.turn_to(sequence.request.feed)
        number = self._next_number
        self._next_number += 1
        self.cache.open(number, sequence.key, parent, shared)
        sequence.begin(number, parent, shared)
        self.sequences[number] = sequence
        self._opened.append(sequence)

    def turn_to(self, feed: str) -> None:
        """Nobody is open, and who comes next is decoded by the policy of this name."""
        self.feed = feed

    def _wait(self, sequence: Sequence) -> None:
        if self.cache.most:
            sequence.key = self._key(sequence, len(sequence.context.tokens))
        insort(self.waiting, sequence, key=lambda each: each.request.place)

    def _key(self, sequence: Sequence, tokens: int) -> bytes:
        """Of its first tokens; what is known of them is not made anew."""
        known = first_tokens(sequence.key, tokens)
        return known + as_key(sequence.context.tokens[num_tokens(known) : tokens])

    def _awaits(self, sequence: Sequence) -> bool:
        """Whether another is still reading the text that this one waits for."""
        reader = self.sequences.get(sequence.awaits[0])
        return reader is not None and reader.prefilled < sequence.awaits[1]

    def _shareable(self, sequence: Sequence) -> tuple[int, int, tuple[int, int] | None]:
        """Whose text it can begin with, and how many tokens of it: at most all but its last token,
        whose logits are needed. And who is reading so much more of the same, up to where, that it
        should wait for that."""
        parent, shared = NOBODY, 0
        if not self.cache.most or not sequence.reads_cache:
            return parent, shared, None
        most = len(sequence.context.tokens) - 1
        for number, common, _ in self.cache.texts.alike(sequence.key):
            parent, shared = number, min(common, most)
            break
        awaited = None
        for number, common, text in self.cache.open_texts.alike(sequence.key):
            other = self.sequences[number]
            if common == num_tokens(text):
                common += _common(sequence.context.tokens[common:], other.context.tokens[common:])
            common = min(common, most)
            if common <= shared:
                break
            ready = min(common, other.fed_text) if other.told else 0
            if ready > shared:
                parent, shared = number, ready
            if other.prompt_left and awaited is None:
                awaited = number, common - WORTH + 1  # for less it does not wait
        if awaited is not None and awaited[1] <= shared:
            awaited = None
        return (parent, shared, awaited) if shared >= WORTH else (NOBODY, 0, awaited)

    def _fits(self, sequence: Sequence, parent: int, shared: int) -> bool:
        """Whether there are slots for its text, and its policy is that of the others. The only one
        always fits."""
        if not self.sequences:
            return True
        if sequence.request.feed != self.feed:
            return False
        read = len(sequence.context.tokens) - shared
        wanted = self.cache.newly_pinned(parent, shared) + read + self._batch_rows
        return wanted <= self.free_slots - self.promised_slots

    def cancel(self, request: int) -> Sequence | None:
        """Drop a request for which nobody waits any more; None: there is none of that number."""
        for sequence in self.requests:
            if sequence.request.id == request:
                if sequence in self.waiting:
                    self.waiting.remove(sequence)
                else:
                    self.close(sequence)
                return sequence
        return None

    def make_room(self) -> list[Sequence]:
        """Put the last back, by their places, until the root that has waited longest has slots.

        The source is to be told of who is put back.
        """
        put_back = []
        while len(self.sequences) > 1 and self._root_waits and self.free_slots < self._root_rows:
            last = max(self.sequences.values(), key=lambda each: each.request.place)
            put_back.append(last)
            self._remove(last, self._preempted)
            self._wait(last)
            self.preemptions += 1
        return put_back

    @property
    def _root_waits(self) -> bool:
        return any(
            not each.prompt_left and not each.tree.fed[ROOT] for each in self.sequences.values()
        )

    def close(self, sequence: Sequence) -> None:
        """A request is over."""
        self._remove(sequence, self._released)

    def _remove(self, sequence: Sequence, told: list[int]) -> None:
        """The next batch tells the stages what stays of the sequence, if they know it."""
        text = b""
        if sequence.told:
            told.append(sequence.number)
            text = self._key(sequence, sequence.fed_text) if self.cache.most else text
        else:
            self._opened.remove(sequence)
        self.cache.leave(sequence.number, sequence.key, text)
        del self.sequences[sequence.number]

    @property
    def untold(self) -> bool:
        """Whether the stages are to be told that somebody has left."""
        return bool(self._released or self._preempted)

    def tell(self, batch: Batch) -> None:
        """Say in a batch what the stages are to know and to free with it; they are told.

        Retained text goes where its slots are needed, those of the batch's own rows among them.
        """
        self.cache.free(self._filled + self.cache.held - self.num_slots)
        batch.opened = tuple(each.opening for each in self._opened)
        batch.released, batch.preempted = tuple(self._released), tuple(self._preempted)
        batch.kept = self.cache.tell()
        for sequence in self._opened:
            sequence.told = True
        for told in (self._opened, self._released, self._preempted):
            told.clear()


def _common(some: list[int], others: list[int]) -> int:
    """How many tokens two lists begin with alike."""
    pairs = zip(some, others, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
