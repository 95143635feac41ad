"""Distinguishes draft models from heads for another model, which are refused.

EAGLE, Medusa, MTP and DFlash heads propose from the target's hidden states. In a pipeline these are
available n steps after a token entered the first stage, but draft tokens are needed n steps before
that. So only models whose input is tokens can be drafts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pipespec.errors import ModelError
from pipespec.limits import MAX_COUNT, MAX_PARALLEL, fault

# Tokens that a parallel draft proposes per pass unless its config.json has a value: the K with
# which PARD (arXiv 2504.18583) was trained.
PARALLEL_TOKENS = 8

MASK_TOKEN, TOKENS = "pard_token", "pard_tokens"


def refuse_draft_head(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelError if config.json is that of a draft head."""
    kind = _head(config)
    if kind is not None:
        raise _refused(path, kind)


def refuse_eagle_head(path: Path, tensors: Collection[str]) -> None:
    """Raise ModelError if the tensors are those of an EAGLE head whose config.json looks like that
    of a model: `fc` merges embeddings with the target's states; `midlayer` is EAGLE-3's."""
    if "fc.weight" in tensors:
        eagle_3 = any(name.startswith("midlayer.") for name in tensors)
        raise _refused(path, "an EAGLE-3 head" if eagle_3 else "an EAGLE head")


def parallel_draft(path: Path, config: Mapping[str, Any]) -> tuple[int | None, int]:
    """The mask token of a parallel draft, and how many tokens it proposes per pass; (None, 1) for
    other models. Raises ModelError."""
    if config.get(MASK_TOKEN) is None:
        return None, 1
    tokens = config.get(TOKENS, PARALLEL_TOKENS)
    most = config.get("vocab_size")
    wrong = fault(MASK_TOKEN, config[MASK_TOKEN], 0, most - 1 if type(most) is int else MAX_COUNT)
    wrong = wrong or fault(TOKENS, tokens, 1, MAX_PARALLEL)
    if wrong:
        raise ModelError(f"{path / 'config.json'}: {wrong[:-1]}; fetch the checkpoint again")
    return config[MASK_TOKEN], tokens


def _head(config: Mapping[str, Any]) -> str | None:
    """The kind of draft head that a config.json describes, in words; None: it is not a head.

    Recognised by the fields that the projects write: `speculators_model_type`
    (vllm-project/speculators), `dflash_config` (z-lab/dflash), `medusa_num_heads`
    (FasterDecoding/Medusa), model types and architectures as vLLM and SGLang name them,
    `draft_vocab_size` (EAGLE-3, SafeAILab/EAGLE). P-EAGLE has a `pard_token` but is a head too."""
    model_type = str(config.get("model_type", "")).lower()
    named = config.get("architectures")
    names = " ".join(map(str, named)).lower() if isinstance(named, list) else ""
    if "speculators_model_type" in config:
        return f"a head of speculators ({config['speculators_model_type']!s:.40})"
    if "dflash_config" in config or "dflash" in names:
        return "a DFlash head"
    if "medusa_num_heads" in config or model_type == "medusa" or "medusa" in names:
        return "Medusa heads"
    if model_type.endswith("_mtp") or "mtp" in names:
        return "an MTP head"
    if "eagle3" in names or "draft_vocab_size" in config:
        return "an EAGLE-3 head"
    if model_type.startswith("eagle") or "eagle" in names:
        return "an EAGLE head"
    return None


def _refused(path: Path, kind: str) -> ModelError:
    return ModelError(
        f"{path} holds {kind}, which proposes tokens from the target's hidden states, but in a "
        "pipeline these leave the last stage too late; take a small model with the same "
        "vocabulary, a parallel draft (PARD), or proposer=suffix, which needs no draft"
    )
