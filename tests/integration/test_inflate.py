"""An inflated checkpoint says what the small one says, whoever runs it."""

import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipespec.engine.inspection.inspection import inspect
from pipespec.errors import ConfigError
from pipespec.system.folders import resource_dir
from tests.helpers.matrix import some_of
from tests.helpers.models import VOCAB_SIZE, build
from tools import inflate
from tools.inflate import Shape

NEW_TOKENS = 16
PROMPT = torch.arange(3, 70, 5) % VOCAB_SIZE
# The small models: 48 wide, 4 layers, 64 units, 4 heads of 12 with 2 KV heads.
MODELS = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    # Larger than the sums of squares: a wrong epsilon changes everything.
    "epsilon": {"rms_norm_eps": 0.5},
    "one KV head": {"num_key_value_heads": 1},
}
SIZES = [(48, 4, 64), (96, 8, 128), (192, 4, 64), (60, 7, 71), (100, 5, 65), (48, 9, 200)]


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """`small(name)`: the folder of a model of `MODELS`, built once."""
    root = tmp_path_factory.mktemp("small")

    def get(name):
        folder = root / name
        return folder if folder.exists() else build("llama", folder, **MODELS[name])

    return get


def grow(model, out, sizes, dtype=torch.float32):
    new = Shape.of(inflate.read_config(model)).grow(*sizes)
    inflate.write(model, out, new, dtype)
    return new


def run(model):
    """Logits of the prompt, and the tokens that follow it, by Hugging Face in float32."""
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        logits = whole(PROMPT[None]).logits[0]
    answer = whole.generate(PROMPT[None], max_new_tokens=NEW_TOKENS, do_sample=False)
    return logits, answer[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(("name", "sizes"), some_of(MODELS, SIZES))
def test_logits_and_tokens_stay(small, tmp_path, name, sizes):
    new = grow(small(name), tmp_path / "out", sizes)
    logits, tokens = run(tmp_path / "out")
    expected, text = run(small(name))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert tokens == text
    info = inspect(tmp_path / "out")
    assert (info.hidden_size, info.num_layers) == (new.hidden, new.layers) == sizes[:2]
    if name != "biases":
        assert info.stored.total == 4 * new.num_parameters


def test_bfloat16_is_exact_for_a_power_of_4(small, tmp_path):
    grow(small("tied"), tmp_path / "same", (48, 4, 64), torch.bfloat16)
    grow(small("tied"), tmp_path / "larger", (192, 6, 100), torch.bfloat16)
    expected, text = run(tmp_path / "same")
    logits, tokens = run(tmp_path / "larger")
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert tokens == text


def test_what_is_new_is_computed_in_earnest(small, tmp_path):
    """No engine can leave the new heads and units out: what makes them is not zero."""
    new = grow(small("untied"), tmp_path / "out", (96, 8, 128))
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    weights = {name: weight for file in files for name, weight in load_file(file).items()}
    makers = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
    names = [name for name in weights if name.split(".")[-2] in makers]
    assert len(names) == 5 * new.layers + 1
    for name in names:
        assert weights[name].count_nonzero() == weights[name].numel(), name
    silent = [i for i in range(8) if not weights[f"model.layers.{i}.mlp.down_proj.weight"].any()]
    assert silent == [1, 3, 5, 7]


@pytest.mark.parametrize("parameters", [3_500_000, 50_000_000, 500_000_000, 7_000_000_000])
def test_a_number_of_parameters_chooses_a_shape(parameters):
    old = Shape.of(inflate.read_config(resource_dir("demo") / "target"))
    new = old.grow_to(parameters)
    assert new.num_parameters == pytest.approx(parameters, rel=0.03)
    assert new == old.grow(new.hidden, new.layers, new.intermediate)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hidden", "40"], "--hidden is 40, but must be at least 48"),
        (["--layers", "3"], "--layers is 3, but must be at least 4"),
        (["--intermediate", "1"], "--intermediate is 1, but must be at least 64"),
        (["--hidden", "49"], "--hidden is 49, but must be divisible by a number of heads"),
        (["--parameters", "1K"], "--parameters is 1000, but must be at least"),
        (["--parameters", "1M", "--layers", "9"], "give it alone"),
        (["--parameters", "many"], "'many' is no number such as 500M"),
    ],
)
def test_what_cannot_be_is_one_sentence(small, tmp_path, monkeypatch, capsys, arguments, said):
    command = ["inflate", str(tmp_path / "out"), "--model", str(small("tied")), *arguments]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        inflate.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_other_models_and_full_folders_are_refused(small, tmp_path):
    with pytest.raises(ConfigError, match="is a qwen2 model, but only a Llama"):
        inflate.read_config(build("qwen2", tmp_path / "qwen2"))
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        inflate.read_config(tmp_path)
    with pytest.raises(ConfigError, match="is not empty"):
        grow(small("tied"), tmp_path / "qwen2", (96, 8, 128))
