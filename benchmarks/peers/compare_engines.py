"""pipespec beside other engines, in real time on this machine. Nothing is emulated.

    python -m benchmarks.peers.compare_engines --target DIR --draft DIR --prompts 3 \\
        --tokens 32 --repeats 3

Hugging Face `generate` and assisted generation always run; llama.cpp and vLLM on CPUs, where they
are found (`docs/peers.md` says how to get them). All engines decode the same prompts greedily with
the same checkpoints on the same cores, one engine at a time and all of them in every repeat; with
--device cuda all processes share a GPU. Each starts anew, loads, and decodes a first prompt that
does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import track
from transformers import AutoTokenizer

from benchmarks.common import experiment, run_options
from benchmarks.peers.python_engines import (
    Answer,
    Engine,
    Job,
    PeerFailed,
    Run,
    hugging_face,
    in_child,
    pipespec,
)
from benchmarks.peers.server_engines import GGUF_TYPES, RpcHost, find_llama_cpp, find_vllm, vllm
from pipespec.errors import ConfigError
from pipespec.instruments.bench import dataset
from pipespec.system.folders import resource_dir
from tools.docs.stored_results import with_range

REFERENCE = "Hugging Face generate"
POLICIES = ("root", "level", "best_first")
CPU = "cpu"
RPC_SERVERS = (RpcHost(), RpcHost())


def find(
    job: Job, stages: Sequence[int], also: Sequence[str], folder: Path
) -> tuple[dict[str, Engine], dict[str, str]]:
    """The engines to run, by name, and why others cannot run; pipespec's default policy also with
    each of some settings."""
    found: dict[str, Engine] = {
        REFERENCE: partial(in_child, hugging_face, assisted=False),
        "Hugging Face assisted": partial(in_child, hugging_face, assisted=True),
    }
    missing: dict[str, str] = {}
    for count in stages:
        for policy in POLICIES:
            overrides = (f"cluster.stages={count}", f"policy={policy}")
            name = f"pipespec {policy}, {count} stage{'s' if count > 1 else ''}"
            found[name] = partial(pipespec, overrides=overrides)
        for override in also:
            overrides = (f"cluster.stages={count}", override)
            name = f"pipespec {override}, {count} stage{'s' if count > 1 else ''}"
            found[name] = partial(pipespec, overrides=overrides)
    if job.device != CPU:
        return found, dict.fromkeys(("llama.cpp", "vLLM"), "it is compared on CPUs alone.")
    try:
        llama = find_llama_cpp(job, folder)
        found["llama.cpp"] = partial(llama, draft_tokens=None)
        found["llama.cpp with draft"] = partial(llama, draft_tokens=0)
        over = f"over {len(RPC_SERVERS)} rpc-servers"
        found[f"llama.cpp {over}"] = partial(llama, draft_tokens=None, rpc=RPC_SERVERS)
        found[f"llama.cpp with draft {over}"] = partial(llama, draft_tokens=0, rpc=RPC_SERVERS)
    except ConfigError as error:
        missing["llama.cpp"] = str(error)
    try:
        found["vLLM"] = partial(vllm, python=find_vllm())
    except ConfigError as error:
        missing["vLLM"] = str(error)
    return found, missing


def measure(
    job: Job, engines: dict[str, Engine], repeats: int
) -> tuple[dict[str, list[Run]], dict[str, str]]:
    """Every engine in every repeat, every second time in reverse; why engines fell out."""
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    failed: dict[str, str] = {}
    turns = []
    for repeat in range(repeats):
        turns += list(engines) if repeat % 2 == 0 else list(reversed(engines))
    for name in track(turns, "decoding"):
        if name not in failed:
            try:
                runs[name].append(engines[name](job))
            except PeerFailed as error:
                if name == REFERENCE:
                    raise
                failed[name] = str(error)
    return {name: ran for name, ran in runs.items() if name not in failed}, failed


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def figures(runs: dict[str, list[Run]], eos: Sequence[int]) -> list[dict[str, Any]]:
    """One row per engine. The ratio is of the same repeat's times between tokens."""
    reference = runs[REFERENCE]
    rows = []
    for name, ran in runs.items():
        equal = equal_answers(ran, reference[0], eos)
        pairs = zip(reference, ran, strict=True)
        rows.append(
            {
                "engine": name,
                "load_s": spread([run.load_s for run in ran]),
                "ttft_ms": spread([run.ttft_ms for run in ran]),
                "tbt_ms": spread([run.tbt_ms for run in ran]),
                "tokens_per_s": spread([1e3 / run.tbt_ms for run in ran]),
                "times_hugging_face": spread([own.tbt_ms / run.tbt_ms for own, run in pairs]),
                "equal_answers": sum(equal),
                "answers": len(equal),
            }
        )
    return rows


def equal_answers(ran: Sequence[Run], reference: Run, eos: Sequence[int]) -> list[bool]:
    """Whether each answer of some runs, the first of a run left out, is that of the reference."""
    expected = [_bare(answer, eos) for answer in reference.answers[1:]]
    return [
        _bare(answer, eos) == wanted
        for run in ran
        for answer, wanted in zip(run.answers[1:], expected, strict=True)
    ]


def _bare(answer: Answer, eos: Sequence[int]) -> list[int]:
    """The tokens without the end of text, which some engines return and others do not."""
    return answer.tokens[:-1] if answer.tokens[-1:] in [[end] for end in eos] else answer.tokens


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """A row as it is printed."""
    spreads = {name: with_range(value) for name, value in row.items() if isinstance(value, dict)}
    equal = f"{row['equal_answers']} of {row['answers']}"
    return {"engine": row["engine"], **spreads, "equal": equal}


def conditions(job: Job, load_before: float, began: float) -> dict[str, Any]:
    """Of a comparison that began at this `time.perf_counter`, behind this load average: what is
    stored beside its rows."""
    return {
        "target": json.loads((job.target / "config.json").read_text()),
        "cores": job.cores,
        "load_average_before": load_before,
        "duration_s": time.perf_counter() - began,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def add_job(parser: argparse.ArgumentParser, *, prompts: int, tokens: int) -> None:
    """The options of `job_of`, and how often each engine does the job."""
    parser.add_argument("--target", type=Path, default=resource_dir("demo") / "target")
    parser.add_argument("--draft", type=Path, default=resource_dir("demo") / "draft")
    parser.add_argument("--prompts", type=int, default=prompts, help=f"({prompts})")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="cut prompts to (64)")
    parser.add_argument("--tokens", type=int, default=tokens, help=f"of each answer ({tokens})")
    parser.add_argument("--repeats", type=int, default=3, help="(3)")
    parser.add_argument("--only", nargs="+", default=[""], help="engines with this in their names")
    parser.add_argument("--dtype", choices=list(GGUF_TYPES), default="float32")
    parser.add_argument("--cores", help="such as 0,1 (all that this process may use)")


def parse_job(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of a parser with `add_job`; this process keeps to their cores from now on, and
    ends in order if it is told to."""
    options = experiment.parse(parser, prompts=1, tokens=8, repeats=1)
    if options.prompts < 1 or options.tokens < 2 or options.repeats < 1:
        parser.error("at least 1 prompt, 2 tokens and 1 repeat are needed.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ended by a signal."))
    if options.cores:
        # What this process starts inherits it.
        os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
    return options


def job_of(options: argparse.Namespace, device: str = CPU) -> tuple[Job, list[int]]:
    """What every engine does, and the tokens that end a text."""
    samples = dataset.load(run_options.DATA, options.prompts + 1)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    job = Job(
        target=options.target,
        draft=options.draft,
        samples=samples,
        prompts=[tokenizer.encode(s.prompt)[: options.prompt_tokens] for s in samples],
        prompt_tokens=options.prompt_tokens,
        tokens=options.tokens,
        cores=sorted(os.sched_getaffinity(0)),
        dtype=options.dtype,
        device=device,
    )
    return job, [tokenizer.eos_token_id]


def main() -> None:
    parser = experiment.parser(__doc__)
    add_job(parser, prompts=3, tokens=32)
    parser.add_argument("--stages", type=int, nargs="+", default=[2], help="of pipespec (2)")
    parser.add_argument("--device", default=CPU, help="such as cuda, for all processes (cpu)")
    parser.add_argument("--also", nargs="+", default=[], help="settings of further rows")
    options = parse_job(parser)
    job, eos = job_of(options, options.device)
    load_before = os.getloadavg()[0]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        engines, missing = find(job, options.stages, options.also, Path(folder))
        chosen = {
            name: engine
            for name, engine in engines.items()
            if name == REFERENCE or any(part in name for part in options.only)
        }
        runs, failed = measure(job, chosen, options.repeats)
    rows = figures(runs, eos)
    machine = f"{len(job.cores)} cores"
    if job.device != CPU:
        machine = torch.cuda.get_device_name(job.device)
    title = (
        f"Measured, {machine}, {job.dtype}: {options.prompts} prompts × "
        f"{options.tokens} tokens, {options.repeats} repeats; median (min..max)"
    )
    experiment.show(title, [cells(row) for row in rows])
    for name, why in (missing | failed).items():
        print(f"{name}: {why}")
    if options.json:
        more = conditions(job, load_before, began) | {"missing": missing, "failed": failed}
        experiment.store(options.json, {"title": title, "emulated": False, "rows": rows, **more})


if __name__ == "__main__":
    main()
