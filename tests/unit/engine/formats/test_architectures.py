"""Every causal type of the installed Transformers: it decodes, or is refused with a reason."""

from __future__ import annotations

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pipespec.engine.formats import refused_architectures
from pipespec.engine.formats.architectures import (
    ARCHITECTURES,
    WRAPPERS,
    modeling_module,
    require_supported,
)
from pipespec.engine.formats.refused_architectures import REASONS
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
        assert refused_architectures.UNKNOWN not in said
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
