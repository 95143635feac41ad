"""Prompts of 32k and 128k tokens: time to first token, the KV pool and the memory of every rank.

    python -m benchmarks.load.long_context --json benchmarks/results/long_context.json

Measured, on copies of the demo pair of a few layers with a context as long as the prompts. One
request at a time: its prompt fills the context but for its answer. The KV pool of a rank is that of
one such request and its draft tokens; the memory is what a rank's process has of its own (USS) when
the answer is whole, once with weights and an empty pool and once after the prompt.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from safetensors.torch import load_file, save_file

from benchmarks.common import experiment, run_options
from benchmarks.common.checked_requests import shipped_prompts
from benchmarks.load.long_prompt import longer_pair
from pipespec.client.local_cluster import Running, running
from pipespec.clock import monotonic_ns
from pipespec.cluster import memory
from pipespec.cluster.deployment import Deployment, decide
from pipespec.config.compose import compose
from pipespec.controller.membership import Membership
from pipespec.core import SamplingParams
from pipespec.engine.checkpoint.slice_tensors import LAYER
from pipespec.stats import Report
from tools.inflate import read_config

MIB = 2**20
WEIGHTS = "model.safetensors"


def shallow_pair(folder: Path, layers: int, positions: int) -> list[str]:
    """Overrides for copies of the demo pair with so many layers at most, and a context of
    `positions` tokens."""
    overrides = longer_pair(folder, positions)
    for name in ("target", "draft"):
        config = read_config(folder / name)
        kept = min(layers, config["num_hidden_layers"])
        config["num_hidden_layers"] = kept
        (folder / name / "config.json").write_text(json.dumps(config))
        tensors = {
            key: tensor
            for key, tensor in load_file(folder / name / WEIGHTS).items()
            if (layer := LAYER.search(key)) is None or int(layer[1]) < kept
        }
        save_file(tensors, folder / name / WEIGHTS, metadata={"format": "pt"})
    return overrides


def own_bytes(cluster: Running) -> list[int]:
    """The unique memory of every rank's process."""
    running_now = cluster.cluster
    with Membership(running_now.url, running_now.namespace) as shared:
        joined = shared.attached(running_now.epoch)
    return [psutil.Process(joined[rank]).memory_full_info().uss for rank in sorted(joined)]


def pool_bytes(deployment: Deployment, rank: int) -> int:
    """Of the KV pool of a rank, which has as many slots as one request needs."""
    info = memory.model_of(deployment, rank)
    if info is None:
        return 0
    return memory.least_slots(deployment, rank).total() * memory.slot_bytes(deployment, info, rank)


def measure(tokens: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One length of context."""
    overrides = [
        *shallow_pair(folder / str(tokens), options.layers, tokens),
        *run_options.cluster(options),
        f"model.context={tokens}",
        f"decode.prefill_chunk={options.chunk}",
        "scheduler.max_num_seqs=1",
        f"proposer={options.proposer}",
    ]
    deployment = decide(compose(overrides))
    with running(deployment) as cluster:
        shipped = shipped_prompts(cluster.client, 80, tokens)
        prompt = np.resize(np.concatenate(shipped), tokens - options.tokens).tolist()
        before = own_bytes(cluster)
        submitted_ns = monotonic_ns()
        request = cluster.client.submit(prompt, SamplingParams(), max_new_tokens=options.tokens)
        for _ in cluster.client.events(request):
            pass
        after = own_bytes(cluster)
        reports = cluster.client.reports(request)
    return {
        "context": tokens,
        "prompt_tokens": len(prompt),
        **times(reports, submitted_ns),
        "ranks": [
            {
                "rank": f"stage {rank}" if rank else "head",
                "weights_mib": held_mib(deployment, rank),
                "kv_pool_mib": pool_bytes(deployment, rank) / MIB,
                "before_mib": before[rank] / MIB,
                "after_mib": after[rank] / MIB,
            }
            for rank in range(deployment.num_ranks)
        ],
        "settings": experiment.overrides(overrides, folder),
    }


def held_mib(deployment: Deployment, rank: int) -> float:
    """The weights of a rank."""
    info = memory.model_of(deployment, rank)
    if info is None:
        return 0.0
    layers = memory.layers_of(deployment, info, rank)
    return memory.held_bytes(deployment, info, layers) / MIB


def times(reports: list[Report], submitted_ns: int) -> dict[str, float]:
    """Time to the first token, prompt tokens for each second of it, and the mean time between the
    tokens of the answer."""
    tokens = np.array(reports[0]["token_ns"]) / 1e9
    ttft_s = float(tokens[0] - submitted_ns / 1e9)
    return {"ttft_s": ttft_s, "tbt_ms": 1e3 * float(np.diff(tokens).mean())}


def main() -> None:
    parser = experiment.parser(__doc__)
    run_options.add_cluster(parser, machine="none", stages=4)
    parser.add_argument(
        "--contexts", type=experiment.numbers, default=[32768, 131072], help="(32768,131072)"
    )
    parser.add_argument("--layers", type=int, default=4, help="of target and draft at most (4)")
    parser.add_argument("--chunk", type=int, default=512, help="decode.prefill_chunk (512)")
    parser.add_argument("--tokens", type=int, default=32, help="of the answer (32)")
    parser.add_argument("--proposer", default="draft_model", help="draft_model or suffix")
    options = experiment.parse(parser, stages=2, contexts=[1024, 2048], tokens=8)
    with tempfile.TemporaryDirectory() as name:
        found = [measure(tokens, options, Path(name)) for tokens in options.contexts]
    rows = [
        {
            "context": each["context"],
            "ttft_s": each["ttft_s"],
            "prompt_tokens_per_s": each["prompt_tokens"] / each["ttft_s"],
            "tbt_ms": each["tbt_ms"],
            "kv_pool_mib": sum(rank["kv_pool_mib"] for rank in each["ranks"]),
            "most_kv_pool_of_a_rank_mib": max(rank["kv_pool_mib"] for rank in each["ranks"]),
            "most_memory_of_a_rank_mib": max(rank["after_mib"] for rank in each["ranks"]),
        }
        for each in found
    ]
    for each in found:
        experiment.show(f"Context of {each['context']} tokens, memory in MiB", each["ranks"])
    title = (
        f"Measured: prompts that fill the context, demo pair of {options.layers} layers, "
        f"{options.stages} stages, chunks of {options.chunk}"
    )
    experiment.publish(options, title, rows, measured=found)


if __name__ == "__main__":
    main()
