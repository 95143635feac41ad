"""What a layout of the pipeline costs: time and memory of every rank, from measured figures.

Everything here is arithmetic; milliseconds and bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from operator import add, mul

# Six integers of 8 bytes describe a row (`pipespec.transport.wire`).
ROW_HEADER_BYTES = 48
BITS_PER_GBIT_MS = 1_000_000  # what a Gbit/s moves in a millisecond


@dataclass(frozen=True)
class Worker:
    """A process that can hold a rank, and what was measured of it at the width to be used.

    `layer_ms` is one layer, the mean of all, and `kind_ms` one of each kind (`Needs.kinds`), unless
    all are alike; `head_ms` the final norm and the LM head, `embedding_ms` the embedding,
    `draft_round_ms` one expansion by the draft. `memory_bytes` is what it may hold.
    """

    name: str
    layer_ms: float = 1.0
    head_ms: float = 0.0
    embedding_ms: float = 0.0
    draft_round_ms: float = 0.0
    memory_bytes: float = inf
    kind_ms: tuple[float, ...] = ()

    @property
    def host(self) -> str:
        return self.name.rpartition("/")[0]


@dataclass(frozen=True)
class Route:
    """The network from one host to another."""

    rtt_ms: float = 0.0
    gbit_s: float = inf

    def ms(self, num_bytes: int) -> float:
        """From the first byte sent to the last one received."""
        return self.rtt_ms / 2 + num_bytes * 8 / (self.gbit_s * BITS_PER_GBIT_MS)


NEAR = Route()


@dataclass(frozen=True)
class Needs:
    """What the models need. A batch has `rows` rows of `row_bytes` bytes.

    Attributes:
        layer_bytes, kv_layer_bytes: weights, and KV pool with running states, of each layer.
        head_bytes: the final norm and the LM head; if `tied` the last stage has the embedding too.
        runtime_bytes: what any rank takes beyond weights and KV.
        draft_bytes: weights and KV of the draft.
        rounds: how often the draft expands the tree in a step.
        kinds: which layers take as long as each other; nothing: all do.
    """

    layer_bytes: tuple[int, ...]
    embedding_bytes: int = 0
    head_bytes: int = 0
    tied: bool = False
    kv_layer_bytes: tuple[int, ...] = ()
    runtime_bytes: int = 0
    draft_bytes: int = 0
    rows: int = 1
    row_bytes: int = 0
    rounds: int = 1
    kinds: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layer_bytes)

    @cached_property
    def before(self) -> tuple[int, ...]:
        """Bytes of weights and KV of the first i layers, for i from 0 to all."""
        kept = self.kv_layer_bytes or (0,) * len(self.layer_bytes)
        return tuple(accumulate(map(add, self.layer_bytes, kept), initial=0))

    @cached_property
    def kinds_before(self) -> tuple[tuple[int, ...], ...]:
        """How many layers of each kind are among the first i, for i from 0 to all."""
        counts = [0] * (max(self.kinds, default=-1) + 1)
        found = [tuple(counts)]
        for kind in self.kinds:
            counts[kind] += 1
            found.append(tuple(counts))
        return tuple(found)

    def fixed_bytes(self, *, first: bool, last: bool) -> int:
        """What a stage holds whatever its layers are."""
        embedding = self.embedding_bytes if first or (last and self.tied) else 0
        return self.runtime_bytes + embedding + (self.head_bytes if last else 0)

    def stage_bytes(self, layers: range) -> int:
        """What the stage with these layers holds."""
        fixed = self.fixed_bytes(first=layers.start == 0, last=layers.stop == self.num_layers)
        return fixed + self.before[layers.stop] - self.before[layers.start]

    @property
    def head_rank_bytes(self) -> int:
        return self.runtime_bytes + self.draft_bytes


@dataclass(frozen=True)
class Problem:
    """What is to be laid out.

    `workers` in the order of the hosts file; those of a host follow one another, and keep their
    order. `routes` holds the link of each pair of hosts once or in both directions; one that is
    not there costs nothing. `draft`, `order` (of hosts) and `split` (layers per stage) are the
    user's wishes. The workers in `spares` hold nothing until one is needed; a host with stages and
    spares comes last, because a hosts file counts the last workers as spares.
    """

    workers: tuple[Worker, ...]
    needs: Needs
    routes: Mapping[tuple[str, str], Route] = field(default_factory=dict)
    draft: str | None = None
    order: tuple[str, ...] | None = None
    split: tuple[int, ...] | None = None
    spares: tuple[str, ...] = ()

    @property
    def last_host(self) -> str | None:
        """The host that must come last, if one must."""
        spare = {worker.host for worker in self.workers if worker.name in self.spares}
        busy = {worker.host for worker in self.workers if worker.name not in self.spares}
        return next(iter(spare & busy), None)

    def worker(self, name: str) -> Worker:
        return next(worker for worker in self.workers if worker.name == name)

    def route(self, sender: str, receiver: str) -> Route:
        """Between two hosts, or within one."""
        there = self.routes.get((sender, receiver))
        return there or self.routes.get((receiver, sender), NEAR)

    def draft_ms(self, head: Worker) -> float:
        return self.needs.rounds * head.draft_round_ms

    def link_ms(self, head: Worker, stages: Sequence[Worker]) -> list[float]:
        """The message of every rank: the head's full batch, without hidden states yet, those of the
        stages, and the last one's verdict."""
        rows, hosts = self.needs.rows, [stage.host for stage in stages]
        return [
            self.route(head.host, hosts[0]).ms(rows * ROW_HEADER_BYTES),
            *(self.route(*pair).ms(rows * self.needs.row_bytes) for pair in pairwise(hosts)),
            self.route(hosts[-1], head.host).ms(0),
        ]


def ends_ms(worker: Worker, *, first: bool, last: bool) -> float:
    return (worker.embedding_ms if first else 0.0) + (worker.head_ms if last else 0.0)


def compute_ms(worker: Worker, needs: Needs, layers: range) -> float:
    times = len(layers) * worker.layer_ms
    if worker.kind_ms:
        before, after = needs.kinds_before[layers.start], needs.kinds_before[layers.stop]
        counts = [stop - start for start, stop in zip(before, after, strict=True)]
        times = sum(map(mul, counts, worker.kind_ms))
    first, last = layers.start == 0, layers.stop == needs.num_layers
    return times + ends_ms(worker, first=first, last=last)
