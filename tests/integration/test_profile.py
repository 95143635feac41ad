"""`pipespec bench --profile` as a user runs it, and what its file is good for."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipespec.cli.main import main
from pipespec.cluster.decide import decide
from pipespec.config.compose import compose
from pipespec.extras.bench.figures import RequestResult
from pipespec.extras.bench.profiling import CHUNK, read_answers
from pipespec.system.folders import resource_dir

pytestmark = pytest.mark.slow

CLUSTER = ("cluster.stages=2", "cluster.devices=[cpu]", "decode.ignore_eos=true")
SIZE = ("policy=level", "policy.width=16", "policy.children=8")
TWO_HOSTS = """
hosts:
  - {name: alpha, address: 127.0.0.1, ssh: local, devices: [cpu, cpu]}
  - {name: beta, address: 127.0.0.2, ssh: local, devices: [cpu]}
"""
TIMES = ("emulate=fixed", "emulate.stage_ms=40", "emulate.draft_ms=4")


@pytest.mark.long
def test_profile_predicts_what_the_bench_then_measures(tmp_path, capfd):
    prompts = tmp_path / "mine.txt"
    prompts.write_text("Once upon a time there was a king\n\nThe three laws of motion are\n")
    file = str(tmp_path / "profile.json")
    length = "decode.max_new_tokens=24"
    profiled = ["bench", "--dataset", str(prompts), "--profile", file]
    assert main([*profiled, *CLUSTER, *SIZE, *TIMES, length]) == 0
    shown = capfd.readouterr().out
    assert "Milliseconds by rows, times EMULATED" in shown and "mine" in shown

    plan = ["plan", "--profile", file, "policy=root,level", "policy.width=16", "--json"]
    assert main([*plan, "proposer.rounds=auto"]) == 0
    answer = json.loads(capfd.readouterr().out)
    by_policy = {each["policy"]: each for each in answer["predictions"]}
    root, level = by_policy["root"], by_policy["level"]
    assert [text["benchmark"] for text in level["texts"]] == ["mine", "mine"]

    data = ["bench", "--dataset", str(prompts), "--json", *CLUSTER, *SIZE, length]
    assert main([*data, f"emulate={file}"]) == 0
    measured = json.loads(capfd.readouterr().out)
    assert measured["emulated"]
    # Counts are exact but for rounds that came too late; times are those of a busy machine.
    tokens = [text["tokens_per_step"] for text in level["texts"]]
    assert measured["tokens_per_step"] == pytest.approx(np.mean(tokens), rel=0.15)
    assert root["tokens_per_step"] == pytest.approx(1 / 2)
    assert 80 <= root["tbt_ms"] < 160


@pytest.mark.long
def test_profile_of_hosts_holds_what_was_measured_of_them(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    prompts, file, hosts = (tmp_path / name for name in ("mine.txt", "p.json", "hosts.yaml"))
    prompts.write_text("Once upon a time\n")
    hosts.write_text(TWO_HOSTS)
    settings = ["policy.width=8", "decode.max_new_tokens=8", "decode.ignore_eos=true"]
    profiled = ["bench", "--dataset", str(prompts), "--profile", str(file), "--json"]
    assert main([*profiled, f"cluster={hosts}", *settings]) == 0
    found = json.loads(capfd.readouterr().out)
    assert set(found["figures"]["members"]) == {"alpha/0", "alpha/1", "beta/0"}


@pytest.mark.parametrize("length", [5, CHUNK + 3])
def test_draft_reads_an_answer_as_hugging_face_does(length):
    random = np.random.default_rng(3)
    prompt, answer = random.integers(1000, size=(2, length)).tolist()
    request = RequestResult("r", "b", prompt, answer, "", "length", 0.0, [], {})
    (text,) = read_answers(decide(compose()), [request], 16).texts
    model = AutoModelForCausalLM.from_pretrained(
        resource_dir("demo") / "draft", dtype=torch.float32
    )
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0, length - 1 : -1]
    ranks = (logits > logits.gather(1, torch.tensor(answer)[:, None])).sum(1) + 1
    assert list(text.ranks) == torch.where(ranks > 16, 0, ranks).tolist()
    expected = logits.softmax(-1).topk(16).values
    assert torch.tensor(text.probabilities) == pytest.approx(expected, abs=1e-4)
