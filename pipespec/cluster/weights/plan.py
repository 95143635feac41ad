"""Decides which weights each host needs, and from where it gets them. Pure.

Weights move in rounds. In each, a block (`parts_file`) is sent to as many hosts as have it now, and
to the others in the next rounds, when more have it. So one host does not send the same bytes to
several if others can. What no host has, the hub sends once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from itertools import groupby

from pipespec.cluster.deployment.deployment import Deployment
from pipespec.config.hosts import Host
from pipespec.engine.formats.slice_tensors import parts_of
from pipespec.engine.inspection.inspection import CheckpointInfo
from pipespec.errors import ModelError

# Model, file and number of a block.
Block = tuple[str, str, int]
# Among the names of sources, of which hosts' have no blanks.
HUB = "the hub"
# Of neighbours that the same hosts lack and have, which one source sends.
RUN_BLOCKS = 16


def parts_needed(deployment: Deployment, host: Host) -> Mapping[str, set[str]]:
    """The parts (`slice_tensors`) of each model, by its name in `model.`, that the ranks of a host
    compute in the first epoch."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for rank, worker in enumerate(deployment.workers):
        if worker in host.workers:
            for kind, parts in parts_of_rank(deployment, rank).items():
                found[kind] |= parts
    return found


def parts_of_rank(deployment: Deployment, rank: int) -> Mapping[str, set[str]]:
    """The same for a rank, in the epoch whose layers the deployment has."""
    if rank:
        return {"target": _parts(deployment.target, deployment.layers[rank - 1])}
    return {kind: _parts(info, range(info.num_layers)) for kind, info in deployment.models[1:]}


def _parts(info: CheckpointInfo, layers: range) -> set[str]:
    return parts_of(layers, info.num_layers, tied=info.tied)


def plan_round(
    lacks: Mapping[str, Collection[Block]],
    holders: Mapping[str, Collection[Block]],
    on_hub: Collection[str],
) -> dict[tuple[str, str, str], list[Block]]:
    """The blocks that each host gets from each source in the next round: `[host, source, model]`.

    Args:
        lacks, holders: the blocks that hosts lack, and have.
        on_hub: the models of which the hub has every block.

    Raises ModelError if no host has a block, and the hub cannot be asked for it.
    """
    having, needing = _by_block(holders), _by_block(lacks)
    sent, got = Counter[str](), Counter[str]()
    found: defaultdict[tuple[str, str, str], list[Block]] = defaultdict(list)

    def alike(block: Block) -> tuple[int, list[str], list[str], str, str, int]:
        kind, file, number = block
        has = having.get(block, [])
        # What can be sent by one host alone comes first; the others' work is divided accordingly.
        return len(has), has, needing[block], kind, file, number // RUN_BLOCKS

    for (_, has, needs, kind, file, _), blocks in groupby(sorted(needing, key=alike), alike):
        run = list(blocks)
        sources = has or [HUB]
        if not has and kind not in on_hub:
            raise ModelError(
                f"{needs[0]} needs bytes of {file} of the {kind} that no host has; copy {file} to "
                "one of them"
            )
        for to in sorted(needs, key=got.__getitem__)[: len(sources)]:
            source = min(sources, key=sent.__getitem__)
            found[to, source, kind] += run
            sent[source] += len(run)
            got[to] += len(run)
    return found


def _by_block(blocks: Mapping[str, Collection[Block]]) -> dict[Block, list[str]]:
    """The hosts of each block."""
    found: defaultdict[Block, list[str]] = defaultdict(list)
    for host, each in blocks.items():
        for block in each:
            found[block].append(host)
    return dict(found)
