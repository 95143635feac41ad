"""The text part of multimodal checkpoints: its config and the names of its tensors."""

from __future__ import annotations

import pytest

from pipespec.engine.formats.text_part import text_config, text_names, text_type

INNER = {"model_type": "gemma3_text", "hidden_size": 8, "eos_token_id": None}
WHOLE = {
    "model_type": "gemma3",
    "text_config": INNER,
    "vision_config": {"hidden_size": 4},
    "eos_token_id": [1, 106],
    "quantization_config": {"quant_method": "awq"},
}


def test_the_config_of_the_text_part_takes_what_the_whole_config_has_for_it() -> None:
    assert text_config(WHOLE) == {
        "model_type": "gemma3_text",
        "hidden_size": 8,
        "eos_token_id": [1, 106],
        "quantization_config": {"quant_method": "awq"},
    }


def test_a_text_config_without_a_type_has_the_usual_one() -> None:
    whole = {"model_type": "mistral3", "text_config": {"hidden_size": 8}}
    assert text_config(whole) == {"model_type": "mistral", "hidden_size": 8}


@pytest.mark.parametrize(
    "raw", [{"model_type": "llama"}, {"model_type": "paligemma", "text_config": INNER}]
)
def test_the_config_of_another_model_stays_as_it_is(raw: dict[str, object]) -> None:
    assert text_config(raw) is raw


def test_the_type_of_the_text_part_is_that_of_any_multimodal_model() -> None:
    assert text_type({"model_type": "paligemma", "text_config": INNER}) == "gemma3_text"
    assert text_type({"model_type": "llama"}) is None


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("vision_tower.encoder.layers.0.mlp.fc1.weight", None),
        ("model.vision_tower.layers.0.mlp.fc1.weight", None),
        ("multi_modal_projector.mm_soft_emb_norm.weight", None),
    ],
)
def test_names_of_the_text_part_lose_their_prefix(stored: str, name: str | None) -> None:
    embedding = "model.language_model.embed_tokens.weight"
    assert text_names([embedding, stored]).get(stored) == name


def test_names_without_prefixes_stay_as_they_are() -> None:
    names = ["layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight", "fc.weight"]
    assert text_names(names) == {name: name for name in names}
