"""What a folder is that somebody takes for a draft, by configs as the projects publish them."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pipespec.engine.inspection.inspection import inspect
from pipespec.errors import ModelError
from tests.helpers.models import VOCAB_SIZE, build

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
# As SafeAILab/EAGLE, FasterDecoding/Medusa, z-lab/dflash and vllm-project/speculators write them,
# and vLLM and SGLang name them.
HEADS: list[dict[str, object]] = [
    LLAMA | {"draft_vocab_size": 32000},
    # P-EAGLE guesses in parallel, and still from hidden states.
    LLAMA | {"architectures": ["PeagleLlamaForCausalLM"], "pard_token": 0},
    {"model_type": "eagle", "model": LLAMA},
    {"medusa_num_heads": 5, "base_model_name_or_path": "lmsys/v"},
    {"architectures": ["MedusaModel"], "num_heads": 5},
    {"architectures": ["DeepSeekMTPModel"]},
    {"model_type": "qwen3_next_mtp"},
    {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"},
    {"model_type": "qwen3", "dflash_config": {"mask_token_id": 151669}},
    {"speculators_model_type": "eagle3", "transformer_layer_config": LLAMA},
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return build("llama", folder, num_hidden_layers=1, num_nextn_predict_layers=1)


@pytest.fixture
def copy(llama, tmp_path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        inspect(folder)
    return str(caught.value)


@pytest.mark.parametrize("config", HEADS, ids=str)
def test_a_head_is_refused_by_its_config(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path} holds a head for another model (EAGLE, Medusa, MTP or")
    assert "PARD" in message and "\n" not in message


def test_a_head_whose_config_says_nothing_is_known_by_its_tensors(copy):
    """The first EAGLE heads have the config of a llama of one layer."""
    tensors = load_file(file := copy / "model.safetensors")
    tensors["fc.weight"] = next(iter(tensors.values())).clone()
    save_file(tensors, file)
    assert "holds a head for another model" in refusal(copy)


def edited(folder: Path, **changes: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def test_a_model_is_taken_and_a_parallel_one_is_known(llama, copy):
    """A target may count layers for MTP: they are left out."""
    plain = inspect(llama)
    assert (plain.mask_token, plain.parallel_tokens) == (None, 1)
    found = inspect(edited(copy, pard_token=VOCAB_SIZE - 1))
    assert (found.mask_token, found.parallel_tokens) == (VOCAB_SIZE - 1, 8)
    assert inspect(edited(copy, pard_tokens=4)).parallel_tokens == 4


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"pard_token": VOCAB_SIZE}, f"pard_token is {VOCAB_SIZE}, but must be a whole number"),
        ({"pard_token": "x"}, "pard_token is 'x', but must be a whole number"),
        ({"pard_token": 1, "pard_tokens": 0}, "pard_tokens is 0, but must be a whole number"),
    ],
)
def test_a_mask_token_that_cannot_be_is_refused(copy, changes, wrong):
    assert wrong in refusal(edited(copy, **changes))
