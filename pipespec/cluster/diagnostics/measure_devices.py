"""Measures how fast the devices of this host compute a model, and their memory, for a `probe`.
Times are kept in `~/.cache/pipespec/measured`; free memory is read each time."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from pipespec.cluster.deployment.memory import free_bytes
from pipespec.cluster.diagnostics.measure_hosts import MeasureRequest
from pipespec.engine.attention.attention_plan import AttentionPlan
from pipespec.engine.checkpoint.fingerprint import fingerprint
from pipespec.engine.checkpoint.partial_checkpoint import missing, own_path
from pipespec.engine.checkpoint.parts.folder import Repository
from pipespec.engine.formats.slice_tensors import parts_of
from pipespec.engine.inspection.inspection import CheckpointInfo, inspect
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.speedups import median_ms
from pipespec.engine.tensor_parallel.tensor_parallel import sum_parts
from pipespec.errors import HostFailed, ModelError
from pipespec.placement.host_figures import ModelSizes
from pipespec.placement.measurements import model_sizes
from pipespec.system import heap
from pipespec.system.device_copy import make_current
from pipespec.system.result_cache import load_cached, store_cached
from pipespec.system.validation import Unreadable, from_fields, typed
from pipespec.system.versions import package_version
from pipespec.timing.clock import monotonic_ns
from pipespec.transport.tp_group import TPProcessGroup, can_use_nccl

MAX_LAYERS = 4  # so many are timed together, where the memory allows
MEMORY_SHARE = 0.8  # of what is free may be used to measure
# Packages that decide how fast a model is.
VERSIONS = ("pipespec", "torch", "transformers", "torchao", "bitsandbytes")
WARM_UPS, SUMS = 2, 50  # of an all-reduce
# What `stage` and `draft` give.
_Times = Mapping[str, float | Sequence[float]]


def measure(request: MeasureRequest) -> dict[str, Any]:
    """`target` and `draft` (bytes in memory) and `devices`, times in milliseconds for each. Raises
    PipespecError."""
    own = None
    if request.shared is not None:
        shared = from_fields(Repository, request.shared)
        own = own_path(Path(request.target), shared, request.parts)
    for folder in (own or request.target, request.draft):
        if folder is not None and os.path.isabs(folder) and not os.path.lexists(folder):
            raise ModelError(
                f"there is no model folder {folder} to measure with: copy it there, or start "
                "without measuring, by `pipespec up HOSTS.yaml`, which sends the host its layers"
            )
    target = inspect(own or request.target)
    draft = None if request.draft is None else inspect(request.draft)
    settings = ("model.quantization", "model.draft_quantization")
    for name, info, how in zip(settings, (target, draft), request.quantization, strict=True):
        if info is not None:
            info.check_quantization(name, how)
            info.require_quantizer(name, how)
    num_cpu = sum(device == "cpu" for device in request.devices)
    threads = request.num_threads()
    measured: dict[str, _Times | None] = {}
    found = []
    for device, roles in zip(request.devices, request.roles, strict=True):
        # Workers on the CPU share the main memory.
        memory = heap.free_bytes() // num_cpu if device == "cpu" else free_bytes(device)
        bench = _DeviceBenchmark(request, torch.device(device), threads, memory)
        figures: dict[str, Any] = {"model": bench.device_name, "memory_bytes": memory}
        for role, info in (("stage", target), ("draft", draft)):
            if role in roles and info is not None:
                # Equal devices of one host would only be measured alike.
                key = f"{role} {bench.device_name}"
                if key not in measured:
                    measured[key] = bench.cached(role, info)
                figures[role] = measured[key]
        found.append(figures)
    first = 0
    for size in request.groups:
        if size > 1:
            members = request.devices[first : first + size]
            dtype = getattr(torch, request.dtype_of(target))
            found[first]["sum_ms"] = all_reduce_ms(members, request.rows, target.hidden_size, dtype)
        first += size
    return {
        "target": _sizes(request, target, "stage"),
        "draft": None if draft is None else _sizes(request, draft, "draft"),
        "devices": found,
    }


def _sizes(request: MeasureRequest, info: CheckpointInfo, role: str) -> ModelSizes:
    sizes = model_sizes(info, request.dtype_of(info), request.weight_format(info, role))
    return sizes | {"divisible": _divisible(info, request.quantization[role == "draft"])}


def _divisible(info: CheckpointInfo, quantization: str | None) -> bool:
    try:
        info.check_tensor_parallel(2, quantization)
    except ModelError:
        return False
    return True


class _DeviceBenchmark:
    def __init__(self, request: MeasureRequest, device: torch.device, threads: int, memory: int):
        self.request = request
        make_current(device)
        self.device = device
        self.threads = threads
        self.memory = memory
        self.device_name = (
            torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else f"{_processor()}, {threads} threads"
        )

    def cached(self, role: str, info: CheckpointInfo) -> _Times | None:
        """What `stage` or `draft` gives, kept from an earlier time if it is there. None: there is
        no room for the draft."""
        request, files = self.request, fingerprint(str(info.path))
        kinds = request.kinds(info) if role == "stage" else ()
        key = {
            "role": role,
            "files": [files.config, files.index, files.shards],
            "device": self.device_name,
            "rows": request.rows,
            "length": request.length,
            "children": request.children if role == "draft" else None,
            "dtype": request.dtype_of(info),
            "quantization": request.weight_format(info, role),
            "kv_dtype": request.kv_dtype,
            "versions": [package_version(name) for name in VERSIONS],
        }
        if any(kinds):
            key["kinds"] = list(kinds)
        kept = load_cached("measured", key)
        with suppress(Unreadable):
            figures: _Times = typed("it", kept, Mapping[str, int | float | Sequence[float]])
            return figures
        torch.set_num_threads(self.threads)
        try:
            found = self.stage(info) if role == "stage" else self.draft(info)
        except torch.OutOfMemoryError as error:
            if role == "draft":
                return None
            raise HostFailed(
                f"{self.device} has too little memory to measure {info.path}; end what uses it, "
                "or leave the device out of the hosts file."
            ) from error
        if found is not None:
            store_cached("measured", key, found)
        return found

    def stage(self, info: CheckpointInfo) -> _Times:
        """One layer, of each kind if there are several; the embedding, the LM head; KV bytes of a
        slot in a layer that holds K and V. A kind without its files here takes as long as the mean
        of the others, the head's numbers are random without them, and the embedding takes no
        time."""
        count, of_target = info.num_layers, self.request.weight_format(info, "stage")
        kinds, kind_ms, slot_bytes = self.request.kinds(info), {}, 0.0
        for kind in range(max(kinds) + 1):
            layers = self.layers_of_kind(info, kinds, kind)
            if not layers:
                continue
            part = self.load(info, layers, of_target)
            kind_ms[kind] = self.forward_ms(part) / len(layers)
            if holding := info.kv_layers(layers):
                slot_bytes = part.num_kv_bytes / holding / part.num_slots
            del part
        mean = statistics.mean(kind_ms[kind] for kind in kinds if kind in kind_ms)
        times = [kind_ms.get(kind, mean) for kind in range(max(kinds) + 1)]
        embedding_ms = 0.0
        if self.holds(info, range(1)):
            first = self.load(info, range(1), of_target)
            embedding_ms = max(0.0, self.forward_ms(first) - times[kinds[0]])
            del first
        if self.holds(info, range(count - 1, count)):
            last = self.load(info, range(count - 1, count), of_target)
            head_ms = median_ms(self.device, last.logits, self.hidden(last.hidden_size, last.dtype))
        else:
            head_ms = self.random_head_ms(info)
        found: _Times = {
            "layer_ms": mean,
            "embedding_ms": embedding_ms,
            "head_ms": head_ms,
            "kv_slot_bytes": slot_bytes,
        }
        return {**found, "kind_ms": tuple(times)} if len(times) > 1 else found

    def layers_of_kind(self, info: CheckpointInfo, kinds: Sequence[int], kind: int) -> range:
        """Layers of a kind whose files are here: the middle of the longest run, as many as are
        timed together."""
        layer_bytes = max(self.request.sizes(info, "stage").layers)
        best = run = range(0)
        here = [each for each in range(info.num_layers) if not missing(info.path, {str(each)})]
        if not here:
            raise ModelError(f"{info.path} holds no whole layer; copy its files there")
        for layer in (each for each in here if kinds[each] == kind):
            run = range(run.start if run.stop == layer else layer, layer + 1)
            best = max(best, run, key=len)
        timed = max(1, min(MAX_LAYERS, int(self.memory * MEMORY_SHARE) // layer_bytes))
        start = best.start + max(0, len(best) - timed) // 2
        return range(start, min(start + timed, best.stop))

    def holds(self, info: CheckpointInfo, layers: range) -> bool:
        return not missing(info.path, parts_of(layers, info.num_layers, tied=info.tied))

    @torch.inference_mode()
    def random_head_ms(self, info: CheckpointInfo) -> float:
        dtype = getattr(torch, self.request.dtype_of(info))
        head = torch.nn.Linear(info.hidden_size, info.vocab_size, False, self.device, dtype)
        return median_ms(self.device, head, self.hidden(info.hidden_size, dtype))

    def draft(self, info: CheckpointInfo) -> _Times | None:
        """One round: `rows` nodes expanded. None if there is no room for the draft."""
        if self.request.sizes(info, "draft").total > self.memory:
            return None
        model = self.load(info, range(info.num_layers), self.request.weight_format(info, "draft"))
        rows, children = self.request.rows, min(self.request.children, model.vocab_size)
        return {
            "round_ms": round_ms(model, rows, model.num_slots - rows, children),
            "weight_bytes": model.num_weight_bytes,
            "kv_slot_bytes": model.num_kv_bytes / model.num_slots,
        }

    def load(self, info: CheckpointInfo, layers: range, quantization: str | None) -> ModelSlice:
        """A slice with room for the text and one batch."""
        rows = self.request.rows
        return ModelSlice.load(
            info.path,
            layers,
            dtype=getattr(torch, self.request.dtype_of(info)),
            quantization=quantization,
            device=self.device,
            num_slots=max(rows, min(self.request.length + rows, info.context)),
            kv_dtype=self.request.kv_dtype,
        )

    def hidden(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(self.request.rows, size, device=self.device).to(dtype)

    def forward_ms(self, model: ModelSlice) -> float:
        rows = self.request.rows
        batch = model.example_batch(rows, model.num_slots - rows)
        return median_ms(self.device, model.forward, *batch)


def round_ms(model: ModelSlice, rows: int, context: int, children: int) -> float:

    def expand(inputs: Tensor, positions: Tensor, plan: AttentionPlan) -> None:
        logits = model.logits(model.forward(inputs, positions, plan)).float()
        logits.log_softmax(-1).topk(children).indices.cpu()

    return median_ms(model.device, expand, *model.example_batch(rows, context))


def all_reduce_ms(devices: Sequence[str], rows: int, hidden: int, dtype: torch.dtype) -> float:
    """How long devices take to add up what each has computed of a batch of so many rows. The
    members are threads here, which takes no less."""
    store, size, nccl = HashStore(), len(devices), can_use_nccl(devices)

    def member(rank: int) -> list[float]:
        group = TPProcessGroup(store, rank, size, devices[rank] if nccl else None)
        part = torch.ones(rows, hidden, dtype=dtype, device=devices[rank])
        times = []
        for _ in range(WARM_UPS + SUMS):
            start = monotonic_ns()
            sum_parts(group.gather(part)).cpu()
            times.append((monotonic_ns() - start) / 1e6)
        return times[WARM_UPS:]

    with ThreadPoolExecutor(size) as pool:
        times, *_ = pool.map(member, range(size))
    return statistics.median(times)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
