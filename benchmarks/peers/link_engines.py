"""Engines that are spread over the hosts of `benchmarks.peers.delayed_links`.

The first host has the client, the draft and what starts the rest; each other host has an equal part
of the target's layers. pipespec runs as its commands do it by hand: `pipespec up` on the first
host, `launch/torchrun.sh` on the others, and `pipespec bench` beside `up`. llama.cpp has
llama-server on the first host, and an rpc-server on each of the others. vLLM's pipeline has a stage
on each of the others, and its server beside the first stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.common.experiment import ROOT
from benchmarks.peers.python_engines import Job, Run
from benchmarks.peers.server_engines import (
    LOOPBACK,
    Command,
    LlamaCpp,
    RpcHost,
    Server,
    ask_vllm,
    free_port,
    healthy,
    running,
    started,
    vllm_command,
    vllm_environment,
)
from benchmarks.peers.server_engines import pipespec as of_pipespec
from tools.rig import relay
from tools.rig.testbed import Testbed

# An engine over the hosts of a bed.
LinkedEngine = Callable[[Testbed, Job], Run]

TORCHRUN = ROOT / "launch" / "torchrun.sh"
# vLLM takes processes that see the same shared memory for those of one host, and would pass the
# links by.
OWN_SHARED_MEMORY = ("sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")
# Where vLLM's processes meet.
MASTER_PORT = 29500


def llama_cpp(
    bed: Testbed, job: Job, engine: LlamaCpp, draft_tokens: int | None, ngrams: str | None
) -> Run:
    """llama.cpp over rpc-servers, as `LlamaCpp` runs it."""
    servers = [RpcHost(bed.address(host), bed.prefix(host)) for host in bed.hosts[1:]]
    with relay.entered(bed.namespaces[bed.hosts[0]]):
        return engine(job, draft_tokens, ngrams, rpc=servers)


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
        first = stack.enter_context(started(*on(0, "--host", LOOPBACK, "--port", str(port))))
        for rank in range(1, len(hosts)):
            other, env = on(rank, "--headless")
            stack.enter_context(running(other, lambda: True, env))
        first.await_ready(partial(healthy, port))
        load_s = time.perf_counter() - began
        return Run(load_s, [ask_vllm(port, prompt, job.tokens) for prompt in job.prompts])


def pipespec(bed: Testbed, job: Job, settings: Sequence[str]) -> Run:
    """pipespec with the head on the first host and a stage on each of the others.

    The hosts share the cores of this machine, so a thread of OpenMP that has nothing to do must
    sleep: one that spins takes what another host computes with. llama.cpp was slower that way.
    """
    first, *others = bed.hosts
    hosts_file = str(bed.hosts_file())
    asleep = {"OMP_WAIT_POLICY": "passive"}

    def join(stack: ExitStack, up: Server, invitation: Path, env: Mapping[str, str]) -> None:
        up.await_ready(lambda: invitation.exists() and invitation.stat().st_size > 0)
        for host in others:
            by_hand: Command = [*bed.prefix(host), TORCHRUN, hosts_file, host, invitation]
            stack.enter_context(running(by_hand, lambda: True, env))

    with relay.entered(bed.namespaces[first]):
        return of_pipespec(job, [f"cluster={hosts_file}", *settings], join, asleep)


def engines(
    llama: LlamaCpp | None,
    vllm_python: str | None,
    draft_tokens: Sequence[int],
    ngrams: Sequence[str],
    settings: Sequence[str],
) -> dict[str, LinkedEngine]:
    """The engines to race, by name; without those that are None.

    `vllm_python`: the Python that has vLLM. `draft_tokens`: of llama.cpp's drafts at most; 0: its
    default. `ngrams`: kinds of its n-gram speculation. `settings`: of pipespec; the plain pipeline
    (`policy=root`) has those of the cluster and the transport alone.
    """
    plain = [text for text in settings if text.startswith(("cluster.", "transport."))]
    found: dict[str, LinkedEngine] = {
        "pipespec root": partial(pipespec, settings=[*plain, "policy=root"]),
        "pipespec level": partial(pipespec, settings=[*settings, "policy=level"]),
        "pipespec": partial(pipespec, settings=settings),
    }
    if llama is not None:
        of_llama = partial(llama_cpp, engine=llama)
        found["llama.cpp"] = partial(of_llama, draft_tokens=None, ngrams=None)
        for most in draft_tokens if llama.draft is not None else ():
            name = f"llama.cpp with draft{f' of {most}' if most else ''}"
            found[name] = partial(of_llama, draft_tokens=most, ngrams=None)
        for kind in ngrams:
            found[f"llama.cpp with {kind}"] = partial(of_llama, draft_tokens=None, ngrams=kind)
    if vllm_python is not None:
        found["vLLM"] = partial(vllm, python=vllm_python)
    return found
