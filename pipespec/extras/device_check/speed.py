"""How fast a device is: batches from process to process, stages and drafts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._C._distributed_c10d import HashStore

from pipespec.cluster.diagnostics.measure_devices import round_ms
from pipespec.core import NUM_COLUMNS, Batch
from pipespec.engine.attention import select
from pipespec.engine.precision import name_of
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.speedups import capture_graphs, capture_head, median_ms
from pipespec.system.silence_warnings import silence_warnings
from pipespec.transport.distributed import DistributedTransport
from pipespec.transport.tp_group import can_use_nccl

with silence_warnings():
    from transformers import AutoConfig, PretrainedConfig

ROWS = (1, 16, 64)
CHILDREN = 8
HOPS, WARM_UP_HOPS = 60, 10
# More bytes than fit caches, to measure how fast a device reads.
COPIED_BYTES = 256 << 20


class CheckedShapes(NamedTuple):
    """What is timed, with the names of the published models: a stage of all layers of a Llama but
    the first and the last, and a draft, behind `contexts` tokens."""

    stage_name: str
    stage: PretrainedConfig
    draft_name: str
    draft: PretrainedConfig
    dtype: torch.dtype
    contexts: tuple[int, ...]


def sizes(device: torch.device) -> CheckedShapes:
    """Those of published models on a GPU, and small ones on a CPU, where speeds say little."""
    if device.type == "cpu":
        stage, draft = _llama(256, 4, 2, 512, 4, 1024), _llama(128, 4, 2, 256, 2, 1024)
        return CheckedShapes(
            "a small model", stage, "a small draft", draft, torch.float32, (128, 512)
        )
    stage, draft = _llama(4096, 32, 8, 14336, 6, 128256), _llama(2048, 32, 8, 8192, 16, 128256)
    names = ("4 layers of Llama 3.1 8B", "Llama 3.2 1B")
    return CheckedShapes(names[0], stage, names[1], draft, torch.bfloat16, (128, 2048, 8192))


def _llama(
    hidden: int, heads: int, kv_heads: int, inner: int, layers: int, vocabulary: int
) -> PretrainedConfig:
    return AutoConfig.for_model(
        "llama",
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    )


def read_bytes_per_ms(device: torch.device) -> float:
    """How fast a device reads its memory, by how fast it copies within it."""
    source = torch.ones(COPIED_BYTES // 2, dtype=torch.uint8, device=device)
    # What is copied is read and written.
    return COPIED_BYTES / median_ms(device, torch.empty_like(source).copy_, source)


def hops(device: torch.device) -> dict[str, Any]:
    """Milliseconds of a batch with hidden states from one process's device to the next, by rows.
    The ranks are threads here, which takes no less."""
    of = sizes(device)
    devices = [str(device)] * 2
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        devices = ["cuda:0", "cuda:1"]
    found: dict[str, Any] = {"devices": devices, "gloo": _hops(devices, of, nccl=False)}
    if can_use_nccl(devices):
        found["nccl"] = _hops(devices, of, nccl=True)
    else:
        found["nccl"] = {"not_available": "NCCL needs two GPUs"}
    return found


def _hops(devices: Sequence[str], of: CheckedShapes, *, nccl: bool) -> dict[str, float]:
    hidden_size = of.stage.hidden_size
    how: dict[str, Any] = {"store": HashStore(), "epoch": 1, "secret": "check", "nccl": nccl}
    how |= {"max_rows": max(ROWS), "hidden_size": hidden_size, "dtype": of.dtype}

    def rank(number: int) -> DistributedTransport:
        return DistributedTransport(devices, rank=number, **how)

    def receive() -> float:
        received = second.recv().hidden
        assert received is not None
        received[:1].cpu()  # waits for the device
        return time.perf_counter()

    found = {}
    with ThreadPoolExecutor(1) as thread:  # of the second rank
        connecting = thread.submit(rank, 1)
        with closing(rank(0)) as first, closing(connecting.result()) as second:
            for rows in ROWS:
                table = np.zeros((rows, NUM_COLUMNS), np.int64)
                hidden = torch.zeros(rows, hidden_size, dtype=of.dtype, device=devices[0])
                took = []
                for number in range(WARM_UP_HOPS + HOPS):
                    arriving = thread.submit(receive)
                    began = time.perf_counter()
                    first.send(Batch(number, table, hidden))
                    took.append((arriving.result() - began) * 1e3)
                found[str(rows)] = statistics.median(took[WARM_UP_HOPS:])
    return found


def stage(device: torch.device) -> dict[str, Any]:
    """Milliseconds of a stage by attention backend, rows and context, with CUDA graphs where they
    can be captured; and of reading its weights and KV, by how fast the device copies."""
    of = sizes(device)
    rate = read_bytes_per_ms(device)
    found: dict[str, Any] = {"model": of.stage_name, "read_gb_per_s": rate * 1e3 / 1e9}
    timed: dict[str, Any] = {}
    floors: dict[str, Any] = {}
    num_slots = max(of.contexts) + max(ROWS)
    for backend in (select.SDPA, select.STATIC, select.TRITON, select.FLASHINFER):
        if select.missing_requirement(backend, device.type, name_of(of.dtype)):
            continue
        layers = range(1, of.stage.num_hidden_layers - 1)
        how: dict[str, Any] = {"dtype": of.dtype, "device": device, "attention": backend}
        model = ModelSlice.random(of.stage, layers, num_slots=num_slots, **how)
        if model.attention != backend:
            found.setdefault("wrong", []).extend(model.refused)
            continue
        if device.type == "cuda" and backend != select.SDPA:
            capture_graphs(model, [max(ROWS)])
        name = backend + " in graphs" * bool(model.graphs.rows)
        timed[name] = {
            str(context): {
                str(rows): median_ms(device, model.forward, *model.example_batch(rows, context))
                for rows in ROWS
            }
            for context in of.contexts
        }
        slot_bytes = model.num_kv_bytes / model.num_slots
        for context in of.contexts:
            floors[str(context)] = (model.num_weight_bytes + context * slot_bytes) / rate
        del model
    return found | {"floor_ms": floors, "ms": timed}


def draft(device: torch.device) -> dict[str, Any]:
    """Milliseconds of a draft's round by the nodes that it expands, operation by operation, and in
    CUDA graphs; and of reading its weights."""
    of = sizes(device)
    context = sorted(of.contexts)[len(of.contexts) // 2]
    backend = select.SDPA if device.type != "cuda" else select.STATIC
    if select.missing_requirement(select.TRITON, device.type) is None:
        backend = select.TRITON
    layers = range(of.draft.num_hidden_layers)
    how: dict[str, Any] = {"dtype": of.dtype, "device": device, "attention": backend}
    model = ModelSlice.random(of.draft, layers, num_slots=context + max(ROWS), **how)
    floor = model.num_weight_bytes / read_bytes_per_ms(device)
    found: dict[str, Any] = {"model": of.draft_name, "context": context, "floor_ms": floor}
    found["eager_ms"] = _rounds(model, context)
    if device.type == "cuda":
        capture_graphs(model, [max(ROWS)])
        capture_head(model, [max(ROWS)])
        found["graph_ms"] = _rounds(model, context)
    return found | {"attention": model.attention, "wrong": model.refused}


def _rounds(model: ModelSlice, context: int) -> dict[str, float]:
    return {str(rows): round_ms(model, rows, context, CHILDREN) for rows in ROWS}
