"""Which requests are in the pipeline, and the KV slots that they hold.

A request waits until there are slots for its text. The slots are counted here as the stages will
hold them (`Sequence.num_slots_held`), without a message to them. Slots of retained prefixes
(`pipespec.head.prefix_cache`) count as free: the batch that needs them frees them. When a root has
no slot, the last request is preempted: it leaves the pipeline, is started again later, and reads
its prompt and its answer so far. (The scheduler feeds fewer draft tokens before that:
`pipespec.head.row_plan`.)

A request shares the beginning of its text with one whose text is in the KV cache. While a running
request reads more of the same text, it waits for that: many requests with one long prompt read it
once.

Tenants share the places in the pipeline: the next request to start is of the tenant that has the
fewest running, of equal ones of the one that was served least, as virtual token counters say
(Sheng et al. 2024, Algorithm 2); and of that tenant, by `Request.queue_key`. In that order's end
requests are preempted, for roots, and for a request that waits: if its tenant has fewer running
ones, or if it is more urgent than one of its own tenant; and where tenants are more than places,
they take turns. All running requests name the same policy. Above 350 lines, as who runs and who
waits is one decision.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import takewhile

from pipespec.core import MAX_STARTED_BYTES, NO_PARENT_SEQUENCE, Batch, Request
from pipespec.head.prefix_cache import (
    MIN_SHARED_TOKENS,
    NO_TEXT,
    PrefixCache,
    TextKey,
    first_tokens,
    num_tokens,
    text_key,
)
from pipespec.head.scheduler_types import SchedulerConfig
from pipespec.head.sequence import Sequence, StopCheck
from pipespec.head.structured_output import GrammarGuide
from pipespec.head.tree import ROOT

# What a token of an answer counts beside one of a prompt, as in Sheng et al.
ANSWER_COST = 2


class Admission:
    """The running and the waiting requests."""

    def __init__(self, config: SchedulerConfig):
        self.sequences: dict[int, Sequence] = {}  # that are running, by number, oldest first
        self.waiting: list[Sequence] = []  # by `Request.queue_key`
        self.preemptions = 0
        self.cache = PrefixCache(config.max_retained, config.make_states())
        self.policy_name = ""  # of the running requests, or of the last ones
        self.served: Counter[str] = Counter()  # tokens of each tenant, as they count
        self._places: Counter[str] = Counter()  # running requests of each tenant
        self._refused: Sequence | None = None  # the next to start, for which there is no place
        self._config = config
        # KV slots that a root needs.
        self._root_rows = max(each.max_rows if each.whole else 1 for each in config.policies)
        self._next_number = 0
        # Changes that the next batch carries to the stages; sequences by number.
        self._unsent_started: list[Sequence] = []
        self._unsent_finished: list[int] = []
        self._unsent_preempted: list[int] = []
        self._put_back: list[Sequence] = []  # since `preempt` was called

    @property
    def idle(self) -> bool:
        return not self.sequences and not self.waiting

    @property
    def room(self) -> int:
        """How many more requests can run; below 0: more wait than can."""
        return self._config.max_num_seqs - len(self.sequences) - len(self.waiting)

    def last_waiting(self, beside: Iterable[Request] = ()) -> dict[str, tuple[int, int]]:
        """Of each tenant with waiting requests, those `beside` included, the key of the last."""
        last: dict[str, tuple[int, int]] = {}
        for request in (*beside, *(each.request for each in self.waiting)):
            key = request.queue_key
            last[request.tenant] = max(key, last.get(request.tenant, key))
        return last

    @property
    def requests(self) -> list[Sequence]:
        """Those of the running requests, then those of the waiting ones."""
        return [*self.sequences.values(), *self.waiting]

    @property
    def free_slots(self) -> int:
        """KV slots of every stage that no running sequence holds when the next batch arrives."""
        return self._config.num_slots - self.cache.pinned - self._filled

    @property
    def _filled(self) -> int:
        """Slots that running sequences hold beside those that they share."""
        return sum(
            [each.num_slots_held - each.start.shared_len for each in self.sequences.values()]
        )

    @property
    def slots_needed(self) -> int:
        """Slots that started sequences and retained prefixes fill together."""
        return self._filled + self.cache.held

    @property
    def reserved_slots(self) -> int:
        """Slots that running sequences need for the text that is left to read, and for a root."""
        return sum(each.prompt_left + 1 for each in self.sequences.values())

    def add(
        self,
        request: Request,
        stops: StopCheck,
        now: int,
        answer: tuple[int, ...] = (),
        guide: GrammarGuide | None = None,
    ) -> Sequence:
        """Add a request to the waiting ones, at the moment `now` of the caller's clock.

        `answer` holds the tokens that an earlier epoch decided; if it is complete
        (`Sequence.ended`), the request does not wait. `guide` is at the end of that answer.
        """
        sequence = Sequence.create(request, stops, self._config.context_limit, now, answer, guide)
        if not sequence.ended:
            self._lift(request.tenant)
            self._enqueue(sequence)
        return sequence

    def _lift(self, tenant: str) -> None:
        """A tenant that had no request has saved nothing up: it counts as served as the others."""
        active = {each.request.tenant for each in self.requests}
        if not active:
            self.served.clear()
            self._places.clear()
        elif tenant not in active:
            least = min(self.served[each] for each in active)
            self.served[tenant] = max(self.served[tenant], least)

    def _turn(self, sequence: Sequence) -> tuple[int, int, int, int]:
        """The least one starts next, and the greatest is preempted first."""
        tenant = sequence.request.tenant
        return self._places[tenant], self.served[tenant], *sequence.request.queue_key

    def admit(self) -> Iterator[Sequence]:
        """Start waiting requests in their order, as long as there are slots for their text, and
        room in a batch for their starts; those that wait for a prefix block no other."""
        bytes_left = MAX_STARTED_BYTES - sum(each.start.num_bytes for each in self._unsent_started)
        waiting, self._refused = sorted(self.waiting, key=self._turn), None
        while waiting:
            sequence = waiting.pop(0)
            if self._waits_for_prefix(sequence):
                continue
            parent, shared, awaited = self._find_prefix(sequence)
            if awaited:
                sequence.awaited_prefix = awaited
                continue
            bytes_left -= sequence.start.num_bytes
            if bytes_left < 0:
                break
            if not self._fits(sequence, parent, shared):
                self._refused = sequence
                break
            self.waiting.remove(sequence)
            self._start(sequence, parent, shared)
            waiting.sort(key=self._turn)  # its tenant has a place more
            yield sequence

    def _start(self, sequence: Sequence, parent: int, shared: int) -> None:
        if sequence.cached is None:
            self.served[sequence.request.tenant] += len(sequence.context.tokens) - shared
            if sequence.reads_cache and self.cache.max_retained:
                self.cache.queries += len(sequence.context.tokens)
                self.cache.hits += shared
        self.policy_name = sequence.request.policy
        number = self._next_number
        self._next_number += 1
        self.cache.start(number, sequence.key, parent, shared)
        sequence.enter_pipeline(number, parent, shared)
        self.sequences[number] = sequence
        self._places[sequence.request.tenant] += 1
        self._unsent_started.append(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        if self.cache.max_retained:
            sequence.key = self._key(sequence, len(sequence.context.tokens))
        insort(self.waiting, sequence, key=lambda each: each.request.queue_key)

    def _key(self, sequence: Sequence, tokens: int) -> TextKey:
        """The key of its first `tokens` tokens; extends the one that is known."""
        known = first_tokens(sequence.key, tokens)
        further = sequence.context.tokens[num_tokens(known) : tokens]
        return TextKey(sequence.request.cache_salt, known.tokens + text_key(further).tokens)

    def _waits_for_prefix(self, sequence: Sequence) -> bool:
        """Whether another sequence is still reading the prefix that this one waits for."""
        reader = self.sequences.get(sequence.awaited_prefix[0])
        return reader is not None and reader.prefilled < sequence.awaited_prefix[1]

    def _find_prefix(self, sequence: Sequence) -> tuple[int, int, tuple[int, int] | None]:
        """The prefix to share: parent sequence, number of tokens, and the prefix to wait for.

        At most all tokens but the last are shared, as the logits of that one are needed. The
        prefix to wait for, if it is worth that, is a running sequence and how many of its tokens
        must have been read.
        """
        parent, shared = NO_PARENT_SEQUENCE, 0
        if not self.cache.max_retained or not sequence.reads_cache:
            return parent, shared, None
        most = len(sequence.context.tokens) - 1
        for number, common, text in self.cache.retained_texts.match_prefix(sequence.key):
            common = min(common, most)
            if common <= shared:
                break
            if (ready := self.cache.shareable(number, common, num_tokens(text))) > shared:
                parent, shared = number, ready
        awaited = None
        for number, common, text in self.cache.running_texts.match_prefix(sequence.key):
            other = self.sequences[number]
            if common == num_tokens(text):
                common += _common_len(
                    sequence.context.tokens[common:], other.context.tokens[common:]
                )
            common = min(common, most)
            if common <= shared:
                break
            read = other.fed_text if other.start_sent else 0
            if (ready := self.cache.shareable(number, common, read)) > shared:
                parent, shared = number, ready
            if other.prompt_left and awaited is None:
                wanted = self.cache.wanted(number, common, other.prefilled)
                awaited = (number, wanted) if wanted > 0 else None
        if awaited is not None and awaited[1] <= shared:
            awaited = None
        if shared < MIN_SHARED_TOKENS:
            parent, shared = NO_PARENT_SEQUENCE, 0
        return parent, shared, awaited

    def _fits(self, sequence: Sequence, parent: int, shared: int) -> bool:
        """Whether there are a place and slots for its text, and the others name the same policy.
        Where no other is running, it fits."""
        if not self.sequences:
            return True
        full = len(self.sequences) >= self._config.max_num_seqs
        if full or sequence.request.policy != self.policy_name:
            return False
        read = len(sequence.context.tokens) - shared
        # So many slots stay free that it is not preempted at once.
        wanted = self.cache.newly_pinned(parent, shared) + read + self._config.rows
        return wanted <= self.free_slots - self.reserved_slots

    def cancel(self, request: int) -> Sequence | None:
        """Remove the request with this id; returns its sequence, None if there is none."""
        for sequence in self.requests:
            if sequence.request.id == request:
                if sequence in self.waiting:
                    self.waiting.remove(sequence)
                else:
                    self.finish(sequence)
                return sequence
        return None

    def preempt(self) -> list[Sequence]:
        """Preempt the last requests until the root that has waited longest has slots, and those
        that yield to the next to start until it fits; returns their sequences, which wait again,
        and those that `drop_text` has restarted."""
        while yielding := self._yielding():
            self._preempt(max(yielding, key=self._turn))
            self.preemptions += 1
        preempted, self._put_back = self._put_back, []
        return preempted

    def _yielding(self) -> list[Sequence]:
        """The running requests of which one must leave the pipeline now."""
        running = [*self.sequences.values()]
        if len(running) > 1 and self._root_waits and self.free_slots < self._root_rows:
            return running
        first = self._refused
        if first is None or first not in self.waiting:
            return []
        tenant, priority = first.request.tenant, first.request.priority
        places, served = self._places, self.served
        full = len(running) >= self._config.max_num_seqs
        yielding = []
        for each in running:
            other = each.request.tenant
            if other == tenant:
                yields = priority < each.request.priority
            elif places[tenant] + 1 < places[other]:  # for slots, only if it has nothing
                yields = full or not places[tenant]
            else:
                less = not places[tenant] and served[tenant] < served[other]
                yields = less and each.can_yield_to(first)
            if yields:
                yielding.append(each)
        if yielding and self._fits(first, *self._find_prefix(first)[:2]):
            return []
        return yielding

    @property
    def _root_waits(self) -> bool:
        return any(
            not each.prompt_left and not each.tree.fed[ROOT] for each in self.sequences.values()
        )

    def drop_text(self, number: int) -> None:
        """Retain nothing of a sequence whose rows a stage could not compute, and restart the
        requests that share them."""
        for each in self.cache.drop(number):
            if each != number:
                self._preempt(self.sequences[each], retain=False)

    def _preempt(self, sequence: Sequence, *, retain: bool = True) -> None:
        self._leave(sequence, self._unsent_preempted, retain=retain)
        self._enqueue(sequence)
        self._put_back.append(sequence)

    def finish(self, sequence: Sequence, *, retain: bool = True) -> None:
        self._leave(sequence, self._unsent_finished, retain=retain)

    def _leave(self, sequence: Sequence, unsent: list[int], *, retain: bool) -> None:
        """Remove a running sequence; if the stages know it, its number goes to `unsent`, and its
        text may be retained."""
        text = NO_TEXT
        if sequence.start_sent:
            unsent.append(sequence.number)
            if retain and self.cache.max_retained:
                text = self._key(sequence, sequence.fed_text)
        else:
            self._unsent_started.remove(sequence)
        self.cache.finish(sequence.number, sequence.key, text)
        del self.sequences[sequence.number]
        self._places[sequence.request.tenant] -= 1

    @property
    def has_unsent_departures(self) -> bool:
        """Whether the next batch carries sequences that have left the pipeline."""
        return bool(self._unsent_finished or self._unsent_preempted)

    def attach_changes(self, batch: Batch) -> None:
        """Put the sequences that have started and left since the last batch into this one.

        Retained prefixes are freed as far as slots are needed, also by the rows of this batch.
        """
        self.cache.free(self.slots_needed - self._config.num_slots)
        batch.started = tuple(each.start for each in self._unsent_started)
        batch.finished = tuple(self._unsent_finished)
        batch.preempted = tuple(self._unsent_preempted)
        batch.retained_prefixes = self.cache.take_changes()
        if self.cache.states is not None:
            batch.kept_states = self.cache.states.take_unsent()
        for sequence in self._unsent_started:
            sequence.start_sent = True
        for unsent in (self._unsent_started, self._unsent_finished, self._unsent_preempted):
            unsent.clear()


def _common_len(some: list[int], others: list[int]) -> int:
    pairs = zip(some, others, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
