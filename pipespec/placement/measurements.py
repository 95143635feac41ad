"""What ranks need; from measured figures, or from none, the problem that `plan_slices` solves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Any

from pipespec.config.hosts import HostsFile
from pipespec.config.schema import Config
from pipespec.engine.inspection.inspection import CheckpointInfo
from pipespec.engine.precision import ITEM_BYTES, automatic
from pipespec.placement.costs import ROW_HEADER_BYTES, Needs, Problem, Route, Worker
from pipespec.placement.host_figures import DeviceFigures, Figures, ModelSizes, Number
from pipespec.placement.slices import GIB

# What a process takes beyond weights and KV (docs/benchmarks.md), and room for activations.
RUNTIME_BYTES = 512 * 2**20
# Running states of a request: its own, and that which is kept of its prompt.
STATES = 2
# Layers whose weights differ by no more than this factor, one after another by size, are alike.
ALIKE = 1.5


def choose_dtype(hosts_file: HostsFile, config: Config) -> str:
    """The type of plain weights: bfloat16 if no stage can be on a CPU, unless another is set."""
    if config.model.dtype != "auto":
        return config.model.dtype
    return automatic(_stage_devices(hosts_file))


def dtype_of(info: CheckpointInfo, hosts_file: HostsFile, config: Config) -> str:
    """The type in which a model computes."""
    return info.chosen_dtype(config.model.dtype, _stage_devices(hosts_file))


def _stage_devices(hosts_file: HostsFile) -> list[str]:
    stages = set(hosts_file.workers) - {hosts_file.draft, *hosts_file.spare_workers}
    return [hosts_file.device_of(worker) for worker in stages]


def problem(hosts_file: HostsFile, figures: Figures, config: Config) -> Problem:
    """What the planner is to lay out."""
    return _Measured(hosts_file, figures, config).problem()


def unmeasured(
    hosts_file: HostsFile,
    config: Config,
    target: CheckpointInfo,
    draft: CheckpointInfo | None,
) -> Problem:
    """The same without figures: equal devices, with the memory that the hosts file grants them.

    The head is the file's, or its first worker; the hosts stand as in the file.
    """
    order = hosts_file.order or tuple(host.name for host in hosts_file.hosts)
    hosts_file = replace(hosts_file, draft=hosts_file.draft or hosts_file.heads[0], order=order)
    dtype, model = dtype_of(target, hosts_file, config), config.model
    held = target.weight_format(model.quantization, model.keep_quantized, dtype)
    device: DeviceFigures = {
        "model": "",
        "memory_bytes": inf,
        "stage": {
            "layer_ms": 1.0,
            "head_ms": 0.0,
            "embedding_ms": 0.0,
            "kv_slot_bytes": target.kv_bytes(dtype, model.kv_dtype),
        },
        "sum_ms": 0.0,
    }
    figures = Figures(
        rows=config.policy.max_rows,
        dtype=dtype,
        target=model_sizes(target, dtype, held),
        draft=None,
        members={worker: device for host in hosts_file.hosts for worker in host.workers},
        links=(),
    )
    found = _Measured(hosts_file, figures, config, draft).problem()
    equal = tuple(replace(worker, draft_round_ms=0.0) for worker in found.workers)
    return replace(found, workers=equal)


@dataclass(frozen=True)
class _Measured:
    """What was measured, or stands for it; `draft`: the draft model, if it was not."""

    hosts_file: HostsFile
    figures: Figures
    config: Config
    draft: CheckpointInfo | None = None

    def problem(self) -> Problem:
        hosts_file, links = self.hosts_file, self.figures.links
        return Problem(
            workers=tuple(self.worker(name) for host in hosts_file.hosts for name in host.members),
            needs=self.needs(),
            routes={(k["source"], k["to"]): Route(k["rtt_ms"], k["gbit_s"]) for k in links},
            draft=hosts_file.draft,
            order=hosts_file.order,
            split=hosts_file.split,
            spares=hosts_file.spare_workers,
        )

    def worker(self, name: str) -> Worker:
        hosts_file, figures = self.hosts_file, self.figures
        found = figures.members[name]
        members = hosts_file.members_of(name)
        of_members = [figures.members[each] for each in members]
        size = len(members)

        def together(times: Iterable[Number], layers: int = 1) -> Number:
            """Members add up what each has computed behind the attention and behind the MLP."""
            sums_ms = 2 * layers * found["sum_ms"] if size > 1 else 0.0
            return max(times) / size + sums_ms

        stage: dict[str, Any] = dict(found.get("stage") or {})
        if stages := [times for each in of_members if (times := each.get("stage"))]:
            by_kind = zip(*(times.get("kind_ms", ()) for times in stages), strict=False)
            stage |= {
                "layer_ms": together(times["layer_ms"] for times in stages),
                "kind_ms": tuple(map(together, by_kind)),
            }
        stage.pop("kv_slot_bytes", None)
        draft_round_ms: Number = 0.0
        drafts = [each["draft"] for each in of_members if "draft" in each]
        if None in drafts or (size > 1 and name != hosts_file.draft):
            draft_round_ms = inf  # no room; the head is a worker by itself unless the file says so
        elif drafts and figures.draft is not None:
            # Sums as in the target, which is no narrower.
            rounds = (each["round_ms"] for each in drafts if each)
            draft_round_ms = together(rounds, len(figures.draft["layer_bytes"]))
        memory = min(each["memory_bytes"] for each in of_members)
        limit = hosts_file.host_of(name).memory_gib
        granted = memory if limit is None else min(memory, int(limit * GIB))
        return Worker(name, **stage, draft_round_ms=draft_round_ms, memory_bytes=granted * size)

    def needs(self) -> Needs:
        hosts_file, figures, config = self.hosts_file, self.figures, self.config
        target, draft = figures.target, figures.draft
        workers = figures.members.values()
        stages = [times for found in workers if (times := found.get("stage"))]
        drafts = [draw for found in workers if (draw := found.get("draft"))]
        context = min(config.model.context or target["context"], target["context"])
        slots, pool = (
            num_slots(config, context=context, num_ranks=hosts_file.num_stages + 1, head=head)
            for head in (False, True)
        )
        draft_bytes = 0
        if draft is not None and drafts:
            draft_bytes = int(max(d["weight_bytes"] + pool * d["kv_slot_bytes"] for d in drafts))
            draft_bytes += sum(_kept(draft, pool, context, slot_bytes=0))  # running states
        elif draft is not None:
            draft_bytes = sum(draft["layer_bytes"]) + draft["embedding_bytes"] + draft["head_bytes"]
        if (info := self.draft) is not None:
            dtype, model = dtype_of(info, hosts_file, config), config.model
            held = info.weight_format(model.draft_quantization, model.keep_quantized, dtype)
            slot_bytes = info.kv_bytes(info.compute_dtype(dtype), model.kv_dtype)
            kept = _kept(model_sizes(info, dtype, held), pool, context, slot_bytes)
            draft_bytes = info.loaded(dtype, held).total + sum(kept)
        rounds = config.proposer.rounds
        return Needs(
            layer_bytes=tuple(target["layer_bytes"]),
            embedding_bytes=target["embedding_bytes"],
            head_bytes=target["head_bytes"],
            tied=target["tied"],
            kv_layer_bytes=_kept(
                target, slots, context, max((times["kv_slot_bytes"] for times in stages), default=0)
            ),
            runtime_bytes=RUNTIME_BYTES,
            draft_bytes=draft_bytes,
            rows=figures.rows,
            row_bytes=target["hidden_size"] * ITEM_BYTES[target["dtype"]] + ROW_HEADER_BYTES,
            rounds=rounds if isinstance(rounds, int) else 1,
            kinds=tuple(target["kinds"]),
        )


def model_sizes(info: CheckpointInfo, dtype: str, held: str | None) -> ModelSizes:
    """Of a model whose plain weights are loaded as `dtype`, and others held as `held`."""
    sizes, own = info.loaded(dtype, held), info.compute_dtype(dtype)
    layers = [range(number, number + 1) for number in range(info.num_layers)]
    return {
        "dtype": own,
        "layer_bytes": list(sizes.layers),
        "embedding_bytes": sizes.embedding,
        "head_bytes": sizes.head,
        "tied": info.tied,
        "hidden_size": info.hidden_size,
        "context": info.context,
        "has_kv": [info.kv_layers(layer) > 0 for layer in layers],
        "state_bytes": [info.recurrent_bytes(layer, own, 1, 0) for layer in layers],
        "node_bytes": [info.recurrent_bytes(layer, own, 0, 1) for layer in layers],
        "kinds": list(layer_kinds(info, sizes.layers)),
        "divisible": True,
    }


def _kept(model: ModelSizes, slots: int, context: int, slot_bytes: float) -> tuple[int, ...]:
    """Bytes of K and V in so many slots, of which `context` are for text, and of the running states
    of one request, in each layer; a slot takes `slot_bytes` in a layer with K and V."""
    of_layers = zip(model["has_kv"], model["state_bytes"], model["node_bytes"], strict=True)
    return tuple(
        int(slots * slot_bytes * kv + STATES * state + (slots - context) * node)
        for kv, state, node in of_layers
    )


# --- what a rank needs, measured or not --------------------------------------------------------


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
    # Links hold batches too: as many of full width as ranks, or more smaller ones.
    in_flight = 2 * num_ranks
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
