"""Whole steps of a cluster on a pretended GPU: head, draft and stages with tiny random models."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pipespec.core import Batch, Request
from pipespec.engine.attention import select
from pipespec.engine.model_slice import ModelSlice
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.scheduler_types import SchedulerConfig
from pipespec.transport.wire import Wire
from tests.helpers import models
from tests.helpers.pretended_gpu.gpu import PretendedGpu
from tests.helpers.toy_pipeline import Link, ToyPipeline

NUM_SLOTS = 96
ROWS = 16
GRAPHS = "graphs"  # of the backend `static`


class WireLink(Link):
    """A link whose batches are messages, as those of `DistributedTransport` are."""

    def __init__(
        self, rank: int, arriving: deque[Batch], next_rank: deque[Batch] | None, model: ModelSlice
    ):
        super().__init__(rank, arriving, next_rank)
        self._wire = Wire(0, ROWS, model.hidden_size, model.dtype, max_finished=8, max_retained=8)
        self._device = model.device

    def send(self, batch: Batch) -> None:
        packed = self._wire.pack(batch, pinned=self._device.type == "cuda")
        super().send(self._wire.unpack(packed))

    def recv(self) -> Batch:
        batch = super().recv()
        if batch.hidden is not None:
            batch.hidden = batch.hidden.to(self._device, non_blocking=True)
        return batch


def load(folder: Path, layers: range, device: str) -> ModelSlice:
    """A slice as a cluster of bfloat16 loads it."""
    return ModelSlice.load(
        folder, layers, dtype=torch.bfloat16, device=device, num_slots=NUM_SLOTS, attention="sdpa"
    )


@torch.inference_mode()
def use(model: ModelSlice, attention: str, gpu: PretendedGpu) -> None:
    """Compute a slice by another backend from now on, as `autotune` does; with GRAPHS in graphs."""
    name = select.STATIC if attention == GRAPHS else attention
    if model.attention != name:
        wrong = select.backend_error(name, model.device, model.attention_layers)
        assert wrong is None, wrong
        model.set_backend(name, select.make_backend(name, model.device, NUM_SLOTS))
    model.refused = []
    if attention == GRAPHS:
        model.capture_graphs([ROWS], gpu.capture)


def answers(
    draft: ModelSlice, stages: Sequence[ModelSlice], requests: Sequence[Request]
) -> dict[int, list[int]]:
    """What a cluster of a draft and stages answers."""
    config = SchedulerConfig(
        BestFirst(ROWS // 2, 2),
        len(stages),
        1,
        prefill_chunk=8,
        context_limit=64,
        max_num_seqs=4,
        max_rows=ROWS,
        num_slots=NUM_SLOTS,
        max_retained=4,
        kept_states=8 if stages[0].recurrent else None,
        state_interval=8,
    )
    loaded = iter((draft, *stages))

    def link(rank: int, *queues: Any) -> WireLink:
        return WireLink(rank, *queues, stages[rank - 1])

    pipeline = ToyPipeline(
        config,
        free=False,
        draft_slots=NUM_SLOTS,
        answers={},
        make_model=lambda _: next(loaded),
        vocabulary=models.VOCAB_SIZE,
        make_link=link,
    )
    waiting = list(requests)
    while waiting or not pipeline.scheduler.idle:
        while waiting and pipeline.scheduler.room:
            pipeline.add(waiting.pop(0))
        pipeline.lockstep()
    return pipeline.answers
