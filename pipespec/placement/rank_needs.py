"""How many KV slots a rank needs, and which of a model's layers are alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from pipespec.config.schema import Config
from pipespec.engine.inspection.inspection import CheckpointInfo

# Running states of a request: its own, and that which is kept of its prompt.
STATES = 2
# Layers whose weights differ by no more than this factor, one after another by size, are alike.
ALIKE = 1.5


def num_slots(config: Config, *, context: int, num_ranks: int, head: bool) -> int:
    """Token slots that the KV pool of a stage, or of the head's draft, has at least: one
    sequence's text, and draft tokens."""
    return sum(slots_by_setting(config, context=context, num_ranks=num_ranks, head=head).values())


def draft_slots(config: Config, *, num_ranks: int, head: bool) -> int:
    """Those of them that are not for text."""
    return num_slots(config, context=0, num_ranks=num_ranks, head=head)


def slots_by_setting(config: Config, *, context: int, num_ranks: int, head: bool) -> Counter[str]:
    """The slots of `num_slots`, by the setting that asks for them.

    Beside the text, a stage holds the nodes of the steps in flight; the draft whatever it has
    expanded: of many requests as much as of two, as they share its rounds. One batch more of each
    is on its way in before a verdict frees the last.
    """
    chunk = config.decode.prefill_chunk
    # Running free, every link can hold a batch, and so can every rank.
    in_flight = num_ranks + 1 if config.cluster.sync == "lockstep" else 2 * num_ranks
    found = Counter({"model.context": context})
    found["policy.width"] += max(config.max_rows - chunk, 0)
    found["decode.prefill_chunk"] += min(config.max_rows, chunk)
    if head:
        held = max(each.max_held(num_ranks) for each in config.policies)
        found["policy.capacity"] += min(config.scheduler.max_num_seqs, 2) * held
    else:
        found["policy.width"] += in_flight * config.fed_rows
    return found


def layer_kinds(info: CheckpointInfo, layer_bytes: Sequence[int]) -> tuple[int, ...]:
    """Which layers take as long as each other, by numbers from 0 on: those that keep K and V or a
    running state alike, and whose weights are about as large; an MLP is unlike its experts."""
    layers = [range(number, number + 1) for number in range(info.num_layers)]
    kept = [(info.kv_layers(each), info.recurrent_bytes(each, "float32", 1, 0)) for each in layers]
    sizes: dict[tuple[tuple[int, int], int], int] = {}
    for alike in set(kept):
        ordered = sorted(
            {size for own, size in zip(kept, layer_bytes, strict=True) if own == alike}
        )
        sizes[alike, ordered[0]] = number = 0
        for smaller, larger in pairwise(ordered):
            number += larger > ALIKE * smaller
            sizes[alike, larger] = number
    kinds: dict[tuple[tuple[int, int], int], int] = {}
    return tuple(
        kinds.setdefault((own, sizes[own, size]), len(kinds))
        for own, size in zip(kept, layer_bytes, strict=True)
    )
