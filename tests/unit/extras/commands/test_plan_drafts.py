import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pipespec.cli.main import main
from pipespec.client.model_info import full_name
from pipespec.system.folders import resource_dir

pytestmark = pytest.mark.slow
TIMES = ("stages=4", "stage_ms=20", "--tokens", "100")


def model(folder: Path, layers: int) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 2048, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes, **heads)).save_pretrained(
        folder
    )
    AutoTokenizer.from_pretrained(resource_dir("demo") / "target").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft with its vocabulary and one of which a part of the tokens is its own, a
    model of the target's size, and a head."""
    folder = tmp_path_factory.mktemp("models")
    model(folder / "target", 24)
    model(folder / "large", 23)
    model(folder / "small", 1)
    other = model(folder / "other", 1)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {
        text if number % 2 or number < 300 else f"{text}{text}{text}": number
        for text, number in vocabulary.items()
    }
    tokenizer["model"]["merges"] = []
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    head = shutil.copytree(folder / "small", folder / "head")
    config = json.loads((head / "config.json").read_text()) | {"draft_vocab_size": 100}
    (head / "config.json").write_text(json.dumps(config))
    return folder


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "--drafts", *arguments, *TIMES, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_models_at_hand_are_compared_with_suffixes(models, capsys):
    found = planned(capsys, f"model.target={models / 'target'}")
    assert found["plain_tbt_ms"] == 80
    by_name = {each["setting"].rpartition("/")[2]: each for each in found["drafts"]}
    assert set(by_name) == {"small", "other", "proposer=suffix"}
    assert by_name["small"]["shared"] == 1 and 0.5 < by_name["other"]["shared"] < 0.7
    assert by_name["small"]["top1"] > by_name["other"]["top1"]
    in_float32 = (models / "small" / "model.safetensors").stat().st_size
    assert by_name["small"]["num_bytes"] == pytest.approx(in_float32, rel=0.05)
    assert not any(each["measured"] or each["why"] for each in found["drafts"])
    gains = [each["speedup"] for each in found["predictions"]]
    assert gains == sorted(gains, reverse=True) and gains[-1] > 1
    assert found["recommended"]["layout"].rpartition("/")[2] == "small"


def test_a_head_that_is_named_is_refused_with_the_reason(models, capsys):
    assert (
        main(["plan", "--drafts", str(models / "target"), f"--draft={models / 'head'}", *TIMES])
        == 0
    )
    said = " ".join(capsys.readouterr().out.split())
    assert f"model.draft={models / 'head'}: " in said and "a head for another model" in said
    assert "Draft heads (EAGLE-3, MTP layers) are not ranked; docs/drafts.md says where" in said
    assert "proposer=suffix: 0.5 ms a round, right at once for 45% (assumed)" in said
    assert "Recommended: proposer=suffix policy=best_first" in said


def test_a_distilled_draft_has_the_accuracy_that_was_measured(models, tmp_path, capsys):
    draft = shutil.copytree(models / "small", tmp_path / "draft")
    plan = {"target": full_name(str(models / "target")), "curve": ["1:0.5", "4:0.7", "16:0.8"]}
    plan["suffix"] = ["1:0.3", "4:0.4", "16:0.5"]
    (draft / "accuracy.json").write_text(json.dumps({"top_ks": [1, 4, 16], "plan": plan}))
    targets = f"model.target={models / 'target'}", f"model.target={models / 'large'}"
    own, other = (planned(capsys, each, f"model.draft={draft}") for each in targets)
    assert {round(each["top1"], 6): each["measured"] for each in own["drafts"]} == {
        0.5: True,
        0.3: True,
    }
    assert not any(each["measured"] for each in other["drafts"]), "they are of another target"
