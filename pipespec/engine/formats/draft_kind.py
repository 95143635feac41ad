"""Distinguishes draft models from heads for another model, which `proposer=head` alone takes.

EAGLE, Medusa, MTP and DFlash heads propose from the target's hidden states. In a full pipeline
these are available n steps after a token entered the first stage, but draft tokens are needed n
steps before that. So drafts of other proposers are models whose input is tokens.
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

# What tells heads from models: fields of config.json, and parts of their names in lower case.
_FIELDS = ("speculators_model_type", "dflash_config", "medusa_num_heads", "draft_vocab_size")
_KINDS = ("eagle", "medusa", "mtp", "dflash")
MASK_TOKEN, TOKENS = "pard_token", "pard_tokens"


def refuse_draft_head(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelError if config.json is that of a draft head.

    Recognised by the fields that the projects write, `speculators_model_type`
    (vllm-project/speculators), `dflash_config` (z-lab/dflash), `medusa_num_heads`
    (FasterDecoding/Medusa) and `draft_vocab_size` (EAGLE-3, SafeAILab/EAGLE), and by model types
    and architectures as vLLM and SGLang name them. P-EAGLE has a `pard_token` but is a head too."""
    named = config.get("architectures")
    names = [config.get("model_type"), *(named if isinstance(named, list) else ())]
    text = " ".join(map(str, names)).lower()
    if any(field in config for field in _FIELDS) or any(kind in text for kind in _KINDS):
        raise _refused(path)


def refuse_eagle_head(path: Path, tensors: Collection[str]) -> None:
    """Raise ModelError if the tensors are those of an EAGLE head whose config.json looks like that
    of a model: `fc` merges embeddings with the target's states."""
    if "fc.weight" in tensors:
        raise _refused(path)


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


def _refused(path: Path) -> ModelError:
    return ModelError(
        f"{path} holds a head for another model (EAGLE, Medusa, MTP or DFlash), which proposes "
        "tokens from the target's hidden states; an EAGLE-3 head is for proposer=head, which keeps "
        "one batch in the pipeline; for a full pipeline take a small model with the same "
        "vocabulary, a parallel draft (PARD), or proposer=suffix, which needs no draft"
    )
