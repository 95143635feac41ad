"""What a folder holds that somebody takes for a draft: a model, or a head for another model.

EAGLE, Medusa, MTP and DFlash guess from the target's hidden states. In a pipeline these leave the
last stage, n steps after a token entered the first one, and the guesses must be made n steps
before. So such heads are refused by name, and models that read nothing but tokens are taken.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pipespec.errors import ModelError
from pipespec.limits import MAX_COUNT, MAX_PARALLEL, fault

# How many tokens a parallel draft guesses per pass whose config.json does not say so: the K that
# PARD (arXiv 2504.18583) was trained with.
PARALLEL_TOKENS = 8

MASK_TOKEN, TOKENS = "pard_token", "pard_tokens"


def require_model(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelError if config.json is that of a head."""
    kind = _head(config)
    if kind is not None:
        raise _refused(path, kind)


def require_own_embedding(path: Path, tensors: Collection[str]) -> None:
    """Raise ModelError if the tensors are those of an EAGLE head whose config.json looks like that
    of a model: `fc` merges embeddings with the target's states, and `midlayer` is EAGLE-3's."""
    if "fc.weight" in tensors:
        eagle_3 = any(name.startswith("midlayer.") for name in tensors)
        raise _refused(path, "an EAGLE-3 head" if eagle_3 else "an EAGLE head")


def parallel(path: Path, config: Mapping[str, Any]) -> tuple[int | None, int]:
    """The mask token of a parallel draft, and how many tokens it guesses per pass; of another
    model None and 1. Raises ModelError."""
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
    """What a head's config.json calls it, in words; None: it is no head's.

    By the fields that the projects write: `speculators_model_type` (vllm-project/speculators),
    `dflash_config` (z-lab/dflash), `medusa_num_heads` (FasterDecoding/Medusa), model types and
    architectures as vLLM and SGLang name them, `draft_vocab_size` (EAGLE-3, SafeAILab/EAGLE).
    P-EAGLE has a `pard_token` too and is still a head.
    """
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
        f"{path} holds {kind}, which guesses from the target's hidden states, and in a pipeline "
        "these leave the last stage only when the guesses are long needed; take a small model of "
        "the same tokens, a parallel draft (PARD), or source=ngram, which needs none"
    )
