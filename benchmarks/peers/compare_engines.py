"""pipespec beside other engines, in real time on this machine. Nothing is emulated.

    python -m benchmarks.peers.compare_engines --target DIR --draft DIR --prompts 3 \\
        --tokens 32 --repeats 3
    python -m benchmarks.peers.compare_engines --target FILE.gguf --draft FILE.gguf \\
        --kinds code chat long --draft-tokens 4 8 --ngrams ngram-simple --busy 2

Models are folders of checkpoints or GGUF files. Hugging Face `generate` and assisted generation run
with folders; llama.cpp and vLLM on CPUs, where they are found (`docs/peers.md` says how to get
them). All engines decode the same prompts, as token ids, greedily with the same files on the same
cores, one engine at a time and all of them in every repeat; with --device cuda all processes share
a GPU. Each starts anew, loads, and decodes a first prompt that does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import track

from benchmarks.common import experiment, run_options
from benchmarks.pages.stored_results import with_range
from benchmarks.peers.python_engines import (
    Answer,
    Engine,
    Job,
    PeerFailed,
    Run,
    hugging_face,
    in_child,
)
from benchmarks.peers.server_engines import (
    GGUF_TYPES,
    LlamaCpp,
    RpcHost,
    find_llama_cpp,
    find_vllm,
    pipespec,
    vllm,
)
from pipespec.engine.checkpoint import tokenizer
from pipespec.engine.formats.gguf import is_gguf
from pipespec.engine.inspection.inspection import inspect
from pipespec.errors import ConfigError
from pipespec.extras.bench import dataset
from pipespec.extras.bench.dataset import Sample
from pipespec.system.folders import resource_dir

HUGGING_FACE, LLAMA_CPP = "Hugging Face generate", "llama.cpp"
RATIOS = {HUGGING_FACE: "times_hugging_face", LLAMA_CPP: "times_llama_cpp"}
POLICIES = ("root", "level", "best_first")
CPU = "cpu"
# Of code raw text to complete, of chats the prompt in the model's chat template; long is code of
# as many tokens as a prompt may have.
CODE, CHAT, LONG = "code", "chat", "long"
FILES = {CODE: "humaneval.jsonl", CHAT: "alpaca_seed_tasks.jsonl", LONG: "humaneval.jsonl"}
RPC_SERVERS = 2
BUSY_LOOP = "while True: pass"


def find(
    job: Job, options: argparse.Namespace, folder: Path
) -> tuple[dict[str, Engine], dict[str, str]]:
    """The engines to run, by name, and why others cannot run. The first is what the others are
    compared with."""
    files = is_gguf(job.target)
    found: dict[str, Engine] = {}
    missing: dict[str, str] = {}
    if files:
        missing["Hugging Face"] = "it does not compute with the blocks of GGUF files."
    else:
        found[HUGGING_FACE] = partial(in_child, hugging_face, assisted=False)
        found["Hugging Face assisted"] = partial(in_child, hugging_face, assisted=True)
    if job.device != CPU:
        missing |= dict.fromkeys((LLAMA_CPP, "vLLM"), "it is compared on CPUs alone.")
    else:
        try:
            found |= of_llama_cpp(find_llama_cpp(job, folder), options)
        except ConfigError as error:
            missing[LLAMA_CPP] = str(error)
        try:
            if files:
                raise ConfigError("it is compared with checkpoints alone.")
            found["vLLM"] = partial(vllm, python=find_vllm())
        except ConfigError as error:
            missing["vLLM"] = str(error)
    for count in options.stages:
        for settings in (*(f"policy={policy}" for policy in POLICIES), *options.also):
            name = settings.removeprefix("policy=") if settings.count("=") == 1 else settings
            places = (f"cluster.stages={count}", f"cluster.devices=[{job.device}]")
            found[f"pipespec {name}, {count} stage{'s' if count > 1 else ''}"] = partial(
                pipespec, settings=(*places, *settings.split())
            )
    return found, missing


def of_llama_cpp(llama: LlamaCpp, options: argparse.Namespace) -> dict[str, Engine]:
    """llama.cpp without and with its kinds of speculation, alone and over rpc-servers."""
    ways: dict[str, dict[str, Any]] = {"": {}}
    if llama.draft is not None:
        ways |= {" with draft": {"draft_tokens": 0}}
        ways |= {f" with draft of {most}": {"draft_tokens": most} for most in options.draft_tokens}
    ways |= {f" with {kind}": {"ngrams": kind} for kind in options.ngrams}
    found: dict[str, Engine] = {}
    for way, arguments in ways.items():
        found[LLAMA_CPP + way] = partial(llama, **arguments)
    for way, arguments in ways.items():
        over = f"{LLAMA_CPP}{way} over {RPC_SERVERS} rpc-servers"
        found[over] = partial(llama, **arguments, rpc=(RpcHost(),) * RPC_SERVERS)
    return found


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
                if name == next(iter(engines)):
                    raise
                failed[name] = str(error)
    return {name: ran for name, ran in runs.items() if name not in failed}, failed


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def figures(job: Job, runs: dict[str, list[Run]], eos: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each engine and kind of prompt. The ratio is of the same repeat's times between
    tokens, to those of the first engine."""
    kinds = [sample.benchmark for sample in job.samples]
    ratio = RATIOS[next(iter(runs))]
    rows = []
    for kind in dict.fromkeys(kinds[1:]):
        places = [at for at, each in enumerate(kinds) if at and each == kind]
        length = statistics.fmean(len(job.prompts[at]) for at in places)
        of_kind = {name: [run.of(places) for run in ran] for name, ran in runs.items()}
        reference = next(iter(of_kind.values()))
        for name, ran in of_kind.items():
            equal = equal_answers(ran, reference[0], eos)
            pairs = zip(reference, ran, strict=True)
            memory = [run.memory_mib for run in ran if run.memory_mib is not None]
            rows.append(
                {
                    "kind": kind,
                    "engine": name,
                    "load_s": spread([run.load_s for run in ran]),
                    "ttft_ms": spread([run.ttft_ms for run in ran]),
                    "prompt_tokens_per_s": spread([1e3 * length / run.ttft_ms for run in ran]),
                    "tbt_ms": spread([run.tbt_ms for run in ran]),
                    "tokens_per_s": spread([1e3 / run.tbt_ms for run in ran]),
                    ratio: spread([own.tbt_ms / run.tbt_ms for own, run in pairs]),
                    "memory_mib": spread(memory) if memory else None,
                    "equal_answers": sum(equal),
                    "answers": len(equal),
                }
            )
    return rows


def equal_answers(ran: Sequence[Run], reference: Run, eos: Sequence[int]) -> list[bool]:
    """Whether each answer of some runs, the first of a run left out, is that of the reference to
    the same prompt; runs may have fewer prompts."""
    return [
        _bare(answer, eos) == _bare(wanted, eos)
        for run in ran
        for answer, wanted in zip(run.answers[1:], reference.answers[1:], strict=False)
    ]


def _bare(answer: Answer, eos: Sequence[int]) -> list[int]:
    """The tokens without the end of text, which some engines return and others do not."""
    return answer.tokens[:-1] if answer.tokens[-1:] in [[end] for end in eos] else answer.tokens


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """A row as it is printed."""
    spreads = {name: with_range(value) for name, value in row.items() if isinstance(value, dict)}
    equal = f"{row['equal_answers']} of {row['answers']}"
    return {"kind": row["kind"], "engine": row["engine"], **spreads, "equal": equal}


def conditions(job: Job, load_before: float, began: float) -> dict[str, Any]:
    """Of a comparison that began at this `time.perf_counter`, behind this load average: what is
    stored beside its rows."""
    return {
        "target": job.target.name
        if is_gguf(job.target)
        else json.loads((job.target / "config.json").read_text()),
        "cores": job.cores,
        "load_average_before": load_before,
        "duration_s": time.perf_counter() - began,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def add_job(parser: argparse.ArgumentParser, *, prompts: int, tokens: int) -> None:
    """The options of `job_of`, and how often each engine does the job."""
    parser.add_argument("--target", type=Path, default=resource_dir("demo") / "target")
    parser.add_argument("--draft", type=Path, help="(the demo's; of a GGUF file none)")
    parser.add_argument("--prompts", type=int, default=prompts, help=f"({prompts})")
    parser.add_argument("--prompt-tokens", type=int, help="cut prompts to (64, of kinds 512)")
    parser.add_argument("--tokens", type=int, default=tokens, help=f"of each answer ({tokens})")
    parser.add_argument("--repeats", type=int, default=3, help="(3)")
    parser.add_argument("--only", nargs="+", default=[""], help="engines with this in their names")
    parser.add_argument(
        "--dtype", choices=list(GGUF_TYPES), help="(float32, of GGUF files as each engine has it)"
    )
    parser.add_argument("--cores", help="such as 0,1 (all that this process may use)")


def parse_job(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of a parser with `add_job`; this process keeps to their cores from now on, and
    ends in order if it is told to."""
    options = experiment.parse(parser, prompts=1, tokens=8, repeats=1)
    if options.prompts < 1 or options.tokens < 2 or options.repeats < 1:
        parser.error("at least 1 prompt, 2 tokens and 1 repeat are needed.")
    if not is_gguf(options.target):
        options.dtype = options.dtype or "float32"
        options.draft = options.draft or resource_dir("demo") / "draft"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ended by a signal."))
    if options.cores:
        # What this process starts inherits it.
        os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
    return options


def job_of(
    options: argparse.Namespace, device: str = CPU, kinds: Sequence[str] = ()
) -> tuple[Job, list[int]]:
    """What every engine does, and the tokens that end a text. Without kinds prompts are of all
    data sets, and one kind."""
    encoder = tokenizer.load(options.target)
    if not kinds:
        chosen = dataset.load(run_options.DATA, options.prompts + 1)
        samples = [replace(sample, benchmark="all") for sample in chosen]
    else:
        samples = [*prompts_of(kinds[0], 1, encoder, skip=options.prompts)]
        for kind in kinds:
            samples += prompts_of(kind, options.prompts, encoder)
    most = options.prompt_tokens or (512 if kinds else 64)
    prompts = [encoder.encode(sample.prompt)[:most] for sample in samples]
    job = Job(
        target=options.target,
        draft=options.draft,
        samples=samples,
        prompts=prompts,
        prompt_tokens=max(map(len, prompts)),
        tokens=options.tokens,
        cores=sorted(os.sched_getaffinity(0)),
        dtype=options.dtype,
        device=device,
    )
    return job, list(inspect(options.target).eos)


def prompts_of(
    kind: str, count: int, encoder: tokenizer.BackendTokenizer, skip: int = 0
) -> Iterator[Sample]:
    """So many prompts of a kind, behind the first ones. Each of a kind and number is another."""
    every = dataset.load(run_options.DATA / FILES[kind])
    for number in range(skip, skip + count):
        sample = every[number * len(every) // (skip + count + 1)]
        text = run_options.as_chat(sample, encoder).prompt if kind == CHAT else sample.prompt
        if kind == LONG:
            text = "\n\n".join(each.prompt for each in every[number:])
        yield Sample(f"{kind} {number}", kind, text)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that compute, until the block ends."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    parser = experiment.parser(__doc__)
    add_job(parser, prompts=3, tokens=32)
    parser.add_argument("--stages", type=int, nargs="+", default=[2], help="of pipespec (2)")
    parser.add_argument("--device", default=CPU, help="such as cuda, for all processes (cpu)")
    parser.add_argument(
        "--kinds", nargs="+", choices=list(FILES), default=[], help="of prompts, each by itself"
    )
    parser.add_argument(
        "--also", nargs="+", default=[], help="further rows of pipespec: settings, blanks between"
    )
    parser.add_argument(
        "--draft-tokens", type=int, nargs="+", default=[], help="further drafts of llama.cpp"
    )
    parser.add_argument("--ngrams", nargs="+", default=[], help="--spec-type of llama-server")
    parser.add_argument("--busy", type=int, default=0, help="endless loops beside them (0)")
    options = parse_job(parser)
    job, eos = job_of(options, options.device, options.kinds)
    load_before = os.getloadavg()[0]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, busy_loops(options.busy):
        engines, missing = find(job, options, Path(folder))
        if (first := next(iter(engines))) not in RATIOS:
            parser.error(f"llama.cpp is needed beside a GGUF file: {missing[LLAMA_CPP]}")
        chosen = {
            name: engine
            for name, engine in engines.items()
            if name == first or any(part in name for part in options.only)
        }
        runs, failed = measure(job, chosen, options.repeats)
    rows = figures(job, runs, eos)
    machine = f"{len(job.cores)} cores"
    if job.device != CPU:
        machine = torch.cuda.get_device_name(job.device)
    beside = f", beside {options.busy} busy loops" if options.busy else ""
    title = (
        f"Measured, {machine}{beside}, {job.dtype or job.target.name}: {options.prompts} prompts × "
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
