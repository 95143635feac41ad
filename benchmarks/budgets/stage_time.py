"""The time of a stage beside the limits of the hardware. Measured: nothing is emulated.

    python -m benchmarks.budgets.stage_time --shape llama-1b --layers 4 --json FILE --plot PATH
    python -m benchmarks.budgets.stage_time --shape llama-70b --draft llama-1b

A middle slice of a published shape, with random weights and KV pools of random numbers, computes
batches of tree nodes after texts of several lengths (`SliceRunner.compute`; a text's slots are
contiguous, as after a prompt, and the rows' hidden states are on the device). Shown for a step:

    admit      the bookkeeping of the batch, on the host; the rest is the forward pass
    attention  only the backend's calls, for all layers one after another
    floor      the longer of two: weights and KV by the bandwidth of a copy (bytes read plus
               written), arithmetic by the rate of a square matrix product
    verdict    `SliceRunner.apply` and `SliceRunner.prune` with the rows of nine steps here, and
               whether any K or V moved
    draft      a round: nodes through a whole model, its logits, the most probable tokens
"""

from __future__ import annotations

import argparse
import os
import resource
from typing import Any

import numpy as np
import torch

from benchmarks.budgets.hardware import limits, name_of, now_ms, repeat, with_floor
from benchmarks.budgets.rank_memory import LLAMA_70B, MIB
from benchmarks.budgets.stage_report import draw, show
from benchmarks.budgets.timed_stage import SEQUENCE, TimedStage, draft_rows, random_tree
from benchmarks.common import experiment
from benchmarks.common.experiment import names, numbers
from pipespec.core import Verdict
from pipespec.engine.attention.select import ATTENTIONS, AUTO
from pipespec.engine.slice.speedups import capture_graphs, capture_head, compile_slice
from pipespec.errors import ConfigError
from pipespec.head.proposer import ProposalRequest
from pipespec.head.proposers.draft_model import DraftModelProposer
from pipespec.head.proposers.token_map import ReadText
from pipespec.head.tree import ROOT
from pipespec.system.folders import resource_dir
from tools.inflate import Shape, read_config

# As the published config.json of each says.
SHAPES = {
    "llama-70b": LLAMA_70B,
    "llama-8b": Shape(4096, 32, 14336, 32, 8, 128, 128256, tied=False),
    "llama-1b": Shape(2048, 16, 8192, 32, 8, 64, 128256, tied=True),
    "demo": Shape.of(read_config(resource_dir("demo") / "target")),
}
STAGES = 8  # without --layers the slice is one of so many
DTYPES = ("bfloat16", "float16", "float32")
CHILDREN = 16  # candidates of each row in a draft round
STEPS_HELD, WIDTH_HELD = 9, 64  # of the tree rows at a stage when a verdict comes
VERDICT_BUDGET_MS = 0.1
DRAFT_CONTEXT = 2048  # or the largest


def step(stage: TimedStage, rows: int, context: int, seconds: float) -> dict[str, Any]:
    """One batch of `rows` nodes after a text that the stage holds, and its attention alone."""
    device = stage.model.device
    rewind = stage.remember()
    batch = stage.batch(draft_rows(random_tree(rows, context, stage.shape.vocab)))

    def compute() -> dict[str, float]:
        rewind()
        start = now_ms(device)
        done = stage.compute(batch)
        spent = now_ms(device) - start
        assert len(done) == rows
        return {"step": spent, "admit": stage.admit_ms, "forward": spent - stage.admit_ms}

    figures = repeat(compute, seconds)
    backend, layers, plan = stage.model.backend, stage.model.attention_layers, stage.plan
    assert plan is not None
    like = layers[0].pool
    query = torch.randn(rows, layers[0].heads, like.keys.shape[2], device=device).to(like.keys)
    key, value = (
        torch.randn(rows, *x.shape[1:], device=device).to(x) for x in (like.keys, like.values)
    )

    def attend() -> dict[str, float]:
        backend.prepare(plan)
        moments = [now_ms(device)]
        for _ in range(2):  # the second time masks and indices are there
            for layer in layers:
                backend.attend(query, key, value, layer.pool, layer.options)
            moments.append(now_ms(device))
        return {"attention": moments[1] - moments[0], "prepared": moments[2] - moments[1]}

    with torch.inference_mode():
        figures |= repeat(attend, seconds)
    stage.check_integrity()
    rewind()
    return {"rows": rows, "context": context, "ms": figures, **stage.work(rows, context)}


def verdict(stage: TimedStage, rows: int, context: int, seconds: float) -> dict[str, Any]:
    """A verdict that keeps the largest subtree of `rows` nodes, and one that misses the tree."""
    device = stage.model.device
    tree = random_tree(rows, context, stage.shape.vocab)
    parts = np.array_split(draft_rows(tree), STEPS_HELD)
    done = [stage.compute(stage.batch(part)) for part in parts if len(part)][-1]
    rewind = stage.remember()
    children = np.flatnonzero(tree.parent[1:] == ROOT) + 1
    kept = max(children, key=lambda child: tree.descends_from(child).sum())
    absent = next(token for token in range(rows + 1) if token not in tree.token[children])
    # With references to the tensors, so that their memory cannot be used by others.
    before = [(tensor, tensor.data_ptr(), tensor.clone()) for tensor in stage.pool_tensors()]
    result: dict[str, Any] = {"context": context, "rows": rows}
    for name, token in (("hit", int(tree.token[kept])), ("miss", absent)):

        def follow(token: int = token) -> dict[str, float]:
            rewind()
            start = now_ms(device)
            stage.apply([Verdict(SEQUENCE, context, (token,))])
            applied = now_ms(device)
            stage.prune(done)
            pruned = now_ms(device)
            return {"apply": applied - start, "prune": pruned - applied, "sum": pruned - start}

        result[name] = repeat(follow, seconds)
        stage.check_integrity()
    result["budget_ms"] = VERDICT_BUDGET_MS
    result["kv_in_place"] = all(
        tensor.data_ptr() == address and torch.equal(tensor, clone)
        for tensor, (_, address, clone) in zip(stage.pool_tensors(), before, strict=True)
    )
    return result


def draft_round(stage: TimedStage, rows: int, context: int, seconds: float) -> dict[str, Any]:
    """`rows` nodes expanded by a whole model, the draft."""
    text = stage.hold_text(context)
    rewind = stage.remember()
    tree = random_tree(rows, context, stage.shape.vocab)
    source = DraftModelProposer(stage, chunk=1, vocabulary=stage.shape.vocab)
    source.read[text.sequence] = ReadText(text, None)  # the stage holds it already
    nodes = np.arange(1, len(tree))

    def expand() -> dict[str, float]:
        rewind()
        start = now_ms(stage.model.device)
        (found,) = source.propose([ProposalRequest(text, tree, nodes)], CHILDREN)
        spent = now_ms(stage.model.device) - start
        assert found is not None and len(found.tokens) == rows
        return {"round": spent}

    figures = repeat(expand, seconds)
    return {"rows": rows, "context": context, "ms": figures, **stage.work(rows, context)}


def memory_used(stage: TimedStage) -> dict[str, Any]:
    """Bytes of the slice, and the peak so far (None: unknown).

    On a CPU the peak is that of the process, with the construction of the model; otherwise that of
    tensors since then.
    """
    device, peak = stage.model.device, None
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    elif hasattr(torch.accelerator, "max_memory_allocated"):
        peak = torch.accelerator.max_memory_allocated(device)
    model = stage.model
    sizes = {"weights": model.num_weight_bytes, "kv": model.num_kv_bytes, "slots": model.num_slots}
    return sizes | {"peak": peak}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one run, as they are stored."""
    torch.manual_seed(0)
    load = os.getloadavg()[0]
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    where = {"dtype": dtype, "device": device, "attention": options.attention}
    num_slots = max(options.contexts) + max(*options.rows, options.held)
    # A layer more on either side, so that the slice has neither embedding nor head.
    layers = range(1, 1 + options.layers)
    stage = TimedStage(SHAPES[options.shape], options.layers + 2, layers, num_slots, where)
    if device.type != "cpu" and hasattr(torch.accelerator, "reset_peak_memory_stats"):
        torch.accelerator.reset_peak_memory_stats(device)
    if options.compile:
        compile_slice(stage.model)
    if options.graph_rows:
        capture_graphs(stage.model, options.graph_rows)
    if stage.model.refused:
        raise ConfigError(stage.model.refused[0])
    steps: list[dict[str, Any]] = []
    for context in options.contexts:
        stage.hold_text(context)
        steps += [step(stage, rows, context, options.seconds) for rows in options.rows]
    memory, stage_attention = memory_used(stage), stage.model.attention
    verdicts = []
    for context in options.contexts:
        stage.hold_text(context)
        verdicts.append(verdict(stage, options.held, context, options.seconds))
    del stage
    drafts = []
    for name in options.draft:
        shape = SHAPES[name]
        layers = min(options.draft_layers or shape.layers, shape.layers)
        usual, most = DRAFT_CONTEXT in options.contexts, max(options.draft_rows)
        context = DRAFT_CONTEXT if usual else options.contexts[-1]
        draft = TimedStage(shape, layers, range(layers), context + most, where)
        if options.compile:
            compile_slice(draft.model)
        if options.graph_rows:
            capture_graphs(draft.model, options.graph_rows)
            capture_head(draft.model, options.graph_rows)
        if draft.model.refused:
            raise ConfigError(draft.model.refused[0])
        label = {"shape": name, "layers": layers, "of": shape.layers}
        drafts += [
            label | draft_round(draft, rows, context, options.seconds)
            for rows in options.draft_rows
        ]
        del draft
    copied, size = options.copy_mib * MIB, options.matmul
    limit = limits(device, dtype, copy=copied, matmul=size, seconds=options.seconds)
    steps = [with_floor(cell, "step", limit) for cell in steps]
    alone = {cell["context"]: cell["ms"]["step"]["median"] for cell in steps if cell["rows"] == 1}
    for cell in steps:
        cell["over_one_row"] = cell["ms"]["step"]["median"] / alone[cell["context"]]
        cell["attention_share"] = cell["ms"]["attention"]["median"] / cell["ms"]["step"]["median"]
    return {
        "device": name_of(device),
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load": [load, os.getloadavg()[0]],  # processes that ran, at the start and at the end
        "attention": stage_attention,
        "graph_rows": options.graph_rows,
        "compiled": options.compile,
        "shape": options.shape,
        "layers": options.layers,
        "limits": limit,
        "steps": steps,
        "verdicts": verdicts,
        "children": CHILDREN,
        "drafts": [with_floor(cell, "round", limit) for cell in drafts],
        "memory_bytes": memory,
    }


def parse() -> argparse.Namespace:
    parser = experiment.parser(__doc__, plot=True)
    accelerated = torch.accelerator.is_available()
    default = str(torch.accelerator.current_accelerator()) if accelerated else "cpu"
    parser.add_argument("--shape", choices=SHAPES, default="demo", help="(demo)")
    parser.add_argument("--layers", type=int, help=f"of the slice (1/{STAGES} of the model)")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help=f"({DTYPES[0]})")
    parser.add_argument("--device", default=default, help=f"({default})")
    parser.add_argument("--attention", choices=ATTENTIONS, default=AUTO, help=f"({AUTO})")
    parser.add_argument(
        "--graph-rows", type=numbers, default=[], help="replay graphs of up to so many rows (none)"
    )
    parser.add_argument("--compile", action="store_true", help="by torch.compile")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    rows = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256]
    parser.add_argument("--rows", type=numbers, default=rows, help="1 is always among them")
    parser.add_argument("--contexts", type=numbers, default=[128, 512, 2048, 8192, 32768])
    parser.add_argument("--draft", type=names, default=[], metavar="SHAPES", help="such as demo")
    parser.add_argument("--draft-layers", type=int, help="cut the draft to so many")
    parser.add_argument("--draft-rows", type=numbers, default=[1, 16, 64], help="(1,16,64)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of runs per figure (1)")
    # More bytes are copied than any cache has.
    parser.set_defaults(held=STEPS_HELD * WIDTH_HELD, copy_mib=1024, matmul=None)
    options = experiment.parse(
        parser,
        rows=[1, 4, 16],
        contexts=[16, 256],
        layers=2,
        held=5 * STEPS_HELD,
        copy_mib=16,
        matmul=256,
        draft_rows=[1, 4],
        draft_layers=2,
        seconds=0.05,
    )
    options.matmul = options.matmul or (4096 if options.device == "cpu" else 8192)
    options.rows = sorted({1, *options.rows})
    options.contexts = sorted(set(options.contexts))
    options.draft_rows = sorted(set(options.draft_rows))
    options.layers = options.layers or SHAPES[options.shape].layers // STAGES
    unknown = [name for name in options.draft if name not in SHAPES]
    if unknown:
        parser.error(f"--draft is {unknown[0]}, but must be among {', '.join(SHAPES)}")
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    result = measure(options)
    title = (
        f"Measured: a stage of {options.layers} layers of {options.shape}, {options.dtype}, "
        f"attention {result['attention']}{', graphs' * bool(options.graph_rows)}"
        f"{', compiled' * options.compile}, on "
        f"{result['device']}, {options.threads} CPU threads"
    )
    show(title, result)
    if options.json:
        experiment.store(options.json, {"title": title, **result})
    if options.plot:
        draw(title, result["steps"], options.plot)


if __name__ == "__main__":
    main()
