"""What is to be measured on the devices of a host."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipespec.config.cluster import AUTO
from pipespec.engine.inspection.inspection import CheckpointInfo, Sizes
from pipespec.engine.precision import KV_PLAIN
from pipespec.placement.rank_needs import layer_kinds
from pipespec.system.cores import num_cores, share_cores


@dataclass(frozen=True)
class MeasureRequest:
    """What to measure.

    Attributes:
        roles: of each device, "stage" and "draft", or one of them.
        rows, length: the width of a batch, and how many tokens of text it attends to.
        children: the draft's candidates.
        dtype: of plain weights, and if it was asked for, of weights of few bits too.
        quantization: of target and draft.
        groups: the sizes of those devices, in order, that compute together; nothing: none do.
        threads: `cluster.threads`.
        shared: the target's name in the parts cache of a host that got these `parts` of it from
            others (`Repository`); None: it is at `target`.
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
    kv_dtype: str = KV_PLAIN
    dtype_asked: bool = False
    groups: tuple[int, ...] = ()
    threads: int | str = AUTO
    shared: Mapping[str, Any] | None = None
    parts: tuple[str, ...] = ()

    def num_threads(self) -> int:
        """Threads of a stage on the CPU, as ranks set them, if one worker that can draft becomes
        the head where there are several."""
        if self.threads != AUTO:
            return int(self.threads)
        if "OMP_NUM_THREADS" in os.environ:
            return int(os.environ["OMP_NUM_THREADS"])
        on_cpu = [
            roles for device, roles in zip(self.devices, self.roles, strict=True) if device == "cpu"
        ]
        has_head = len(on_cpu) > 1 and any("draft" in roles for roles in on_cpu)
        num_stages = max(1, len(on_cpu) - has_head)
        return share_cores(num_cores(), num_stages, has_head=has_head).stage

    def weight_format(self, info: CheckpointInfo, role: str) -> str | None:
        """How target (`stage`) or draft is held; see CheckpointInfo."""
        return info.weight_format(
            self.quantization[role == "draft"], self.keep_quantized, self.dtype_of(info)
        )

    def sizes(self, info: CheckpointInfo, role: str) -> Sizes:
        return info.loaded(self.dtype_of(info), self.weight_format(info, role))

    def kinds(self, info: CheckpointInfo) -> tuple[int, ...]:
        return layer_kinds(info, self.sizes(info, "stage").layers)

    def dtype_of(self, info: CheckpointInfo) -> str:
        """The type in which target or draft computes."""
        if self.dtype_asked or not info.few_bits:
            return info.compute_dtype(self.dtype)
        return info.chosen_dtype("auto", self.devices)
