"""Engines that are spread over the hosts of `benchmarks.peers.delayed_links`.

The first host has the client, the draft and what starts the rest; each other host has an equal part
of the target's layers. pipespec runs as its commands do it by hand: `pipespec up` on the first
host, `launch/torchrun.sh` on the others, and `pipespec bench` beside `up`. llama.cpp has
llama-server on the first host, and an rpc-server on each of the others. vLLM's pipeline has a stage
on each of the others, and its server beside the first stage.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.experiment import ROOT
from benchmarks.peers.python_engines import Answer, Job, PeerFailed, Run
from benchmarks.peers.server_engines import (
    ANSWER_S,
    LAST_WORDS,
    LOOPBACK,
    Command,
    LlamaCpp,
    RpcHost,
    ask_vllm,
    free_port,
    healthy,
    running,
    started,
    vllm_command,
    vllm_environment,
)
from pipespec.client.registry import ENTRY, INVITATION
from tools.rig import relay
from tools.rig.testbed import Testbed

# An engine over the hosts of a bed.
LinkedEngine = Callable[[Testbed, Job], Run]

NAME = "links"
PIPESPEC = (sys.executable, "-m", "pipespec")
TORCHRUN = ROOT / "launch" / "torchrun.sh"
# vLLM takes processes that see the same shared memory for those of one host, and would pass the
# links by.
OWN_SHARED_MEMORY = ("sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")
# Where vLLM's processes meet.
MASTER_PORT = 29500


def llama_cpp(bed: Testbed, job: Job, engine: LlamaCpp, draft_tokens: int | None) -> Run:
    """llama.cpp over rpc-servers, as `LlamaCpp` runs it."""
    servers = [RpcHost(bed.address(host), bed.prefix(host)) for host in bed.hosts[1:]]
    with relay.entered(bed.namespaces[bed.hosts[0]]):
        return engine(job, draft_tokens, servers)


def vllm(bed: Testbed, job: Job, python: str) -> Run:
    """vLLM's pipeline, a stage on every host but the first, without a draft.

    Its server computes a stage itself, so the client asks it on the host of the first stage.
    """
    hosts = bed.hosts[1:]
    command = [*vllm_command(job, python), "--distributed-executor-backend", "mp"]
    command += ["--pipeline-parallel-size", str(len(hosts)), "--nnodes", str(len(hosts))]
    command += ["--master-addr", bed.address(hosts[0]), "--master-port", str(MASTER_PORT)]

    def on(rank: int, *more: str) -> tuple[Command, dict[str, str]]:
        """The command on the host of a stage, and its environment. Idle threads sleep, as those
        of pipespec do."""
        env = {"VLLM_HOST_IP": bed.address(hosts[rank]), "GLOO_SOCKET_IFNAME": relay.DEVICE}
        env |= {"OMP_WAIT_POLICY": "passive"}
        line = [*bed.prefix(hosts[rank]), *OWN_SHARED_MEMORY, *command, "--node-rank", str(rank)]
        return [*line, *more], vllm_environment(job) | env

    with relay.entered(bed.namespaces[hosts[0]]), ExitStack() as stack:
        port = free_port()
        began = time.perf_counter()
        await_ready = stack.enter_context(started(*on(0, "--host", LOOPBACK, "--port", str(port))))
        for rank in range(1, len(hosts)):
            other, env = on(rank, "--headless")
            stack.enter_context(running(other, lambda: True, env))
        await_ready(partial(healthy, port))
        load_s = time.perf_counter() - began
        return Run(load_s, [ask_vllm(port, prompt, job.tokens) for prompt in job.prompts])


def pipespec(bed: Testbed, job: Job, settings: Sequence[str]) -> Run:
    """pipespec with the head on the first host and a stage on each of the others.

    The hosts share the cores of this machine, so a thread of OpenMP that has nothing to do must
    sleep: one that spins takes what another host computes with. llama.cpp was slower that way.
    """
    first, *others = bed.hosts
    with (
        tempfile.TemporaryDirectory() as name,
        relay.entered(bed.namespaces[first]),
        ExitStack() as stack,
    ):
        folder = Path(name)
        env = {
            "HF_HUB_OFFLINE": "1",
            "OMP_WAIT_POLICY": "passive",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": name,
            "XDG_STATE_HOME": name,
        }
        hosts_file = str(bed.hosts_file())
        command: Command = [*PIPESPEC, "up", "--name", NAME, f"cluster={hosts_file}"]
        command += [f"model.target={job.target.resolve()}", f"model.draft={job.draft.resolve()}"]
        command += [f"model.dtype={job.dtype}", f"model.context={job.prompt_tokens + job.tokens}"]
        files = folder / "pipespec"
        invitation = files / (NAME + INVITATION)
        began = time.perf_counter()
        await_ready = stack.enter_context(started([*command, *settings], env))
        await_ready(lambda: invitation.exists() and invitation.stat().st_size > 0)
        for host in others:
            by_hand: Command = [*bed.prefix(host), TORCHRUN, hosts_file, host, invitation]
            stack.enter_context(running(by_hand, lambda: True, env))
        await_ready((files / (NAME + ENTRY)).exists)
        load_s = time.perf_counter() - began
        requests = ask(job, folder, env)
    answers = [
        Answer(request["token_ids"], request["ttft_ms"], request["token_ms"][-1])
        for request in requests
    ]
    later = [len(answer.tokens) - 1 for answer in answers[1:]]
    rates = [request["stats"]["tokens_per_step"] for request in requests[1:]]
    steps = sum(count / rate for count, rate in zip(later, rates, strict=True))
    return Run(load_s, answers, sum(later) / steps)


def ask(job: Job, folder: Path, env: dict[str, str]) -> list[dict[str, Any]]:
    """What a running pipespec says of each prompt (`RequestResult`), by the clock of its head.
    Raises PeerFailed."""
    prompts, output = folder / "prompts.jsonl", folder / "answers.json"
    prompts.write_text("".join(json.dumps(asdict(sample)) + "\n" for sample in job.samples))
    command = [*PIPESPEC, "bench", "--on", NAME, "--json", "--output", str(output)]
    command += [f"dataset={prompts}", f"prompt_tokens={job.prompt_tokens}"]
    command += [f"decode.max_new_tokens={job.tokens}"]
    done = subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, timeout=ANSWER_S
    )
    if done.returncode:
        raise PeerFailed(f"pipespec bench failed: {done.stderr.strip()[-LAST_WORDS:]}")
    requests: list[dict[str, Any]] = json.loads(output.read_text())["requests"]
    assert [request["prompt_ids"] for request in requests] == job.prompts
    return requests


def engines(
    llama: LlamaCpp | None,
    vllm_python: str | None,
    draft_tokens: Sequence[int],
    settings: Sequence[str],
) -> dict[str, LinkedEngine]:
    """The engines to race, by name; without those that are None.

    `vllm_python`: the Python that has vLLM. `draft_tokens`: of llama.cpp's drafts at most, beside
    its default. `settings`: of pipespec; the plain pipeline (`policy=root`) has those of the
    cluster and the transport alone.
    """
    plain = [text for text in settings if text.startswith(("cluster.", "transport."))]
    found: dict[str, LinkedEngine] = {
        "pipespec root": partial(pipespec, settings=[*plain, "policy=root"]),
        "pipespec": partial(pipespec, settings=settings),
    }
    if llama is not None:
        of_llama = partial(llama_cpp, engine=llama)
        found["llama.cpp"] = partial(of_llama, draft_tokens=None)
        found["llama.cpp with draft"] = partial(of_llama, draft_tokens=0)
        for most in draft_tokens:
            found[f"llama.cpp with draft of {most}"] = partial(of_llama, draft_tokens=most)
    if vllm_python is not None:
        found["vLLM"] = partial(vllm, python=vllm_python)
    return found
