"""The rows that a parallel draft learns from, and a short training."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pipespec.system.folders import resource_dir
from tools.train_pard import Places, main


@given(st.integers(2, 24), st.integers(1, 5), st.floats(0.1, 1.0), st.integers(0, 2**32 - 1))
def test_a_mask_is_kept_only_with_all_that_it_sees(length, tokens, retain, seed):
    places = Places.drawn(length, tokens, retain, 0.2, np.random.default_rng(seed))
    rows = [*zip(places.anchor.tolist(), places.depth.tolist(), strict=True)]
    assert len(set(rows)) == len(rows) and rows[:length] == [(i, 0) for i in range(length)]
    assert all((anchor, depth - 1) in rows for anchor, depth in rows if depth)
    assert all(anchor + depth < length for anchor, depth in rows), "what follows is known"
    most = [round(length * max(retain**depth, 0.2)) for depth in range(tokens)]
    assert all((places.depth == depth).sum() <= most[depth] for depth in range(1, tokens))
    sees = places.mask()
    for i, (anchor, depth) in enumerate(rows):
        seen = {rows[j] for j in torch.nonzero(sees[i]).flatten().tolist()}
        text = {(before, 0) for before in range(anchor + 1)}
        assert seen == text | {(anchor, above) for above in range(1, depth + 1)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with more rows in its embedding than the draft, whose config.json names its type as
    Transformers 4 did; and a corpus."""
    root = tmp_path_factory.mktemp("pair")
    torch.manual_seed(0)
    for name, vocabulary in (("target", 2112), ("draft", 2048)):
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
        LlamaForCausalLM(config).save_pretrained(root / name)
        AutoTokenizer.from_pretrained(resource_dir("demo") / "target").save_pretrained(root / name)
    stored = json.loads((root / "draft" / "config.json").read_text())
    stored["torch_dtype"] = stored.pop("dtype")
    (root / "draft" / "config.json").write_text(json.dumps(stored))
    (root / "text").mkdir()
    words = random.Random(0).choices(["the", "cat", "sat", "on", "a", "mat"], k=500)
    (root / "text" / "words.txt").write_text(" ".join(words))
    return root


def train(pair: Path, work: Path, monkeypatch: pytest.MonkeyPatch, **changed: object) -> None:
    few = {"tokens": 2, "steps": 2, "batch": 4, "length": 16, "target_rows": 3, "evaluated": 2}
    given = {name: pair / name for name in ("target", "draft", "text")}
    given |= {"work": work, "out": work / "out", **few, "log_every": 1, "device": "cpu", **changed}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    monkeypatch.setattr(sys, "argv", ["train_pard", *options])
    main()


def test_a_padded_target_and_an_older_config_make_a_draft(pair, tmp_path, monkeypatch):
    train(pair, tmp_path, monkeypatch)
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (made.config.vocab_size, made.config.pard_token) == (2049, 2048)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"length": 24}, "tokens, batch_tokens, lengths, text"),
        ({"steps": 1}, "tokens"),
        ({"lr": 1.0}, "lr"),
    ],
)
def test_another_training_does_not_continue_the_first(pair, tmp_path, monkeypatch, changed, named):
    train(pair, tmp_path, monkeypatch)
    with pytest.raises(SystemExit, match=f"begun with other {named}; .* another folder"):
        train(pair, tmp_path, monkeypatch, **changed)
    train(pair, tmp_path, monkeypatch)
