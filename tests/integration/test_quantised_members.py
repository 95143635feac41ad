"""Tensor-parallel members that share weights of few bits: on the boundaries of their groups."""

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipespec.engine.inspection.inspection import inspect
from pipespec.engine.low_bit.kept_linear import GgmlLinear
from pipespec.transport.tp_group import TPProcessGroup
from tests.helpers import few_bits
from tests.helpers.decoding import decode, load
from tests.helpers.members import together
from tests.helpers.models import NUM_LAYERS

PROMPT = torch.arange(20, 33)
NEW_TOKENS = 8
GGUF_TYPES = ("Q4_0", "Q4_K", "Q6_K", "Q8_0")
# One of each way in which parts are read, and experts.
OFTEN = (("awq", "mixtral"),)
# Columns of an MLP are 6 groups of 32, heads of attention are of one group each.
SIZES = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 32, "num_attention_heads": 4}


def made(folder: Path, form: str, model_type: str) -> Path:
    sizes = SIZES
    if form in few_bits.FP8S:  # blocks of 128 by 128
        sizes = {"hidden_size": 128, "intermediate_size": 640, "head_dim": 128, "vocab_size": 700}
    if form in GGUF_TYPES:  # blocks of up to 256 columns
        sizes = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 256}
    return few_bits.make(folder, form, model_type, **sizes)


@pytest.mark.parametrize(
    ("form", "model_type"),
    [
        case if case in OFTEN else pytest.param(*case, marks=pytest.mark.long)
        for case in itertools.product((*few_bits.FORMS, *GGUF_TYPES), ("llama", "mixtral"))
    ],
)
def test_members_share_weights_of_few_bits(tmp_path, form, model_type, long):
    """Dequantised, they have the tokens of the whole; kept in few bits, one text for all slices and
    batches. The memory of each is foretold."""
    path = made(tmp_path, form, model_type)
    info = inspect(path)
    whole = decode(load(path, 1, dtype=torch.float32), PROMPT, 5, NEW_TOKENS)
    kept = info.weight_format(None, "auto", "bfloat16")
    for size in (2, 4) if long else (2,):

        def member(group: TPProcessGroup) -> tuple[list[list[int]], list[int]]:
            plain = load(path, 2, group, dtype=torch.float32)
            tokens = [decode(plain, PROMPT, 5, NEW_TOKENS)]
            how = {"dtype": torch.bfloat16, "quantization": kept}
            (one,) = load(path, 1, group, **how)
            tokens += [
                decode(parts, PROMPT, chunk, NEW_TOKENS)
                for parts, chunk in (([one], 13), (load(path, 2, group, **how), 1))
            ]
            return tokens, [sum(each.num_weight_bytes for each in plain), one.num_weight_bytes]

        found = together(size, member)
        texts, _ = found[0]
        assert [tokens for tokens, _ in found] == [texts] * size, "the members agree"
        assert texts[0] == whole
        if kept is not None:
            assert texts[1] == texts[2]
        for _, held in found:
            for dtype, form_held, num_bytes in zip(
                ("float32", "bfloat16"), (None, kept), held, strict=True
            ):
                of_whole = info.loaded(dtype, form_held)
                foretold = info.loaded_part(of_whole, size, dtype).total
                assert num_bytes <= 1.1 * foretold, (size, dtype)


def _stored(model: torch.nn.Module) -> dict[str, Tensor]:
    """All weights that a model holds; of those that ggml multiplies, products with each column."""
    layers = {n: each for n, each in model.named_modules() if isinstance(each, GgmlLinear)}
    columns = {
        name: each.product(torch.eye(each.in_features, dtype=torch.float32))
        for name, each in layers.items()
    }
    return dict(model.state_dict()) | columns


def test_a_member_reads_no_codes_or_scales_of_another(tmp_path):
    """Neither rows nor columns: the first member has the same weights if those are other bits."""
    path = made(tmp_path, "awq", "llama")
    damaged = tmp_path / "damaged"
    shutil.copytree(path, damaged)
    tensors = load_file(path / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if not name.endswith((".qweight", ".qzeros", ".scales")):
            continue
        others = tensor[:, tensor.shape[1] // 2 :]
        if ".o_proj" in name or ".down_proj" in name:
            others = tensor[len(tensor) // 2 :]
        noise = torch.randint(0, 2**14, others.shape, generator=random)
        others.copy_(noise.to(tensor.dtype))
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})

    def state(group: TPProcessGroup, kept: str | None) -> list[dict[str, Tensor]]:
        held = [
            load(each, 1, group, dtype=torch.bfloat16, quantization=kept)[0]
            for each in (path, path if group.rank else damaged)
        ]
        return [_stored(each.base) for each in held]

    for kept in ("int4", None):
        intact, other = together(2, lambda group, kept=kept: state(group, kept))[0]
        assert len(intact) > 4 * NUM_LAYERS
        assert all(torch.equal(tensor, other[name]) for name, tensor in intact.items())
