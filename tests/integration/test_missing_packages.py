"""What a machine or a setting lacks is one sentence, before any rank starts."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipespec.client.model_info import ModelInfo
from pipespec.cluster.decide import decide
from pipespec.config.compose import compose
from pipespec.errors import ConfigError

ROOT = Path(__file__).parents[2]
GENERATE = ("generate", "--prompt", "Once", "cluster.stages=1", "decode.max_new_tokens=2")
# Seconds of computing: those on the clock depend on what else runs. An AMD EPYC takes up to 2.6,
# and importing torch and Transformers 8.
LIMIT_S = 3.5
PATIENCE_S = 120


def said(*arguments: str) -> str:
    """The only line that a command prints, which fails at once."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "pipespec", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PATIENCE_S,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < LIMIT_S
    return done.stderr.removeprefix("pipespec: ")


def test_prompt_file_far_beyond_the_context_is_refused_at_once(tmp_path):
    file = tmp_path / "prompt"
    file.write_text("Once upon a time there was a king. " * 180_000)
    # A model that was used on this machine before.
    ModelInfo.of(decide(compose(["cluster.devices=[cpu]"])))
    found = said("generate", "--prompt-file", str(file), "cluster.stages=1")
    assert found.startswith("The prompt has more than ")
    assert "tokens, but the context holds 2048 and needs room for an answer" in found


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_attention_for_gpus_is_refused_on_a_cpu(backend):
    settings = ["cluster.devices=[cpu]", f"model.attention={backend}"]
    sentence = f"model.attention is {backend}, but rank 1 cannot use it: it needs a GPU"
    with pytest.raises(ConfigError, match=sentence):
        decide(compose(settings))
    assert decide(compose(["cluster.devices=[cpu]", "model.attention=auto"])).devices[1] == "cpu"


@pytest.mark.parametrize(
    "module",
    [
        *("pipespec.errors", "hydra.core", "pipespec.client.answers"),
        *(
            pytest.param(module, marks=pytest.mark.long)
            for module in (
                *("pipespec.console.arguments", "pipespec.cli.main"),
                *("numpy", "pipespec.cluster.deployment.deployment"),
            )
        ),
    ],
)
def test_ctrl_c_while_a_command_imports_is_no_traceback(module):
    """Sent at the moment when a certain module has been imported, which Python then tells."""
    line = [sys.executable, "-X", "importtime", "-m", "pipespec", *GENERATE]
    with subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        for told in process.stderr:
            if told.rpartition("|")[2].strip() == module:
                process.send_signal(signal.SIGINT)
                break
        else:
            pytest.fail(f"{module} was never imported")
        rest = process.stderr.read()  # the last line may be cut by the end of the process
    assert "Traceback" not in rest
    assert "KeyboardInterrupt" not in rest
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT)


@pytest.mark.long
def test_torch_leaves_no_folder_in_the_temporary_one(tmp_path):
    """Also where nothing is known of the model yet, so that Transformers is asked."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch sets it, in this process too
    subprocess.run(
        [sys.executable, "-m", "pipespec", *GENERATE],
        check=True,
        capture_output=True,
        cwd=ROOT,
        env=environment,
        timeout=PATIENCE_S,
    )
    assert list(temporary.iterdir()) == []
