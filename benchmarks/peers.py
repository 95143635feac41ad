"""pipespec beside other engines, in real time on this machine's CPU. Nothing is emulated.

    python -m benchmarks.peers --target DIR --draft DIR --prompts 3 --tokens 32 --repeats 3

Hugging Face `generate` and assisted generation always run; llama.cpp and vLLM where they are
found (`docs/peers.md` says how to get them). All engines decode the same prompts greedily with
the same checkpoints on the same cores, one engine at a time and all of them in every repeat.
Each starts anew, loads, and decodes a first prompt that does not count.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from benchmarks.report import ROOT, store
from pipespec.client import dataset
from pipespec.client.bench import bench
from pipespec.client.dataset import Sample
from pipespec.config.compose import compose
from pipespec.errors import ConfigError, PipespecError
from pipespec.system.resources import resource_dir

REFERENCE = "Hugging Face generate"
POLICIES = ("root", "level", "best_first")
RPC_SERVERS = 2
LOOPBACK = "127.0.0.1"
# A server may compile its kernels on its first start.
START_S = 900
ANSWER_S = 900
POLL_S = 0.2
# What a failed engine's log may add to a message, in characters.
LAST_WORDS = 400


class PeerFailed(PipespecError):
    """An engine ended, or said nothing sensible."""


@dataclass(frozen=True)
class Job:
    """What every engine does. The first prompt is for warming up; `prompts` are token ids."""

    target: Path
    draft: Path
    samples: list[Sample]
    prompts: list[list[int]]
    prompt_tokens: int
    tokens: int
    cores: list[int]
    dtype: str


@dataclass(frozen=True)
class Answer:
    """One answer: its token ids, and the milliseconds until the first and the last of them."""

    tokens: list[int]
    first_ms: float
    last_ms: float


@dataclass(frozen=True)
class Run:
    """One engine, once: seconds until it could take a prompt, and an answer per prompt."""

    load_s: float
    answers: list[Answer]

    @property
    def ttft_ms(self) -> float:
        """The mean over the prompts that count."""
        return statistics.fmean(answer.first_ms for answer in self.answers[1:])

    @property
    def tbt_ms(self) -> float:
        """Per token after the first: tokens weigh alike."""
        counted = self.answers[1:]
        spent = sum(answer.last_ms - answer.first_ms for answer in counted)
        return spent / sum(len(answer.tokens) - 1 for answer in counted)


Engine = Callable[[Job], Run]
Command = list[str | Path]


# --- pipespec ---------------------------------------------------------------------------------


def pipespec(job: Job, overrides: Sequence[str]) -> Run:
    """The product as `pipespec bench` runs it: one process per rank."""
    config = compose(
        [
            f"model.target={job.target}",
            f"model.draft={job.draft}",
            f"model.dtype={job.dtype}",
            "cluster.devices=[cpu]",
            f"decode.max_new_tokens={job.tokens}",
            *overrides,
        ]
    )
    ready: list[float] = []
    began = time.perf_counter()
    result = bench(
        config,
        job.samples,
        prompt_tokens=job.prompt_tokens,
        on_done=lambda done, of: ready.append(time.perf_counter()),
    )
    assert [request.prompt_ids for request in result.requests] == job.prompts
    answers = [Answer(r.token_ids, r.ttft_ms, r.token_ms[-1]) for r in result.requests]
    return Run(ready[0] - began, answers)


# --- Hugging Face -----------------------------------------------------------------------------


class Clock(BaseStreamer):
    """When tokens came, in seconds; several may come at once."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.arrivals.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


def hugging_face(job: Job, assisted: bool, began: float) -> Run:
    """`generate`, with the draft as `assistant_model` if assisted. Runs in a child that was
    started at `began` of the clock that all processes share.
    """
    torch.set_num_threads(len(job.cores))
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    load = partial(AutoModelForCausalLM.from_pretrained, dtype=getattr(torch, job.dtype))
    model = load(job.target)
    assistant = load(job.draft) if assisted else None
    load_s = time.perf_counter() - began
    answers = []
    for prompt in job.prompts:
        ids = torch.tensor([prompt])
        clock = Clock()
        began = time.perf_counter()
        text = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=assistant,
            do_sample=False,
            max_new_tokens=job.tokens,
            streamer=clock,
        )
        _, first, *_, last = [*clock.arrivals, clock.arrivals[-1]]  # the prompt comes first
        ids = text[0, len(prompt) :].tolist()
        answers.append(Answer(ids, (first - began) * 1e3, (last - began) * 1e3))
    return Run(load_s, answers)


def in_child(function: Callable[..., Run], job: Job, **options: Any) -> Run:
    """`function` in a fresh process, which never outlives the call. Raises PeerFailed."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    call = partial(function, job, began=time.perf_counter(), **options)
    child = context.Process(target=_send, args=(sender, call), daemon=True)
    child.start()
    sender.close()
    try:
        run: Run = receiver.recv()
        return run
    except EOFError as error:
        raise PeerFailed(f"{function.__name__} ended without an answer; see above.") from error
    finally:
        child.kill()
        child.join()


def _send(sender: Connection, call: Callable[[], Run]) -> None:
    sender.send(call())


# --- servers ----------------------------------------------------------------------------------


@contextmanager
def running(command: Command, ready: Callable[[], bool], env: Mapping[str, str]) -> Iterator[None]:
    """A server that is up; it and its children are gone afterwards. Raises PeerFailed."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | env,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + START_S
            while not ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    said = log.read().decode(errors="replace").strip()[-LAST_WORDS:]
                    raise PeerFailed(f"{command[0]} did not start: {said}")
                time.sleep(POLL_S)
            yield
        finally:
            # The group outlives its leader where a child still runs.
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                    process.wait(timeout=10)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/health", timeout=ANSWER_S) as reply:
            return bool(reply.status == 200)
    except OSError:  # it is not there yet, or answers that it still loads
        return False


def post(port: int, path: str, body: Mapping[str, Any]) -> Iterator[bytes]:
    """The lines of the answer as they come. Raises PeerFailed."""
    request = urllib.request.Request(
        f"http://{LOOPBACK}:{port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            yield from reply
    except urllib.error.HTTPError as error:
        raise PeerFailed(f"The server refused a prompt: {error.read().decode()}") from error
    except OSError as error:
        raise PeerFailed(f"The server did not answer a prompt: {error}.") from error


# --- llama.cpp --------------------------------------------------------------------------------

# Prompts are token ids, so the tokenizer's way of splitting text, by which the converter knows
# its models and refuses others, does not matter.
CONVERT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import convert_hf_to_gguf
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
convert_hf_to_gguf.main()
"""
GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class LlamaCpp:
    """Where llama.cpp's programs are, and both models in its format."""

    server: Path
    rpc_server: Path
    target: Path
    draft: Path

    def __call__(self, job: Job, speculate: bool, rpc: bool) -> Run:
        """llama-server, by its own clock: its stream leaves out tokens that end inside a
        character. With `rpc`, its layers lie on two rpc-servers, of which one computes at a
        time, so each may use all cores.
        """
        threads, kind = str(len(job.cores)), GGUF_TYPES[job.dtype]
        command: Command = [self.server, "-m", self.target, "-t", threads, "-np", "1"]
        command += ["-c", str(job.prompt_tokens + job.tokens), "-ctk", kind, "-ctv", kind]
        if speculate:
            command += ["-md", self.draft, "--spec-type", "draft-simple", "-td", threads]
        began = time.perf_counter()
        with ExitStack() as stack:
            if rpc:
                ports = [free_port() for _ in range(RPC_SERVERS)]
                for port in ports:
                    worker: Command = [
                        self.rpc_server,
                        "-H",
                        LOOPBACK,
                        "-p",
                        str(port),
                        "-t",
                        threads,
                    ]
                    stack.enter_context(running(worker, partial(listens, port), {}))
                places = ",".join(f"{LOOPBACK}:{port}" for port in ports)
                command += ["--rpc", places, "-ngl", "999"]
            port = free_port()
            command += ["--host", LOOPBACK, "--port", str(port)]
            stack.enter_context(running(command, partial(healthy, port), {}))
            load_s = time.perf_counter() - began
            return Run(load_s, [self.ask(port, prompt, job.tokens) for prompt in job.prompts])

    def ask(self, port: int, prompt: list[int], tokens: int) -> Answer:
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "return_tokens": True}
        reply = json.loads(b"".join(post(port, "/completion", body | {"cache_prompt": False})))
        first_ms = reply["timings"]["prompt_ms"]
        return Answer(reply["tokens"], first_ms, first_ms + reply["timings"]["predicted_ms"])


def find_llama_cpp(job: Job, folder: Path) -> LlamaCpp:
    """Find llama.cpp and convert both models into `folder`. Raises ConfigError."""
    source = Path(os.environ.get("LLAMA_CPP_DIR", ""))
    path = os.pathsep.join([str(source / "build/bin"), os.environ.get("PATH", "")])
    server = shutil.which("llama-server", path=path)
    rpc = shutil.which("ggml-rpc-server", path=path) or shutil.which("rpc-server", path=path)
    converter = source / "convert_hf_to_gguf.py"
    if not server or not rpc or not converter.is_file():
        raise ConfigError("not found; set LLAMA_CPP_DIR to its source folder, built with RPC.")
    models = {}
    for name, model in (("target", job.target), ("draft", job.draft)):
        models[name] = folder / f"{name}.gguf"
        python = os.environ.get("LLAMA_CPP_PYTHON", sys.executable)
        command: Command = [python, "-c", CONVERT, source.resolve(), model.resolve()]
        command += ["--outfile", models[name], "--outtype", GGUF_TYPES[job.dtype]]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            why = done.stderr.strip().splitlines()[-1]
            raise ConfigError(f"found, but {model} could not be converted: {why}")
    return LlamaCpp(Path(server), Path(rpc), models["target"], models["draft"])


# --- vLLM -------------------------------------------------------------------------------------


def vllm(job: Job, python: str) -> Run:
    """vLLM's server in its own Python, by the arrivals of its stream."""
    port = free_port()
    command: Command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", job.target.resolve()]
    command += ["--served-model-name", "target", "--host", LOOPBACK, "--port", str(port)]
    command += ["--dtype", job.dtype, "--max-num-seqs", "1", "--no-enable-prefix-caching"]
    command += ["--max-model-len", str(job.prompt_tokens + job.tokens)]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, job.cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
    }
    began = time.perf_counter()
    with running(command, partial(healthy, port), env):
        load_s = time.perf_counter() - began
        return Run(load_s, [_ask_vllm(port, prompt, job.tokens) for prompt in job.prompts])


def _ask_vllm(port: int, prompt: list[int], tokens: int) -> Answer:
    body = {"model": "target", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    ids: list[int] = []
    arrivals = []
    began = time.perf_counter()
    options = {"stream": True, "return_token_ids": True}
    for line in post(port, "/v1/completions", body | options):
        if line.startswith(b"data: {"):
            (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
            ids += choice["token_ids"]
            arrivals.append(time.perf_counter())
    if not ids:
        raise PeerFailed("vLLM's stream held no token ids; it may be too old for this benchmark.")
    return Answer(ids, (arrivals[0] - began) * 1e3, (arrivals[-1] - began) * 1e3)


def find_vllm() -> str:
    """The Python that has vLLM. Raises ConfigError."""
    python = os.environ.get("VLLM_PYTHON", sys.executable)
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        found = subprocess.run([python, "-c", look], capture_output=True).returncode == 0
    except OSError:
        found = False
    if not found:
        raise ConfigError("not found; set VLLM_PYTHON to a Python that can import vllm.")
    return python


# --- all together -----------------------------------------------------------------------------


def find(job: Job, stages: Sequence[int], folder: Path) -> tuple[dict[str, Engine], dict[str, str]]:
    """The engines to run, by name, and why others cannot run."""
    found: dict[str, Engine] = {
        REFERENCE: partial(in_child, hugging_face, assisted=False),
        "Hugging Face assisted": partial(in_child, hugging_face, assisted=True),
    }
    missing: dict[str, str] = {}
    for count in stages:
        for policy in POLICIES:
            overrides = (f"cluster.stages={count}", f"feed={policy}")
            name = f"pipespec {policy}, {count} stage{'s' if count > 1 else ''}"
            found[name] = partial(pipespec, overrides=overrides)
    try:
        llama = find_llama_cpp(job, folder)
        found["llama.cpp"] = partial(llama, speculate=False, rpc=False)
        found["llama.cpp with draft"] = partial(llama, speculate=True, rpc=False)
        found[f"llama.cpp over {RPC_SERVERS} rpc-servers"] = partial(
            llama, speculate=False, rpc=True
        )
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
    expected = [_bare(answer, eos) for answer in reference[0].answers[1:]]
    rows = []
    for name, ran in runs.items():
        equal = [
            _bare(answer, eos) == wanted
            for run in ran
            for answer, wanted in zip(run.answers[1:], expected, strict=True)
        ]
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


def _bare(answer: Answer, eos: Sequence[int]) -> list[int]:
    """The tokens without the end of text, which some engines return and others do not."""
    return answer.tokens[:-1] if answer.tokens[-1:] in [[end] for end in eos] else answer.tokens


def brief(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.{max(0, 2 - int(math.log10(max(value, 1))))}f}"


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title=title)
    for heading in ("engine", "load s", "TTFT ms", "TBT ms", "tokens/s", "× HF", "equal"):
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    for row in rows:
        spreads = [value for value in row.values() if isinstance(value, dict)]
        cells = [
            f"{brief(value['median'])} ({brief(value['min'])}..{brief(value['max'])})"
            for value in spreads
        ]
        table.add_row(row["engine"], *cells, f"{row['equal_answers']} of {row['answers']}")
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=resource_dir("demo") / "target")
    parser.add_argument("--draft", type=Path, default=resource_dir("demo") / "draft")
    parser.add_argument("--stages", type=int, nargs="+", default=[2], help="of pipespec (2)")
    parser.add_argument("--prompts", type=int, default=3, help="(3)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="cut prompts to (64)")
    parser.add_argument("--tokens", type=int, default=32, help="decoded after each prompt (32)")
    parser.add_argument("--repeats", type=int, default=3, help="(3)")
    parser.add_argument("--only", nargs="+", default=[""], help="engines with this in their names")
    parser.add_argument("--dtype", choices=list(GGUF_TYPES), default="float32")
    parser.add_argument("--cores", help="such as 0,1 (all that this process may use)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.prompts < 1 or args.tokens < 2 or args.repeats < 1:
        parser.error("at least 1 prompt, 2 tokens and 1 repeat are needed.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ended by a signal."))
    if args.cores:
        # What this process starts inherits it.
        os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})
    samples = dataset.load(ROOT / "benchmarks" / "data", args.prompts + 1)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    job = Job(
        target=args.target,
        draft=args.draft,
        samples=samples,
        prompts=[tokenizer.encode(s.prompt)[: args.prompt_tokens] for s in samples],
        prompt_tokens=args.prompt_tokens,
        tokens=args.tokens,
        cores=sorted(os.sched_getaffinity(0)),
        dtype=args.dtype,
    )
    load_before = os.getloadavg()[0]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        engines, missing = find(job, args.stages, Path(folder))
        chosen = {
            name: engine
            for name, engine in engines.items()
            if name == REFERENCE or any(part in name for part in args.only)
        }
        runs, failed = measure(job, chosen, args.repeats)
    rows = figures(runs, [tokenizer.eos_token_id])
    title = (
        f"Measured, {len(job.cores)} cores, {job.dtype}: {args.prompts} prompts × {args.tokens} "
        f"tokens, {args.repeats} repeats; median (min..max)"
    )
    show(title, rows)
    for name, why in (missing | failed).items():
        print(f"{name}: {why}")
    if args.json:
        more = {
            "target": json.loads((args.target / "config.json").read_text()),
            "cores": job.cores,
            "load_average_before": load_before,
            "duration_s": time.perf_counter() - began,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "missing": missing,
            "failed": failed,
        }
        store(args.json, {"title": title, "emulated": False, "rows": rows, **more})


if __name__ == "__main__":
    main()
