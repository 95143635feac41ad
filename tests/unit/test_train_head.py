"""A draft head that learns from its target, and its folder."""

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pipespec.system.folders import resource_dir
from tools.draft_head import DraftHead
from tools.train_head import Text, figures, loss_of, main, trained, unrolled

HIDDEN, VOCABULARY, STEPS = 32, 2048, 3


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def text_of(target: LlamaForCausalLM, seed: int, length: int = 24) -> Text:
    """A text of a few kinds of tokens, its second half the answer."""
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(0, 40, length))
    states = target.model(tokens[None], output_hidden_states=True)
    features = torch.cat([states.hidden_states[layer][0] for layer in (2, 3, 4)], -1)
    return Text(tokens, length // 2, features, states.last_hidden_state[0])


def plain_chain(head: DraftHead, text: Text, embeddings: Tensor, base: int) -> list[Tensor]:
    """Outputs of `STEPS` rows after the base, as SGLang and vLLM compute them: one after another,
    each over all rows before it."""
    weights = dict(head.state_dict())
    layer = {name.removeprefix("midlayer."): value for name, value in weights.items()}
    heads, kv_heads, size = 4, 2, HIDDEN // 4

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + head.config.rms_norm_eps).rsqrt() * weight

    def rotated(x: Tensor, position: int) -> Tensor:
        angles = position * 10000.0 ** (-torch.arange(size // 2) / (size // 2))
        a, b = x[..., : size // 2], x[..., size // 2 :]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    keys, values, outputs = [], [], []
    for row in range(base + STEPS):
        known = outputs[-1] if row > base else weights["fc.weight"] @ text.features[row]
        embedded = norm(embeddings[text.tokens[row + 1]], layer["input_layernorm.weight"])
        joined = torch.cat((embedded, norm(known, layer["hidden_norm.weight"])))
        q, k, v = (
            (layer[f"self_attn.{name}_proj.weight"] @ joined).view(-1, size) for name in "qkv"
        )
        keys.append(rotated(k, row).repeat_interleave(heads // kv_heads, 0))
        values.append(v.repeat_interleave(heads // kv_heads, 0))
        scores = torch.einsum("hs,nhs->hn", rotated(q, row), torch.stack(keys)) / size**0.5
        mixed = torch.einsum("hn,nhs->hs", scores.softmax(-1), torch.stack(values)).flatten()
        state = known + layer["self_attn.o_proj.weight"] @ mixed
        normed = norm(state, layer["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(layer["mlp.gate_proj.weight"] @ normed)
        wide = gate * (layer["mlp.up_proj.weight"] @ normed)
        outputs.append(state + layer["mlp.down_proj.weight"] @ wide)
    return [
        weights["lm_head.weight"] @ norm(output, weights["norm.weight"])
        for output in outputs[base:]
    ]


def test_a_head_computes_what_eagle_3_does(target: LlamaForCausalLM) -> None:
    text, embeddings = text_of(target, 0), target.get_input_embeddings().weight
    head = DraftHead.before_training(target, torch.arange(0, VOCABULARY, 2)).requires_grad_(False)
    for weight in head.parameters():
        weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    first = text.answer - 2
    steps = [head.logits(output) for output, _ in unrolled(head, embeddings, text, STEPS)]
    for base in (first, first + 5):
        expected = plain_chain(head, text, embeddings, base)
        for logits, wanted in zip(steps, expected, strict=True):
            torch.testing.assert_close(logits[base - first], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_head_that_is_written_says_the_same(target: LlamaForCausalLM, tmp_path: Path) -> None:
    texts = [text_of(target, seed) for seed in range(4)]
    embeddings = target.get_input_embeddings().weight
    head = DraftHead.before_training(target, torch.arange(100))
    before = figures(head, embeddings, texts)["loss"]
    options = Namespace(folder=tmp_path, steps=STEPS, epochs=5, seed=1)
    epochs: list[int] = []
    trained(head, embeddings, texts, options, "head", epochs.append)
    assert epochs == [1, 2, 3, 4, 5]
    assert figures(head, embeddings, texts)["loss"] < before
    head.save(tmp_path / "head", torch.float32)
    read = DraftHead(LlamaConfig.from_pretrained(tmp_path / "head"))
    read.load_state_dict(load_file(tmp_path / "head" / "model.safetensors"))
    for seed in (0, 7):
        ours, theirs = (
            [each.logits(out) for out, _ in unrolled(each, embeddings, text_of(target, seed), 3)]
            for each in (head, read)
        )
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_folder_is_one_of_eagle_3(target: LlamaForCausalLM, tmp_path: Path) -> None:
    said = [7, 3, 2000]
    DraftHead.before_training(target, torch.tensor(said)).save(tmp_path, torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (VOCABULARY, len(said))
    # One names the layers whose outputs are read, one those whose inputs are.
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: [*tensor.shape] for name, tensor in tensors.items()} == {
        "fc.weight": [HIDDEN, 3 * HIDDEN],
        "midlayer.hidden_norm.weight": [HIDDEN],
        "midlayer.input_layernorm.weight": [HIDDEN],
        "midlayer.post_attention_layernorm.weight": [HIDDEN],
        "midlayer.self_attn.q_proj.weight": [32, 2 * HIDDEN],
        "midlayer.self_attn.k_proj.weight": [16, 2 * HIDDEN],
        "midlayer.self_attn.v_proj.weight": [16, 2 * HIDDEN],
        "midlayer.self_attn.o_proj.weight": [HIDDEN, 32],
        "midlayer.mlp.gate_proj.weight": [48, HIDDEN],
        "midlayer.mlp.up_proj.weight": [48, HIDDEN],
        "midlayer.mlp.down_proj.weight": [HIDDEN, 48],
        "norm.weight": [HIDDEN],
        "lm_head.weight": [len(said), HIDDEN],
        "d2t": [len(said)],
        "t2d": [VOCABULARY],
    }
    assert (torch.arange(len(said)) + tensors["d2t"]).tolist() == sorted(said)
    assert tensors["t2d"].nonzero().flatten().tolist() == sorted(said)


def test_a_loss_sees_features_up_to_the_base_alone(target: LlamaForCausalLM) -> None:
    text, embeddings = text_of(target, 0), target.get_input_embeddings().weight
    head = DraftHead.before_training(target, torch.arange(VOCABULARY)).requires_grad_(False)
    later = Text(text.tokens, text.answer, text.features.clone(), text.last)
    base = text.answer + 1
    later.features[base + 1 :] += 1.0
    before, after = (
        [output[: base - text.answer + 3] for output, _ in unrolled(head, embeddings, each, STEPS)]
        for each in (text, later)
    )
    for ours, theirs in zip(before, after, strict=True):
        torch.testing.assert_close(ours, theirs)
    random = (np.random.default_rng(0) for _ in range(2))
    ours, theirs = (loss_of(head, embeddings, each, STEPS, next(random)) for each in (text, later))
    assert ours != theirs


@pytest.mark.slow
def test_the_command_writes_a_head(target: LlamaForCausalLM, tmp_path: Path) -> None:
    folder, out = tmp_path / "target", tmp_path / "head"
    target.save_pretrained(folder)
    AutoTokenizer.from_pretrained(resource_dir("demo") / "target").save_pretrained(folder)
    given = ["--target", str(folder), "--out", str(out), "--folder", str(tmp_path / "work")]
    given += ["--count", "12", "--tokens", "24", "--epochs", "1", "--vocabulary", "256"]
    main(given)
    weights = (out / "model.safetensors").read_bytes()
    told = json.loads((out / "accuracy.json").read_text())
    assert told["epoch"] == 1 and len(told["accuracy"]) == 4 and told["tokens a pass"] >= 1
    (out / "model.safetensors").unlink()
    main(given)
    assert (out / "model.safetensors").read_bytes() == weights
