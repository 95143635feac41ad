"""Draft heads, which propose tokens from hidden states of the target (its *features*): their kinds,
and the names of their tensors.

    EAGLE-3   (Li et al. 2025, arXiv 2503.01840) a folder of its own, as SpecForge, SGLang and vLLM
              have it: `midlayer.*`, `fc`, `norm`, `lm_head`, and `d2t`, which leads from its tokens
              to the target's. `fc` reads the outputs of some layers of the target.
    MTP       multi-token prediction (DeepSeek-AI 2024, arXiv 2412.19437): layers of the target's
              own checkpoint behind its last one (DeepSeek V3, GLM-4.5), or named `mtp`
              (Qwen3-Next). The first reads the hidden states behind the target's final norm, each
              of the others the normed states of the one before it.

All read a token together with what is known of the position before it. Pure, but for the files that
`HeadFolder` reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipespec.engine.formats.safetensors_folder import SafetensorsFolder
from pipespec.engine.formats.safetensors_headers import CONFIG, Tensor, read_json, read_tensors
from pipespec.engine.formats.slice_tensors import EMBEDDING, HEAD, UNUSED
from pipespec.errors import ModelError

EAGLE3, MTP = "LlamaForCausalLMEagle3", "MTP"
# Tensors of no module: from its tokens to the target's, as differences, and which those are.
TO_TARGET, IN_DRAFT = "d2t", "t2d"
OWN_EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
# The field of config.json with the layers whose outputs the head reads.
TAPS = "eagle_aux_hidden_state_layer_ids"
# Fields of variants of EAGLE-3, and the values that are computed.
_VARIANTS = {"norm_before_residual": False, "fc_norm": False, "norm_output": True}
# The layers of the modules that are made for an EAGLE-3 head: one for the target's, and its own.
EAGLE_LAYERS = 2
# Why other heads are not read, by what names them: fields of config.json, and parts of their type
# and architecture.
_BLOCKS = "it proposes a whole block beyond the newest features, and no tree"
_OTHERS = {
    "dflash": f"a DFlash head: {_BLOCKS}",
    "dspark": f"a DSpark head: {_BLOCKS}",
    "medusa": "Medusa heads: each proposes a position without the tokens before it",
    "pard_token": "a P-EAGLE head: it proposes several positions at once, and no tree",
    "speculators": "a head in the format of speculators: name the EAGLE-3 folder that it was made "
    "from",
    "mtp": "MTP layers in a folder of their own: they are read from the target's checkpoint, "
    "without model.draft",
}


@dataclass(frozen=True)
class DraftHead:
    """What a draft head is.

    Attributes:
        kind: EAGLE3 or MTP.
        taps: the layers of the target whose outputs it reads, rising; none: it reads the hidden
            states behind the final norm.
        layer: of its decoder layers among those of its class, each of which is made by itself.
        num_layers: which propose tokens in turn.
        parts: of its own checkpoint, as in `slice_tensors`.
        target_parts: of the target's checkpoint, which it needs too.
    """

    kind: str
    taps: tuple[int, ...]
    layer: int
    parts: frozenset[str]
    target_parts: frozenset[str] = frozenset()
    num_layers: int = 1


class HeadFolder(SafetensorsFolder):
    """A folder that holds a draft head, with all of its tensors."""

    @cached_property
    def whole(self) -> dict[str, Any]:
        return read_json(self.path / CONFIG, "a draft head has config.json and safetensors files")

    @cached_property
    def present(self) -> dict[str, Tensor]:
        return read_tensors(self.path)


def other_kind(raw: Mapping[str, Any]) -> str | None:
    """What a folder with this config.json holds instead of an EAGLE-3 head, and why it is not read;
    None: it may hold one."""
    named = raw.get("architectures")
    types = [raw.get("model_type"), *(named if isinstance(named, list) else ())]
    text = " ".join([*map(str, types), *raw]).lower()
    found = next((why for name, why in _OTHERS.items() if name in text), None)
    other = next((name for name, usual in _VARIANTS.items() if raw.get(name, usual) != usual), None)
    return found or (other and f"an EAGLE-3 head with {other}={raw[other]}, which is not computed")


def other_tensors(tensors: Collection[str]) -> str | None:
    """The same by the names of its tensors."""
    if "fc.weight" not in tensors:
        return "a model, or a head of another kind: a model is used with proposer=draft_model"
    if not any(name.startswith("midlayer.") for name in tensors):
        return "an EAGLE or EAGLE-2 head: it reads the target's last layer alone"
    return None


def eagle3_taps(path: Path, raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers of a target with so many whose outputs an EAGLE-3 head reads. SpecForge and SGLang
    name them in `eagle_config`, by their numbers; vLLM by those of the layers behind them, as
    the usual ones are: 2, the middle one, and the last but two."""
    inner = raw.get("eagle_config")
    given = inner.get(TAPS) if isinstance(inner, dict) else None
    before = 0
    if given is None:
        given, before = raw.get(TAPS) or (2, num_layers // 2, num_layers - 3), 1
    if isinstance(given, list | tuple) and all(type(each) is int for each in given):
        found = tuple(each - before for each in given)
        if found and list(found) == sorted({*found} & {*range(num_layers)}):
            return found
    raise ModelError(
        f"{path / CONFIG}: {TAPS} must name layers of the target, which has {num_layers}, in "
        "rising order; correct it, or take another head"
    )


def eagle3_names(tensors: Collection[str], layer: int) -> dict[str, str]:
    """The parameter of the model's class for each tensor of an EAGLE-3 head. Its two norms are
    parts of the one before attention."""
    own = f"model.layers.{layer}."
    found = {}
    for name in tensors:
        short = name.removeprefix("model.")
        if short.startswith("midlayer."):
            inner = short.removeprefix("midlayer.")
            inner = inner.replace("input_layernorm.", "input_layernorm.of_token.")
            found[name] = own + inner.replace("hidden_norm.", "input_layernorm.of_state.")
        elif short.startswith("fc."):
            found[name] = own + short
        elif short.startswith("norm."):
            found[name] = f"model.{short}"
        elif short == OUTPUT:
            found[name] = short
    return found


# Modules of an MTP layer beside those of the target's own, by their names there, and by those that
# Qwen3-Next has for them, which are those of all its MTP layers.
_JOIN = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
_ENDS = {"shared_head.norm.": "model.norm.", "shared_head.head.": "lm_head."}


def mtp_names(tensors: Collection[str], layer: int, number: int = 0) -> dict[str, str]:
    """The same for an MTP layer, counted from 0, in the checkpoint of a target with `layer` layers;
    empty: it is not there."""
    found = dict(_mtp_names(tensors, layer, number))
    needed = {f"model.layers.{layer}.{each}.weight" for each in ("eh_proj", "input_layernorm")}
    return found if needed <= {*found.values()} else {}


def _mtp_names(tensors: Collection[str], layer: int, number: int) -> Iterator[tuple[str, str]]:
    own, stored = f"model.layers.{layer}.", f"model.layers.{layer + number}."
    for name in tensors:
        if name.startswith(stored):
            inner = name.removeprefix(stored)
            if inner == OWN_EMBEDDING:  # the target's once more
                continue
            of = next((each for each in _ENDS if inner.startswith(each)), None)
            yield name, own + inner if of is None else _ENDS[of] + inner.removeprefix(of)
        elif name.startswith("mtp."):
            inner = name.removeprefix("mtp.")
            module = inner.split(".")[0]
            if module in _JOIN:
                yield name, own + inner.replace(module, _JOIN[module])
            elif inner.startswith(of_layer := f"layers.{number}."):
                yield name, own + inner.removeprefix(of_layer)
            elif module == "norm":
                yield name, f"model.{inner}"


EAGLE_PARTS = frozenset({EMBEDDING, HEAD})


def mtp_head(names: Collection[str], layer: int) -> DraftHead | None:
    """The MTP layers in the checkpoint of a target with `layer` layers, by its tensors; None: it
    holds none."""
    number = 0
    while mtp_names(names, layer, number):
        number += 1
    named = any(name.startswith("mtp.") for name in names)
    parts = {UNUSED} if named else {str(each) for each in range(layer, layer + number)}
    parts |= {EMBEDDING, HEAD}
    return DraftHead(MTP, (), layer, frozenset(parts), num_layers=number) if number else None
