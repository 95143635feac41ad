"""Real weights, for tests marked `real_models`, and llama.cpp as their oracle."""

import json
import math
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The folder with the files below, each as its publisher made it.
FOLDER = "PIPESPEC_TEST_MODELS"
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
QWEN_DRAFT = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
QWEN = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"

# The most probable tokens at a place that llama.cpp reports.
REPORTED = 16

# What was decoded at a place: the token, and the log-probabilities of the most probable ones.
Place = tuple[int, Mapping[int, float]]


def path_of(name: str) -> Path:
    """Where a file of the folder is."""
    return Path(os.environ[FOLDER], name)


def lacking(names: Sequence[str]) -> str | None:
    """Why a test that needs these files is skipped; None: it runs."""
    if not (folder := os.environ.get(FOLDER)):
        return f"real_models: set {FOLDER} to a folder with {', '.join(names)}"
    absent = [name for name in names if not Path(folder, name).is_file()]
    return f"real_models: {', '.join(absent)} is not in {folder}" if absent else None


class LlamaCpp:
    """llama.cpp's server in this process: one request at a time, on one thread."""

    def __init__(self, address: str):
        self._address = address

    def post(self, route: str, **body: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            self._address + route, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as reply:
            found: dict[str, Any] = json.loads(reply.read())
        return found

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, in which special tokens are read as such."""
        return self.post("/tokenize", content=text, add_special=True)["tokens"]

    def render(self, prompt: str) -> str:
        """A prompt in the model's chat template."""
        messages = [{"role": "user", "content": prompt}]
        return self.post("/apply-template", messages=messages)["prompt"]

    def decode(self, prompt: Sequence[int], count: int) -> list[Place]:
        """So many tokens after a prompt, or fewer if the text ends; decoded greedily."""
        reply = self.post(
            "/completion",
            prompt=list(prompt),
            n_predict=count,
            temperature=0,
            n_probs=REPORTED,
            return_tokens=True,
        )
        found: list[Place] = []
        reported = reply["completion_probabilities"][::-1]
        for token in reply["tokens"][:count]:
            # It says nothing of tokens that end inside a character.
            said = reported.pop() if reported and reported[-1]["id"] == token else None
            top = said["top_logprobs"] if said else []
            found.append((token, {each["id"]: each["logprob"] for each in top}))
        return found


@contextmanager
def llama_cpp(file: Path, context: int) -> Iterator[LlamaCpp]:
    """A server for a GGUF file, which ends with the block: a process of its own, as the ggml in
    it and pipespec's would mix."""
    command = [sys.executable, "-m", __name__, str(file), str(context)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin and process.stdout
        try:
            address = process.stdout.readline().strip()
            assert address, "llama.cpp ended as it started"
            yield LlamaCpp(address)
        finally:
            process.stdin.close()  # it ends


def serve(file: str, context: str) -> None:
    """A server that prints its address, and ends with its input."""
    from xllamacpp import CommonParams, Server

    params = CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel, params.n_gpu_layers = int(context), 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.warmup, params.ui, params.verbosity = False, False, -1
    server = Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


def differences(
    decode: Callable[[Sequence[int], int], Sequence[Place]],
    prompt: Sequence[int],
    answer: Sequence[int],
) -> list[float]:
    """How much less probable, in log-probability, than the token that `decode` takes there the
    token of an answer is, wherever they differ; 0 where `decode` reports none. Behind such a
    place `decode` goes on from the answer."""
    found, at = [], 0
    while at < len(answer):
        places = decode([*prompt, *answer[:at]], len(answer) - at)
        assert places, f"the text ends at {at}, before its answer"
        for token, logprobs in places:
            if token != answer[at]:
                own = logprobs.get(answer[at], -math.inf)
                found.append(logprobs[token] - own if logprobs else 0.0)
            at += 1
            if token != answer[at - 1]:
                break
    return found


if __name__ == "__main__":
    serve(*sys.argv[1:])
