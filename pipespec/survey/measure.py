"""How fast the devices of this host compute a model, and their memory: run by `gather`.

A JSON object comes in on standard input, another goes out on standard output: the fields of
`Wish`, and what `measure` returns. `pipespec partition` runs it on every host over SSH.

What was measured once is kept in `~/.cache/pipespec/measured` (or in XDG_CACHE_HOME), by model
files, device, threads, rows, text length, dtype, quantisation and versions; free memory is looked
at each time.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipespec.clock import monotonic_ns
from pipespec.engine.attention.plan import AttentionPlan, causal_plan
from pipespec.engine.checkpoint import CheckpointInfo, inspect
from pipespec.engine.model import ModelSlice
from pipespec.errors import ConfigError, HostFailed, PipespecError
from pipespec.survey.check import package_version
from pipespec.survey.inventory import fingerprint
from pipespec.survey.sums import adding_up_ms
from pipespec.system.cache import keep, recall
from pipespec.system.devices import num_cuda
from pipespec.system.reading import Unreadable, typed

MAX_LAYERS = 4  # so many are timed together, where the memory allows
MEMORY_SHARE = 0.8  # of what is free may be used to measure
# Packages that decide how fast a model is.
VERSIONS = ("pipespec", "torch", "transformers", "torchao", "bitsandbytes")
WARM_UPS = 2
LEAST_RUNS, MOST_RUNS = 5, 50
LEAST_S = 0.3
NS_PER_MS = 1e6
NS_PER_S = 1e9
SEED = 0


@dataclass(frozen=True)
class Wish:
    """What is to be measured.

    `roles` has one entry per device: "stage" and "draft", or one of them. `rows` is the width of
    a batch, `length` how many tokens of text it attends to; `children` are the draft's
    candidates. `quantization` is that of target and draft. `groups` are the sizes of those
    devices, in order, that compute together; nothing: each by itself.
    """

    target: str
    draft: str | None
    devices: tuple[str, ...]
    roles: tuple[tuple[str, ...], ...]
    rows: int
    length: int
    children: int
    dtype: str
    quantization: tuple[str | None, str | None] = (None, None)
    keep_quantized: str = "auto"
    groups: tuple[int, ...] = ()

    def held(self, info: CheckpointInfo, role: str) -> str | None:
        """How target (`stage`) or draft is held; see CheckpointInfo."""
        return info.held(self.quantization[role == "draft"], self.keep_quantized, self.dtype)


def measure(wish: Wish) -> dict[str, Any]:
    """`target` and `draft` (bytes in memory) and `devices`, times in milliseconds for each.

    Raises PipespecError.
    """
    target = inspect(wish.target)
    draft = None if wish.draft is None else inspect(wish.draft)
    for name, info, how in zip(
        ("model.quantization", "model.draft_quantization"),
        (target, draft),
        wish.quantization,
        strict=True,
    ):
        if info is not None:
            info.check_quantization(name, how)
            info.require_quantizer(name, how)
    num_cpu = sum(device == "cpu" for device in wish.devices)
    threads = _threads(len(wish.devices))
    measured: dict[str, dict[str, float] | None] = {}
    found = []
    for device, roles in zip(wish.devices, wish.roles, strict=True):
        memory = _free_bytes(device, num_cpu)
        bench = _Bench(wish, torch.device(device), threads, memory)
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
    for size in wish.groups:
        if size > 1:
            members = wish.devices[first : first + size]
            dtype = getattr(torch, target.computes_in(wish.dtype))
            found[first]["sum_ms"] = adding_up_ms(members, wish.rows, target.hidden_size, dtype)
        first += size
    return {
        "target": _sizes(target, wish.dtype, wish.held(target, "stage")),
        "draft": None if draft is None else _sizes(draft, wish.dtype, wish.held(draft, "draft")),
        "devices": found,
    }


def _sizes(info: CheckpointInfo, dtype: str, quantization: str | None) -> dict[str, Any]:
    sizes = info.loaded(dtype, quantization)
    return {
        "dtype": info.computes_in(dtype),
        "layer_bytes": list(sizes.layers),
        "embedding_bytes": sizes.embedding,
        "head_bytes": sizes.head,
        "tied": info.tied,
        "hidden_size": info.hidden_size,
        "context": info.context,
    }


class _Bench:
    """Measures on one device."""

    def __init__(self, wish: Wish, device: torch.device, threads: int, memory: int):
        self.wish = wish
        self.device = device
        self.threads = threads
        self.memory = memory
        self.device_name = (
            torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else f"{_processor()}, {threads} threads"
        )
        self._random = torch.Generator().manual_seed(SEED)

    def cached(self, role: str, info: CheckpointInfo) -> dict[str, float] | None:
        """What `stage` or `draft` gives, kept from an earlier time if it is there.

        None: there is no room for the draft.
        """
        wish, files = self.wish, fingerprint(str(info.path))
        key = {
            "role": role,
            "files": [files.config, files.index, files.shards],
            "device": self.device_name,
            "rows": wish.rows,
            "length": wish.length,
            "children": wish.children if role == "draft" else None,
            "dtype": wish.dtype,
            "quantization": wish.held(info, role),
            "versions": [package_version(name) for name in VERSIONS],
        }
        kept = recall("measured", key)
        with suppress(Unreadable):
            figures: dict[str, float] = typed("it", kept, Mapping[str, int | float])
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
            keep("measured", key, found)
        return found

    def stage(self, info: CheckpointInfo) -> dict[str, float]:
        """One layer, the embedding, the LM head; KV bytes of a layer's slot."""
        count, of_target = info.num_layers, self.wish.held(info, "stage")
        layer_bytes = max(info.loaded(self.wish.dtype, of_target).layers)
        timed = max(1, min(MAX_LAYERS, count, int(self.memory * MEMORY_SHARE) // layer_bytes))
        start = (count - timed) // 2
        middle = self.load(info, range(start, start + timed), of_target)
        layer_ms = self.forward_ms(middle) / timed
        slot_bytes = middle.num_kv_bytes / timed / middle.num_slots
        del middle
        first = self.load(info, range(1), of_target)
        embedding_ms = max(0.0, self.forward_ms(first) - layer_ms)
        del first
        last = self.load(info, range(count - 1, count), of_target)
        hidden = self.hidden(last)
        return {
            "layer_ms": layer_ms,
            "embedding_ms": embedding_ms,
            "head_ms": self.median_ms(lambda: last.logits(hidden)),
            "kv_slot_bytes": slot_bytes,
        }

    def draft(self, info: CheckpointInfo) -> dict[str, float] | None:
        """One round: `rows` nodes expanded. None if there is no room for the draft."""
        of_draft = self.wish.held(info, "draft")
        if info.loaded(self.wish.dtype, of_draft).total > self.memory:
            return None
        model = self.load(info, range(info.num_layers), of_draft)
        inputs, positions, plan = self.batch(model)
        children = min(self.wish.children, model.vocab_size)

        def expand() -> None:
            logits = model.logits(model.forward(inputs, positions, plan)).float()
            torch.log_softmax(logits, -1).topk(children).indices.cpu()

        return {
            "round_ms": self.median_ms(expand),
            "weight_bytes": model.num_weight_bytes,
            "kv_slot_bytes": model.num_kv_bytes / model.num_slots,
        }

    def load(self, info: CheckpointInfo, layers: range, quantization: str | None) -> ModelSlice:
        """A slice with room for the text and one batch."""
        return ModelSlice.load(
            info.path,
            layers,
            dtype=getattr(torch, info.computes_in(self.wish.dtype)),
            quantization=quantization,
            device=self.device,
            num_slots=self.length(info) + self.wish.rows,
        )

    def length(self, info: CheckpointInfo) -> int:
        """How much text a batch attends to."""
        return max(0, min(self.wish.length, info.context - self.wish.rows))

    def batch(self, model: ModelSlice) -> tuple[Tensor, Tensor, AttentionPlan]:
        """Inputs, positions and plan of a batch behind a text; each row sees those before it."""
        slots = np.arange(model.num_slots)
        length = model.num_slots - self.wish.rows
        if model.is_first:
            shape = (self.wish.rows,)
            inputs = torch.randint(model.vocab_size, shape, generator=self._random)
        else:
            inputs = self.hidden(model)
        plan = causal_plan(slots[:length], slots[length:])
        return inputs, torch.from_numpy(plan.positions), plan

    def hidden(self, model: ModelSlice) -> Tensor:
        """Hidden states that differ from row to row, so that experts are chosen by chance."""
        shape = (self.wish.rows, model.hidden_size)
        return torch.randn(shape, generator=self._random).to(self.device, model.dtype)

    def forward_ms(self, model: ModelSlice) -> float:
        """One batch through a slice."""
        inputs, positions, plan = self.batch(model)
        return self.median_ms(lambda: model.forward(inputs, positions, plan))

    def median_ms(self, run: Callable[[], object]) -> float:
        """The median of several runs."""
        for _ in range(WARM_UPS):
            run()
        times: list[float] = []
        begun = monotonic_ns()
        while len(times) < LEAST_RUNS or (
            len(times) < MOST_RUNS and monotonic_ns() - begun < LEAST_S * NS_PER_S
        ):
            self.wait()
            start = monotonic_ns()
            run()
            self.wait()
            times.append((monotonic_ns() - start) / NS_PER_MS)
        return statistics.median(times)

    def wait(self) -> None:
        """Until the device has done what it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# --- this machine -----------------------------------------------------------------------------


def _free_bytes(device: str, num_cpu: int) -> int:
    """What a worker on the device may use; `num_cpu` workers share the main memory."""
    if device == "cpu":
        import psutil

        return int(psutil.virtual_memory().available // num_cpu)
    count = num_cuda()
    index = int(device.partition(":")[2] or 0)
    if index >= count:
        raise ConfigError(
            f"{device} is not there: this machine has {count} CUDA devices; correct its devices."
        )
    return int(torch.cuda.mem_get_info(index)[0])


def _threads(num_workers: int) -> int:
    """Threads of a rank on the CPU, as the launcher sets them."""
    shared = max(1, len(os.sched_getaffinity(0)) // num_workers)
    return int(os.environ.get("OMP_NUM_THREADS", shared))


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def main() -> int:
    """Measure what standard input asks for."""
    try:
        asked = json.load(sys.stdin)
        roles = tuple(map(tuple, asked.pop("roles")))
        wish = Wish(roles=roles, devices=tuple(asked.pop("devices")), **asked)
        answer = measure(wish)
    except PipespecError as error:
        print(f"pipespec: {error}", file=sys.stderr)
        return error.exit_code
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
