import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from tools.training import Budget, Mix, optimizers_for, train

BUDGET = Budget(tokens=250, batch_tokens=32, length=8, seed=3)
VOCABULARY = 16


class Killed(Exception):
    pass


def small_model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )


def some_text(seed=0):
    rng = np.random.default_rng(seed)
    return Mix.of(
        [rng.integers(VOCABULARY, size=n).astype(np.int32) for n in (300, 90)], [1.0, 2.0]
    )


def trained(folder, budget=BUDGET, mix=None, kills=()):
    """Weights and batches of a training that is killed before the given steps, counted anew in
    each of its lives, until a life is not."""
    batches = {}
    for kill in (*kills, budget.steps):
        model, life, text = small_model(), [], mix or some_text()

        def loss_of(step, model=model, life=life, text=text, kill=kill):
            if len(life) == kill:
                raise Killed
            ids = budget.batch("model", text, step)
            life.append(step)
            assert torch.equal(ids, batches.setdefault(step, ids)), "a step's batch never changes"
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

        try:
            train(
                "model", model, optimizers_for(model, model.model.layers), budget.steps, folder,
                loss_of, began_with=budget.began_with(text), checkpoint_every=3, log_every=4,
            )  # fmt: skip
            return model.state_dict(), batches
        except Killed:
            (folder / ".partial-model.pt").write_bytes(b"killed while it wrote")
    raise AssertionError("the last life is not killed")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("uninterrupted"))


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=3))
def test_killed_training_ends_with_the_same_weights(uninterrupted, tmp_path_factory, kills):
    weights, batches = trained(tmp_path_factory.mktemp("killed"), kills=kills)
    expected, expected_batches = uninterrupted
    assert sorted(batches) == sorted(expected_batches) == [*range(8)]
    assert all(torch.equal(batches[step], expected_batches[step]) for step in batches)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert not all(torch.equal(expected[k], v) for k, v in small_model().state_dict().items())


def test_a_finished_training_only_returns_its_weights(tmp_path):
    first, _ = trained(tmp_path)
    again, batches = trained(tmp_path)
    assert not batches and all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(
    ("other", "mix", "named"),
    [
        (Budget(320, 32, BUDGET.length, 3), None, "tokens"),
        (Budget(250, 32, BUDGET.length, 4), None, "seed"),
        (BUDGET, some_text(1), "text"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(tmp_path, other, mix, named):
    trained(tmp_path)
    with pytest.raises(SystemExit, match=f"begun with other {named};.*another folder"):
        trained(tmp_path, other, mix)


def test_steps_are_whole_sequences():
    with pytest.raises(SystemExit, match="40 tokens per step are not whole sequences of 16"):
        Budget(250, 40, 16, 3)
