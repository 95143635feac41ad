import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pipespec.engine.formats.architectures import (
    ARCHITECTURES,
    REASONS,
    UNKNOWN,
    WRAPPERS,
    modeling_module,
    require_supported,
    text_config,
    text_names,
    text_type,
)
from pipespec.errors import ModelError
from tests.helpers.models import MULTIMODAL

CAUSAL = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def refusal(model_type: str, text_type: str | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        require_supported(model_type, "the model", text_type)
    return str(caught.value)


@pytest.mark.parametrize("model_type", CAUSAL)
def test_every_causal_type_decodes_or_is_refused_because_of_something(model_type: str) -> None:
    if model_type in ARCHITECTURES:
        require_supported(model_type, "the model")
        assert model_type not in REASONS
    elif model_type in WRAPPERS:
        assert WRAPPERS[model_type] in ARCHITECTURES
        assert model_type not in REASONS
    else:
        said = refusal(model_type)
        assert UNKNOWN not in said
        assert said.startswith(f"the architecture '{model_type}' of the model is not supported: ")
        assert "\n" not in said
        assert len(said) < 250


def test_the_tables_have_no_type_that_transformers_lacks() -> None:
    assert set(ARCHITECTURES) <= set(CAUSAL)
    assert set(REASONS) <= set(CAUSAL)
    assert not set(REASONS) & {*ARCHITECTURES, *WRAPPERS}
    assert list(ARCHITECTURES) == sorted(ARCHITECTURES)


def test_every_multimodal_type_has_a_conformance_test() -> None:
    assert sorted(WRAPPERS) == sorted(MULTIMODAL)
    assert {kind: text for kind, (text, _) in MULTIMODAL.items()} == WRAPPERS


def test_a_multimodal_type_is_refused_with_its_text_part() -> None:
    assert "its text part is 'gemma', which decodes if" in refusal("paligemma", "gemma")
    said = refusal("a_vl", "qwen4_exp")
    assert "its text part is 'qwen4_exp', which is not supported either: its layers keep" in said


def test_a_type_that_transformers_does_not_know_is_refused() -> None:
    assert refusal("nonsense").endswith("Transformers has no causal language model of this type")


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_the_module_of_an_architecture_is_one_of_transformers(model_type: str) -> None:
    from importlib.util import find_spec

    assert find_spec(modeling_module(model_type)) is not None


INNER = {"model_type": "gemma3_text", "hidden_size": 8, "eos_token_id": None}
WHOLE = {
    "model_type": "gemma3",
    "text_config": INNER,
    "vision_config": {"hidden_size": 4},
    "eos_token_id": [1, 106],
    "quantization_config": {"quant_method": "awq"},
}


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (
            WHOLE,
            {**INNER, "eos_token_id": [1, 106], "quantization_config": {"quant_method": "awq"}},
        ),
        # Without a type it has the usual one; the config of another model stays as it is.
        (
            {"model_type": "mistral3", "text_config": {"hidden_size": 8}},
            {"model_type": "mistral", "hidden_size": 8},
        ),
        ({"model_type": "llama"}, None),
        ({"model_type": "paligemma", "text_config": INNER}, None),
    ],
)
def test_the_config_of_the_text_part_takes_what_the_whole_config_has_for_it(raw, found) -> None:
    assert text_config(raw) == (raw if found is None else found)


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
