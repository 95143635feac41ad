"""A pass of few rows with quantised weights: a GGUF file in pipespec, as it is stored and made
plain, and in llama.cpp.

    python -m benchmarks.peers.packed_rows --target FOLDER --llama-cpp BUILD/bin \\
        --json benchmarks/results/packed_rows.json

MEASURED on this machine's CPU with all of its cores: the whole model and its logits, one row as in
plain decoding (llama.cpp's `tg`) and 16 as with draft tokens (its `pp`); medians. llama.cpp's
own quantiser makes the files. The sizes of the model must be multiples of 256.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from benchmarks.common import experiment
from pipespec.engine.checkpoint import inspect
from pipespec.engine.formats.gguf import GGUF
from pipespec.engine.model_slice import ModelSlice
from tools.rig.gguf_files import write

ROWS = (1, 16)
KINDS = ("Q4_K_M", "Q4_0", "Q6_K", "Q8_0")


def plain_file(target: Path, folder: Path) -> Path:
    """The model as a GGUF file in 16 bits."""
    whole = folder / "whole"
    whole.mkdir()
    for file in target.iterdir():
        if file.suffix != ".safetensors":
            (whole / file.name).symlink_to(file.resolve())
    tensors = {}
    for file in target.glob("*.safetensors"):
        tensors |= load_file(file)
    save_file(tensors, whole / "model.safetensors", {"format": "pt"})
    return write(whole, folder / "plain.gguf", "llama", lambda _: Type.F16, tokenizer=target)


def in_llama_cpp(programs: Path, file: Path, threads: int, repeats: int) -> dict[int, float]:
    """Milliseconds of a pass by its rows."""
    command = [str(programs / "llama-bench"), "-m", str(file), "-o", "json", "-t", str(threads)]
    found = subprocess.run(
        [*command, "-p", "16", "-n", "32", "-r", str(repeats)], capture_output=True, check=True
    )
    return {
        each["n_prompt"] or 1: 1e3 * (each["n_prompt"] or 1) / median(each["samples_ts"])
        for each in json.loads(found.stdout)
    }


def in_pipespec(model: ModelSlice, repeats: int) -> dict[int, float]:
    """The same."""
    found = {}
    for rows in ROWS:
        inputs, positions, plan = model.example_batch(rows)
        took = []
        for _ in range(1 + repeats):
            start = time.perf_counter()
            model.logits(model.forward(inputs, positions, plan))
            took.append(time.perf_counter() - start)
        found[rows] = 1e3 * median(took[1:])
    return found


def compared(file: Path, kind: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the table for a file."""
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    theirs = in_llama_cpp(options.llama_cpp, file, threads, options.repeats)
    layers = range(inspect(file).num_layers)
    found: list[dict[str, Any]] = [
        {"file": kind, "engine": "llama.cpp", "mib": file.stat().st_size / 2**20}
        | {f"{rows}_rows_ms": theirs[rows] for rows in ROWS}
    ]
    for form, name in ((GGUF, "pipespec, kept"), (None, "pipespec, plain")):
        model = ModelSlice.load(
            file, layers, dtype=torch.bfloat16, quantization=form, num_slots=2 * max(ROWS)
        )
        if form is None:
            model.use_fastest_products()
        ours = in_pipespec(model, options.repeats)
        found.append(
            {"file": kind, "engine": name, "mib": model.num_weight_bytes / 2**20}
            | {f"{rows}_rows_ms": ours[rows] for rows in ROWS}
            | {f"{rows}_rows_speed": theirs[rows] / ours[rows] for rows in ROWS}
        )
    return found


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--target", type=Path, required=True, help="folder of a Llama")
    parser.add_argument("--llama-cpp", type=Path, required=True, help="folder of its programs")
    parser.add_argument("--repeats", type=int, default=9, help="passes of each (9)")
    options = experiment.parse(parser, repeats=3)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = plain_file(options.target, folder)
        for kind in KINDS:
            file = folder / f"{kind}.gguf"
            quantise = [options.llama_cpp / "llama-quantize", source, file, kind]
            subprocess.run(quantise, capture_output=True, check=True)
            rows += compared(file, kind, options)
    experiment.publish(options, "MEASURED: ms of a pass, by engine and file", rows)


if __name__ == "__main__":
    main()
