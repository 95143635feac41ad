"""A draft made of a target, as far as a few steps take it."""

import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pipespec.extras.emulation.synthetic_proposer import Accuracy
from pipespec.server.answer_record import AnswerRecord
from pipespec.system.folders import resource_dir
from tools.distill_draft import main, points
from tools.distilling import (
    Text,
    config_of,
    continue_greedily,
    kept_answers,
    kept_layers,
    load_target,
    saying,
    student_of,
    suffix_ranks,
)
from tools.rig import gguf_files

pytestmark = pytest.mark.slow

TOKENIZER = resource_dir("demo") / "target"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("target")
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "two", "three"]
    (folder / "words.txt").write_text(" ".join(random.Random(0).choices(words, k=2000)))
    return folder


def run(
    target: Path, corpus: Path, out: Path, *more: str, tokens: int = 2048, source: str = "--text"
) -> None:
    small = ["--length", "32", "--batch-tokens", "256", "--own-rows", "4"]
    often = ["--checkpoint-every", "4", "--log-every", "4", "--device", "cpu"]
    given = ["--target", str(target), source, str(corpus), "--out", str(out)]
    folder = ["--folder", str(out.parent / "work")]
    main([*given, *folder, *small, *often, "--tokens", str(tokens), *more])


def test_kept_layers_are_spread_from_the_first_to_the_last():
    assert kept_layers(5, 3) == [0, 2, 4]
    assert kept_layers(16, 2) == [0, 15]
    assert kept_layers(4, 4) == [0, 1, 2, 3]
    with pytest.raises(SystemExit, match="5 layers; give --layers from 1 to 5"):
        kept_layers(5, 6)


def test_a_draft_is_a_model_with_a_curve(target, corpus, tmp_path, capsys):
    out = tmp_path / "draft"
    run(target, corpus, out, "--layers", "2", "--halve")
    said = capsys.readouterr().out
    assert len(re.findall(r"^after 0\.00 M tokens .* 0\.\d{3} among 1, ", said, re.M)) >= 3
    assert f"\nThe draft is in {out}.\n" in said
    assert f"model.draft={out}" in said.partition("Recommended")[0], "a row of the plan"
    told = json.loads((out / "accuracy.json").read_text())
    plan, curve = told["plan"], told["accuracy"]
    assert (plan["target"], told["top_ks"]) == (str(target), [1, 4, 16])
    for stated in (plan["curve"], plan["suffix"]):
        assert Accuracy.parse(stated, 0.5).hit_rate(16) <= 1
    draft = AutoModelForCausalLM.from_pretrained(out)
    assert (draft.config.num_hidden_layers, draft.config.hidden_size) == (2, 16)
    assert (draft.config.vocab_size, draft.config.head_dim) == (2048, 8)
    assert AutoTokenizer.from_pretrained(out).encode("the cat")
    assert [row["tokens"] for row in curve] == [0, 1024, 2048]
    assert all(a <= b for row in curve for a, b in zip(row["top"], row["top"][1:], strict=False))


def test_draft_of_a_gguf_file_keeps_its_embeddings(target, corpus, tmp_path):
    """And learns from its dequantised weights, with a loss of its most frequent tokens."""
    file = gguf_files.write(
        target, tmp_path / "it.gguf", "llama", lambda _: Type.F16, tokenizer=target
    )
    run(file, corpus, tmp_path / "draft", "--layers", "2", "--vocabulary", "64")
    wanted = load_target(file, torch.float32).state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "draft").state_dict()
    kept = ("model.embed_tokens.weight", "lm_head.weight")
    assert all(torch.equal(found[name], wanted[name]) for name in kept)
    layer = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(found[layer], wanted[layer])


def test_killed_run_has_left_a_draft(target, corpus, tmp_path, monkeypatch):
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tools.distill_draft.optimizers_for", killed)
    with pytest.raises(KeyboardInterrupt):
        run(target, corpus, tmp_path / "draft", "--layers", "2")
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert draft.config.num_hidden_layers == 2
    curve = json.loads((tmp_path / "draft" / "accuracy.json").read_text())["plan"]["curve"]
    assert Accuracy.parse(curve, 0.5).hit_rate(16) <= 1


def test_logits_of_a_part_of_the_vocabulary_are_those_of_the_model(target):
    whole = load_target(target, torch.float32)
    student = student_of(whole, [0, 4], halve=False)
    ids, tokens = torch.arange(12)[None], torch.tensor([7, 3, 2000])
    wanted = student(input_ids=ids).logits[..., tokens]
    found = saying(student, tokens)(input_ids=ids).logits
    torch.testing.assert_close(found, wanted)
    assert student(input_ids=ids).logits.shape[-1] == 2048
    found.sum().backward()
    learning = {name for name, each in student.named_parameters() if each.grad is not None}
    assert "model.layers.1.mlp.up_proj.weight" in learning
    assert not any("embed" in name or "lm_head" in name for name in learning)


def test_another_target_does_not_continue_the_draft_of_the_first(target, corpus, tmp_path):
    run(target, corpus, tmp_path / "draft", "--layers", "2", tokens=256)
    other = shutil.copytree(target, tmp_path / "other")
    with pytest.raises(SystemExit, match="begun with other target"):
        run(other, corpus, tmp_path / "draft", "--layers", "2", tokens=256)
    with pytest.raises(SystemExit, match="begun with other layers, halve"):
        run(target, corpus, tmp_path / "draft", "--layers", "3", "--halve", tokens=256)


def test_too_little_text_is_refused_before_the_target_writes(target, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    with pytest.raises(SystemExit, match=r"have 0 tokens, of which more than 65 are needed"):
        run(target, texts, tmp_path / "draft", "--layers", "2")
    for name in ("one", "two"):
        (texts / f"{name}.txt").write_text("the cat sat")
    with pytest.raises(SystemExit, match=r"texts have \d+ tokens, of which more than 65"):
        run(target, texts, tmp_path / "draft", "--layers", "2")


@pytest.fixture
def answers(target: Path, tmp_path: Path) -> Path:
    """Answers of the target to users, and one of another model, as a server keeps them."""
    model = AutoModelForCausalLM.from_pretrained(target)
    record = AnswerRecord(str(tmp_path / "answers"), str(target))
    for number in range(20):
        prompt = torch.arange(5 * number, 5 * number + 8)[None]
        ids = continue_greedily(model, prompt, 40)[0].tolist()
        record.add([(ids[:8], ids[8:20]), (ids[:24], ids[24:])])  # a conversation of two turns
    AnswerRecord(str(tmp_path / "answers"), "another").add([([1], [2] * 40)])
    return record.folder


def test_a_draft_learns_from_the_answers_that_a_server_has_kept(target, answers, tmp_path, capsys):
    """And continues, whatever the server has written since."""
    texts = kept_answers(answers, str(target))
    assert [(len(text.ids), text.begin) for text in texts] == [(48, 24)] * 20
    run(target, answers, tmp_path / "draft", "--layers", "5", tokens=256, source="--answers")
    told = json.loads((tmp_path / "draft" / "accuracy.json").read_text())
    assert told["accuracy"][0]["top"] == [1.0, 1.0, 1.0]
    AnswerRecord(str(answers), str(target)).add([([1], [2] * 40)])
    run(target, answers, tmp_path / "draft", "--layers", "5", tokens=256, source="--answers")
    assert "draft continues at step 1 of 1" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="has 0 answers of some model, but 2 are needed"):
        kept_answers(answers, "some model")


def test_suffixes_are_measured_with_what_was_answered_before():
    text = Text(np.array([5, 6, 7, 8, 9, 1, 2]), 2)
    known = Text(np.array([3, 4, 5, 6, 7, 8, 9]), 2)
    assert suffix_ranks([], [text], 4).tolist() == [5] * 5
    assert suffix_ranks([known], [text], 4).tolist() == [1, 1, 1, 5, 5]


def test_curve_of_few_tokens_is_one_that_plan_takes():
    """A later rank that by chance was hit more often than an earlier one counts as that."""
    found = points(np.array([1, 1, 1, 4, 5, 5, 16, 17, 400]))
    assert Accuracy.parse(found, 0.5).hit_rate(1) == pytest.approx(3 / 9, abs=1e-5)
    assert found[-1] == "16:0.777778"
    assert points(np.array([17]))[0] == "1:0.001000"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((), "give --text, --answers or both"),
        (("--text", "a", "--halve", "--vocabulary", "9"), "--halve makes an output head anew"),
    ],
)
def test_options_that_make_no_draft_are_refused(given, why, target, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--target", str(target), "--out", str(tmp_path), "--layers", "2", *given])
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("heads", "kv_heads", "halved"),
    [(15, 5, (6, 2)), (8, 1, (4, 1)), (6, 6, (3, 3)), (9, 3, (3, 1))],
)
def test_half_the_heads_are_whole_groups(heads, kv_heads, halved):
    config = LlamaConfig(
        hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8
    )
    draft = config_of(config, [0], halve=True)
    assert (draft.num_attention_heads, draft.num_key_value_heads) == halved
    assert draft.head_dim == 8


def test_target_that_is_neither_folder_nor_in_the_hubs_cache_is_named(corpus, tmp_path):
    with pytest.raises(SystemExit, match="no model 'an/unknown-model' here, and the hub could not"):
        run(Path("an/unknown-model"), corpus, tmp_path / "draft", "--layers", "2")
