"""What the processes of a cluster may not import, as it takes memory and time."""

import subprocess
import sys

import pytest

from pipespec.cluster.processes.worker_group import PRELOAD
from pipespec.cluster.session import WORKER_ENTRYPOINT
from pipespec.engine.formats.architectures import modeling_module
from pipespec.system.devices import num_cuda

pytestmark = pytest.mark.slow
COMPUTES = ["torch", "transformers", "accelerate", "sympy", "triton", "llguidance"]
CONTROLS = ["hydra", "omegaconf", "redis", "rich", "tokenizers", "numpy"]
OPTIONAL = ["torchao", "bitsandbytes", "torchvision", "onnx", "flashinfer", "llguidance"]
OF_OTHERS = ["fastapi", "asyncssh", "cryptography.hazmat", "hydra", "rich"]
WORKER = [*PRELOAD, WORKER_ENTRYPOINT.partition(":")[0], modeling_module("qwen2")]
DEMO = """
from pipespec.client.model_info import ModelInfo
from pipespec.cluster.decide import decide
from pipespec.cluster.ranks.worker import rank_grammars
from pipespec.config.compose import compose
from pipespec.engine.grammar_probe import GrammarProbe
demo = decide(compose([]))
"""


def imports(*modules: str) -> str:
    return f"import {', '.join(modules)}"


# What a process does one after the other, and what it has not imported by then.
PROGRAMS = {
    "launcher": [
        (
            imports("pipespec.cli.main", "pipespec.client.local_cluster", "pipespec.cli.up"),
            [*COMPUTES, "fastapi"],
        )
    ],
    "server": [
        (imports("pipespec.server.app", "pipespec.server.api_server"), COMPUTES),
        # Until a request has a grammar.
        (f"{DEMO}of = ModelInfo.of(demo)\nGrammarProbe(of.tokenizer, 9, of.eos)", ["llguidance"]),
    ],
    "agent": [(imports("pipespec.cluster.processes.agent"), COMPUTES + CONTROLS)],
    "TLS before Redis": [(imports("pipespec.controller.tls_proxy"), COMPUTES + CONTROLS)],
    "worker": [
        (imports(*WORKER), [*OPTIONAL, *OF_OTHERS, *([] if num_cuda() else ["triton"])]),
        # Until a request has a grammar.
        (f"{DEMO}with rank_grammars(demo, 0) as found: found._thread.shutdown()", ["llguidance"]),
    ],
    "worker of which torchao makes the weights": [
        (f"{imports('torchao', *WORKER)}\nassert torchao.quantization", ["llguidance"])
    ],
}
TELL = "\nimport sys\nprint(*(name for name in sys.modules if sys.modules[name]))\n"


@pytest.mark.parametrize("steps", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_a_process_imports_only_what_it_uses(steps: list[tuple[str, list[str]]]) -> None:
    script = "".join(f"{program}{TELL}" for program, _ in steps)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()[-len(steps) :]
    for imported, (program, forbidden) in zip(told, steps, strict=True):
        assert not set(forbidden) & set(imported.split()), program
