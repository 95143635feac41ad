"""How tensors of a GGUF file make the tensors of a checkpoint of safetensors files, in which each
expert of a mixture has matrices of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipespec.engine.formats.gguf_architectures import GgufArchitecture
from pipespec.engine.formats.gguf_file import GgufFile
from pipespec.engine.formats.gguf_metadata import ROPE_FACTORS, not_valid
from pipespec.engine.formats.matrix_packing import WEIGHT
from pipespec.errors import ModelError
from pipespec.system.silence_warnings import silence_warnings

if TYPE_CHECKING:  # headers are read without it
    import numpy as np

# A tensor of the file as it is.
ROWS = "rows"
# A stack `[experts, out, in]`, or the rows of two in turns, transposed to `[experts, in, out]`.
TRANSPOSED = "transposed"
# The numbers of one or two in turns, `[..., out]`.
NUMBERS = "numbers"
# Numbers that are stored plus 1.
SHIFTED = "shifted"
# The two parts of the matrix that expands the latent vectors of K and V: for each head the one for
# K, transposed, and the one for V.
LATENT = "latent"
# The ends of names whose tensors llama.cpp names in another way: what follows the name of the
# module in its table, and the end of its own.
_UNLIKE = {"e_score_correction_bias": ("e_score_correction", "bias"), "sinks": ("sinks", "weight")}
_PARTNERS = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint.

    Attributes:
        names: of the tensors in the file that it is made of.
        shape: in the checkpoint.
        expert: which of the experts that are stored together it is of; None: of none.
        form: ROWS, TRANSPOSED, NUMBERS, SHIFTED or LATENT.
        heads: of queries or keys, in which the rows of the two halves of each take turns; 0: they
            are in Hugging Face's order.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    expert: int | None = None
    form: str = ROWS
    heads: int = 0

    def order(self, count: int) -> np.ndarray | None:
        """Which row of the file each of so many rows is; None: they are in order."""
        import numpy as np

        if not self.heads:
            return None
        return np.arange(count).reshape(self.heads, -1, 2).swapaxes(1, 2).reshape(-1)


def stored_matrix(stored: Mapping[str, Stored], name: str) -> Stored:
    """A matrix that can stay in few bits: a tensor, or of a transposed stack the expert whose
    number ends the name."""
    if (found := stored.get(name + WEIGHT)) is not None:
        return found
    stack, _, expert = name.rpartition(".")
    return replace(stored[stack], expert=int(expert))


def in_turns(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Matrices `[..., rows, columns]`, one or the rows of two in turns."""
    import numpy as np

    if len(parts) == 1:
        return parts[0]
    *outer, rows, columns = parts[0].shape
    return np.stack(parts, -2).reshape(*outer, 2 * rows, columns)


def joined(form: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The weights of a tensor, given those of its parts."""
    import numpy as np

    if form == LATENT:
        keys, values = parts  # [heads, latent, of K], [heads, of V, latent]
        both = np.concatenate((keys.swapaxes(1, 2), values), 1)
        return both.reshape(-1, both.shape[-1])
    if form == NUMBERS:
        return np.stack(parts, -1).reshape(*parts[0].shape[:-1], -1)
    if form == SHIFTED:
        return parts[0] - 1
    whole = in_turns(parts)
    return whole.swapaxes(-1, -2) if form == TRANSPOSED else whole


def names_of(file: GgufFile, architecture: GgufArchitecture, config: Any) -> dict[str, Stored]:
    """Each tensor of a checkpoint that the file has. Raises ModelError."""
    import torch
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers import AutoModelForCausalLM

    of_kind = next((arch for arch, name in MODEL_ARCH_NAMES.items() if name == file.kind), None)
    if of_kind is None:
        raise ModelError(
            f"{file.path} holds {file.kind}, which this version of gguf does not know; renew it"
        )
    layers = int(file.field("block_count"))  # with those that are not loaded
    known = get_tensor_name_map(of_kind, layers)
    shapes = file.shapes
    try:
        with silence_warnings(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # model code may raise anything for invalid values
        raise not_valid(file, error) from error
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    heads_of = {".attn_q.": config.num_attention_heads, ".attn_k.": kv_heads}
    of_halves = heads_of if architecture.in_turns else {}
    found: dict[str, Stored] = {}
    for name, tensor in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        if stem.endswith(".experts"):
            found |= _experts(name, architecture, shapes)
            continue
        theirs = f"{known.get_name(stem)}.{suffix}"
        if suffix in _UNLIKE:
            theirs = f"{known.get_name(f'{stem}.{_UNLIKE[suffix][0]}')}.{_UNLIKE[suffix][1]}"
        if theirs in shapes:
            shape = shapes[theirs]
            if shape == tuple(tensor.shape[1:]) and tensor.shape[0] == 1:
                shape = tuple(tensor.shape)
            shifted = architecture.shifted and theirs.endswith("norm.weight")
            heads = next((size for part, size in of_halves.items() if part in theirs), 0)
            found[name] = Stored((theirs,), shape, None, SHIFTED if shifted else ROWS, heads)
        elif stem.endswith(".kv_b_proj"):
            parts = tuple(theirs.replace("attn_kv_b", f"attn_{part}_b") for part in "kv")
            if all(len(shapes.get(part, ())) == 3 for part in parts):
                (heads, latent, of_keys), (_, of_values, _) = (shapes[part] for part in parts)
                shape = heads * (of_keys + of_values), latent
                found[name] = Stored(parts, shape, form=LATENT)
    unused = *ROPE_FACTORS, *(f"blk.{i}." for i in range(config.num_hidden_layers, layers))
    homeless = shapes.keys() - {part for each in found.values() for part in each.names}
    if homeless := {theirs for theirs in homeless if not theirs.startswith(unused)}:
        without = f"{config.model_type} of Transformers has no place for"
        example = f"for example {min(homeless)}"
        raise file.unread(f"holds {len(homeless)} tensors that {without}, {example}")
    return found


def _experts(
    name: str, architecture: GgufArchitecture, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Stored]:
    """The matrices, or biases, of the experts of a layer that Transformers has in one stack."""
    stem, _, stack = name.rpartition(".")
    is_bias = stack.endswith("_bias")
    parts = ("gate", "up") if stack.startswith("gate_up") else ("down",)
    layer = next(part for part in stem.split(".") if part.isdigit())
    suffix = "bias" if is_bias else "weight"
    stored = tuple(f"blk.{layer}.ffn_{part}_exps.{suffix}" for part in parts)
    if not all(theirs in shapes for theirs in stored):
        return {}
    if architecture.transposed:
        count, out, *inputs = shapes[stored[0]]
        shape = (count, *inputs, len(stored) * out)
        return {name: Stored(stored, shape, form=NUMBERS if is_bias else TRANSPOSED)}
    found = {}
    for part, theirs in zip(parts, stored, strict=True):
        count, *of_one = shapes[theirs]
        for expert in range(count):
            ours = f"{stem}.{expert}.{architecture.experts[part]}.{suffix}"
            found[ours] = Stored((theirs,), tuple(of_one), expert)
    return found


def partner_of(name: str) -> str | None:
    """The other matrix of an expert, gate or up, that Transformers stacks with this one; None:
    there is none."""
    stem, _, part = name.rpartition(".")
    other = _PARTNERS.get(part) if ".experts." in stem else None
    return None if other is None else f"{stem}.{other}"
