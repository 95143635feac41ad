"""The text part of a multimodal checkpoint: its config, and the names of its tensors. Pure.

Such a checkpoint has the config of its language model in `text_config`, and prefixes before the
names of its tensors. The language model is loaded alone, by the names that it has without them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pipespec.engine.formats.architectures import WRAPPERS

TEXT_CONFIG = "text_config"
# Fields that a multimodal config may have outside of `text_config`.
_SHARED = ("quantization_config", "eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype")
# Prefixes of the base model and of the output head, as Transformers 5 and 4 save them.
_BASE = re.compile(r"^(?:model\.language_model\.(?:model\.)?|language_model\.model\.)")
_HEAD = re.compile(r"^(?:model\.)?(?:language_model\.)?(?=lm_head\.)")


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text part; the config itself of a model that is not multimodal."""
    if raw.get("model_type") not in WRAPPERS or not isinstance(raw.get(TEXT_CONFIG), dict):
        return raw
    inner: Mapping[str, Any] = raw[TEXT_CONFIG]
    shared = {name: raw[name] for name in _SHARED if raw.get(name) is not None}
    usual = {"model_type": WRAPPERS[raw["model_type"]]}
    return usual | shared | {name: value for name, value in inner.items() if value is not None}


def text_type(raw: Mapping[str, Any]) -> str | None:
    """The type of the text part of any multimodal model; None: it names none."""
    inner = raw.get(TEXT_CONFIG)
    found = inner.get("model_type") if isinstance(inner, dict) else None
    return found if isinstance(found, str) else None


def text_names(stored: Iterable[str]) -> dict[str, str]:
    """The tensors of the text part: the name that each has in the language model, by its name in
    the files. Other tensors are left out; a checkpoint without prefixes keeps all."""
    names = list(stored)
    if not any(_BASE.match(name) for name in names):
        return {name: name for name in names}
    found = {}
    for name in names:
        if _BASE.match(name):
            found[name] = _BASE.sub("model.", name)
        elif _HEAD.match(name):
            found[name] = _HEAD.sub("", name)
    return found
