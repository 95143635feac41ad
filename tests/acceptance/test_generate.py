"""`pipespec generate` as a user runs it: real processes, and nothing left when it is over."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoTokenizer

from pipespec.cli.main import main
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.redis_connection import RedisConnection
from pipespec.sampling.params import SamplingConfig
from pipespec.system.folders import resource_dir
from pipespec.system.network_interfaces import LOOPBACK
from pipespec.text import Detokenizer
from tests.helpers import models
from tests.helpers.listening import assert_private, family, watched
from tests.helpers.processes import command_line
from tools.rig import cluster

pytestmark = pytest.mark.slow
PROMPT = "Once upon a time there was a king who"
MARK = "PIPESPEC_TEST_RUN"
START_S = 120  # a loaded machine takes its time to import torch


STARTED: list[Run] = []


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Whatever happens in a test, nothing that it has started goes on."""
    yield
    for run in STARTED:
        for process in run.processes():
            process.kill()
    STARTED.clear()


class Run:
    """One `pipespec generate` in a process tree that can be found again by a mark."""

    def __init__(self, folder: Path, *arguments: str):
        self.mark = uuid.uuid4().hex
        self.folder = folder / self.mark
        self.folder.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pipespec", "generate", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {MARK: self.mark, "TMPDIR": str(self.folder), "PYTHONUNBUFFERED": "1"},
            cwd=Path(__file__).parent.parent.parent,
        )
        STARTED.append(self)

    def finish(self) -> tuple[int, str, str]:
        with watched(lambda: family(self.process.pid)) as self.seen:
            out, err = self.process.communicate(timeout=START_S)
        return self.process.returncode, out.decode(), err.decode()

    def await_text(self) -> None:
        """Wait until the first piece of text is out: every rank is at work."""
        assert self.process.stdout is not None
        assert self.process.stdout.read(1), "it ended without a word"

    def leftovers(self) -> list[str]:
        """Processes and files of this run that are still there."""
        files = [str(path) for path in self.folder.iterdir()]
        return [*files, *filter(None, map(command_line, self.processes()))]

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found


def expected(max_new_tokens: int) -> tuple[list[int], list[int], str]:
    folder = resource_dir("demo") / "target"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.encode(PROMPT)
    (tokens,) = cluster.reference(folder, [prompt], max_new_tokens)
    return prompt, tokens, tokenizer.decode(tokens, skip_special_tokens=True)


def test_generate_json_is_one_object_with_all_results(tmp_path):
    prompt, tokens, text = expected(40)
    trace = tmp_path / "trace.json"
    run = Run(
        tmp_path, "--prompt", PROMPT, "--json", "cluster.stages=3", "decode.max_new_tokens=40",
        f"trace={trace}",
    )  # fmt: skip
    code, out, err = run.finish()
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["token_ids"] == tokens
    assert answer["text"] == text
    assert answer["prompt_tokens"] == len(prompt)
    assert answer["completion_tokens"] == len(tokens)
    assert answer["finish_reason"] in ("stop", "length")
    stats = answer["stats"]
    assert set(stats["tbt_ms"]) == {"mean", "p50", "p99"}
    assert len(stats["stage_busy"]) == 3
    assert all(0 < busy < 1 for busy in stats["stage_busy"])
    for name in (
        "ttft_ms", "tokens_per_s", "steps", "tokens_per_step", "hit_rate", "rows_per_step",
        "pruned_rows", "draft_rounds_per_step", "control_ms_per_step",
    ):  # fmt: skip
        assert stats[name] >= 0, name
    assert not run.leftovers()

    events = json.loads(trace.read_text())["traceEvents"]
    spans = {(event["tid"], event["name"]) for event in events if event["ph"] == "X"}
    assert {tid for tid, _ in spans} == {0, 1, 2, 3}
    assert {
        (0, "draft"),
        (0, "wait"),
        (1, "compute"),
        (1, "prune"),
        (2, "send"),
        (3, "verify"),
    } <= spans
    assert all((rank, "control") in spans for rank in range(4))

    # A socket of gloo's for each end of three links, at the loopback, and nothing else.
    assert_private(run.seen, {LOOPBACK})
    assert len({each.port for each in run.seen if each.kind == "tcp"}) == 2 * 3


def test_generate_streams_up_to_a_stop_string_and_leaves_the_users_redis_unchanged(tmp_path):
    _, _, text = expected(40)
    stop = text[12:15]
    with EmbeddedRedis() as server:
        run = Run(
            tmp_path, "--prompt", PROMPT, "cluster.stages=2", "decode.max_new_tokens=40",
            f"decode.stop=['{stop}']", "policy=level", f"controller.url={server.url}",
        )  # fmt: skip
        code, out, err = run.finish()
        assert code == 0, err
        assert out.rstrip("\n") == text[: text.index(stop)].rstrip("\n")
        assert "ended by stop" in err
        assert not run.leftovers()
        pipe = RedisConnection(server.url)
        assert pipe.call("DBSIZE") == 0
        pipe.close()


def test_token_id_of_a_padded_vocabulary_decodes_to_nothing(tmp_path):
    """Half of the model's ids stand for no token, and one of them may have a bias in its favour;
    the head decodes them to look for stop strings."""
    folder, source = tmp_path / "padded", resource_dir("demo") / "target"
    tokenizer = AutoTokenizer.from_pretrained(source)
    models.build("llama", folder, vocab_size=2 * len(tokenizer))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    prompt, padded = tokenizer.encode(PROMPT), len(tokenizer) + 7
    deployment = cluster.make_deployment(folder, folder, "cluster.stages=1", "model.context=256")
    asked = {"prompt": tuple(prompt), "max_new_tokens": 24, "stop": ("zzz",), "eos": ()}
    drawn = [
        SamplingConfig(temperature=1, logit_bias=bias).params(fresh_seed=3)
        for bias in ([], [f"{padded}:100"])
    ]
    with EmbeddedRedis() as server:
        plain, biased = cluster.decode(
            deployment, server, [{**asked, "sampling": s} for s in drawn]
        )
    assert any(id_ >= len(tokenizer) for id_ in plain[0])
    assert biased[0] == [padded] * 24
    for ids, reason, _ in (plain, biased):
        assert reason == "length"
        text = Detokenizer(tokenizer, prompt)
        whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=True)
        assert tokenizer.decode(prompt) + text.push(ids) + text.flush() == whole


@pytest.mark.parametrize(
    "sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_interrupted_generate_leaves_no_process_or_key(tmp_path, sent):
    run = Run(tmp_path, "--prompt", PROMPT, "cluster.stages=3", "decode.max_new_tokens=1500",
              "decode.ignore_eos=true")  # fmt: skip
    run.await_text()
    run.process.send_signal(sent)
    code, _, err = run.finish()
    assert code == 128 + sent
    assert "Traceback" not in err
    assert not run.leftovers()


# --- refused before any rank starts -------------------------------------------------------------


@pytest.fixture
def refuse(capsys, monkeypatch):
    """Run the command in this process; it must end with code 2 and one sentence."""
    import pipespec.cluster.session

    def no_rank(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(pipespec.cluster.session.WorkerGroup, "start_workers", no_rank)

    def run(*arguments: str, prompt: str = PROMPT) -> str:
        capsys.readouterr()  # what building a model has printed
        code = main(["generate", "--prompt", prompt, *arguments])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert err.startswith("pipespec: ")
        assert err.count("\n") == 1
        return err

    return run


@pytest.mark.parametrize(
    ("setting", "prompt", "said"),
    [
        ("policy.width=0", PROMPT, "policy.width is 0"),
        ("cluster.stages=17", PROMPT, "only 16 layers"),
        ("sampling.temperature=-0.5", PROMPT, "temperature is -0.5"),
        ("model.context=8", PROMPT, "the context holds 8"),
        ("cluster.stages=1", "", "empty"),
        ("cluster.stages=1", "king " * 4000, "the context holds 2048"),
    ],
)
def test_setting_or_prompt_out_of_range_is_refused(refuse, setting, prompt, said):
    assert said in refuse(setting, prompt=prompt)


def test_unloadable_model_is_refused(refuse, tmp_path):
    assert "no model folder" in refuse(f"model.target={tmp_path / 'absent'}")
    broken = models.build("llama", tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "not a whole safetensors file" in refuse(f"model.target={broken}")


def test_draft_with_another_vocabulary_is_refused(refuse, tmp_path):
    draft = tmp_path / "draft"
    models.build("llama", draft)
    source = resource_dir("demo") / "draft"
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    (draft / "tokenizer_config.json").write_text((source / "tokenizer_config.json").read_text())
    assert "differ in 2 tokens" in refuse(f"model.draft={draft}")


def test_unusable_redis_is_refused(refuse):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        assert "did not answer" in refuse(f"controller.url={url}")
    assert "refused the connection" in refuse(f"controller.url={url}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA devices")
def test_missing_device_is_refused(refuse):
    assert "0 CUDA devices" in refuse("cluster.devices=[cuda:1]")
