"""The outputs of tapped layers, which a draft head reads."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipespec.core import DRAFT, KIND, NODE, NUM_COLUMNS, PARENT, POSITION, TOKEN, Batch, Verdict
from pipespec.engine.inspection.inspection import inspect
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.runner import SliceRunner
from pipespec.head.proposer import Context
from tests.helpers import few_bits, models

SLOTS = 64
TAPS = (0, 1, 3)
PROMPT = [5, 17, 3, 8, 120]
# Draft tokens below the prompt's last, by the numbers of their parents among them.
TOKENS, PARENTS = [7, 9, 11, 13, 7, 2], [-1, -1, 0, 0, 1, 3]
PATH = [0, 3, 5]


@pytest.fixture(scope="module")
def llama() -> Path:
    torch.set_num_threads(1)
    return models.shared("llama")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    sizes = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return few_bits.make(tmp_path_factory.mktemp("gguf"), "Q8_0", "llama", **sizes)


def slices(path: Path, cuts: list[int], **how) -> list[SliceRunner]:
    return [
        SliceRunner(
            ModelSlice.load(path, range(start, stop), num_slots=SLOTS, taps=TAPS, **how), SLOTS
        )
        for start, stop in pairwise(cuts)
    ]


def tree_rows(nodes: list[int]) -> np.ndarray:
    rows = np.zeros((len(nodes), NUM_COLUMNS), np.int64)
    last = len(PROMPT) - 1
    for row, node in enumerate(nodes):
        depth, above = 1, PARENTS[node]
        while above >= 0:
            depth, above = depth + 1, PARENTS[above]
        rows[row, NODE], rows[row, TOKEN] = last + 1 + node, TOKENS[node]
        rows[row, PARENT] = last + 1 + PARENTS[node]
        rows[row, POSITION], rows[row, KIND] = last + depth, DRAFT
    return rows


def through(runners: list[SliceRunner], rows: np.ndarray) -> torch.Tensor:
    """What the last of some slices computes of rows, with all features behind it."""
    batch = Batch(0, rows)
    for runner in runners:
        batch = runner.compute(batch)
    assert batch.hidden is not None
    return batch.hidden


def computed(runners: list[SliceRunner], nodes: list[int]) -> torch.Tensor:
    """Of the prompt and then of the tree."""
    prompt = Context(0, PROMPT, list(range(len(PROMPT)))).rows(0)
    return torch.cat((through(runners, prompt), through(runners, tree_rows(nodes))))


def test_features_are_the_outputs_of_the_layers_in_transformers(llama):
    found = computed(slices(llama, [0, 2, 4]), list(range(len(TOKENS))))
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    outputs = {}
    for layer in TAPS:
        model.model.layers[layer].register_forward_hook(
            lambda _, __, out, layer=layer: outputs.__setitem__(layer, out[0])
        )
    with torch.inference_mode():
        last = model.model(torch.tensor([PROMPT + [TOKENS[node] for node in PATH]]))
    expected = torch.cat((last.last_hidden_state[0], *(outputs[layer] for layer in TAPS)), -1)
    rows = [*range(len(PROMPT)), *(len(PROMPT) + node for node in PATH)]
    assert torch.allclose(found[rows], expected, atol=1e-4)


@pytest.mark.parametrize("cuts", [[0, 4], [0, 2, 4], [0, 1, 2, 3, 4]], ids=str)
def test_features_in_a_batch_are_to_the_bit_those_of_a_single_forward(gguf, cuts):
    """Where rows do not depend on their batch, as with weights of few bits."""
    how = {"quantization": inspect(gguf).storage.kept_format, "dtype": torch.float32}
    whole = slices(gguf, [0, 4], **how)
    assert whole[0].model.of_ggml is not None
    alone = computed(whole, PATH)
    found = computed(slices(gguf, cuts, **how), list(range(len(TOKENS))))
    rows = [*range(len(PROMPT)), *(len(PROMPT) + node for node in PATH)]
    assert torch.equal(found[rows], alone)


def test_rows_of_decided_text_are_those_that_verdicts_have_committed(llama):
    (runner,) = slices(llama, [0, 4])
    prompt = runner.compute(Batch(0, Context(0, PROMPT, list(range(len(PROMPT)))).rows(0)))
    assert runner.committed_rows(prompt).all()
    tree = runner.compute(Batch(1, tree_rows(list(range(len(TOKENS))))))
    assert not runner.committed_rows(tree).any()
    # Two of the tree, and one that is not in it.
    runner.apply([Verdict(0, len(PROMPT), (TOKENS[0], TOKENS[3], 99))])
    assert np.flatnonzero(runner.committed_rows(tree)).tolist() == [0, 3]
