"""Which requests are in the pipeline, and the KV slots that they hold.

Requests wait until there are slots for their text. Slots are counted here as the stages will hold
them (`Sequence.held`), so nobody is asked. When a root has none, the last request is put back: the
stages forget it, and it is opened again later and reads what it had said. That is recovery, of one
request. (Guesses are not fed before it comes to that: `pipespec.head.scheduler`.)

Who is opened first and put back last has the least priority, and of equal ones came first
(`Request.place`). Nobody is put back because somebody of less priority waits.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from pipespec.core import Request
from pipespec.head.guide import Guide
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
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        num_slots: int,
        context_limit: int,
        batch_rows: int,
        root_rows: int,
    ):
        self.sequences: dict[int, Sequence] = {}  # that are open, by number, in their order
        self.waiting: list[Sequence] = []  # to be opened, by their places
        self.preemptions = 0
        self.num_slots = num_slots
        self._max_num_seqs = max_num_seqs
        self._context_limit = context_limit
        self._batch_rows = batch_rows
        self._root_rows = root_rows
        self._next_number = 0
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
        """KV slots that every stage will have when the next batch comes there."""
        return self.num_slots - sum(each.held for each in self.sequences.values())

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
        """Open those that wait, by their places, as long as there are slots for their text.

        The source is to be told of each before the next draft round.
        """
        while self.waiting and self._fits(self.waiting[0]):
            sequence = self.waiting.pop(0)
            sequence.begin(self._next_number)
            self.sequences[self._next_number] = sequence
            self._next_number += 1
            yield sequence

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda each: each.request.place)

    def _fits(self, sequence: Sequence) -> bool:
        """Whether there are slots for its text. The only one always fits."""
        if not self.sequences:
            return True
        wanted = len(sequence.context.tokens) + self._batch_rows
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
        """The next batch tells the stages to free what the sequence holds, if they know it."""
        if sequence.prefilled:
            told.append(sequence.number)
        del self.sequences[sequence.number]

    @property
    def untold(self) -> bool:
        """Whether the stages are to be told to free something."""
        return bool(self._released or self._preempted)

    def tell(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the stages are to free, which have ended and which were put back; they are told."""
        told = tuple(self._released), tuple(self._preempted)
        self._released.clear()
        self._preempted.clear()
        return told
