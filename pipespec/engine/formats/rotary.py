"""How far the positions of a rotary embedding reach, and the frequencies of those that depend on
the length of a sequence.

Transformers gives `dynamic` and `longrope` other frequencies once a sequence outgrows the original
context, so K of before and after would disagree. Here they are those of a sequence as long as the
context from the first token on, as in vLLM.
"""

from __future__ import annotations

from typing import Any

GROWING = ("dynamic", "longrope")
_ORIGINAL = "original_max_position_embeddings"
# Transformers computes its frequencies without the long factors, whatever the length.
_SHORT_ALONE = "phimoe"


def reach(config: Any, claimed: int | None = None) -> tuple[int, int | None]:
    """The tokens that a model with this config of Transformers was made for; and up to how many its
    frequencies are the original ones, None: they depend on no length. `claimed`: the longest text
    that the checkpoint names elsewhere, as `max_position_embeddings` may be scaled already."""
    context = most = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    # Where layers differ, their positions are scaled already.
    of_layers = [rope.get("full_attention"), *rope.values()]
    whole = next((each for each in of_layers if isinstance(each, dict)), None)
    rope = whole or rope
    kind, factor, original = (rope.get(each) for each in ("rope_type", "factor", _ORIGINAL))
    if kind in ("linear", "yarn", *GROWING) and isinstance(factor, int | float):
        scaled = int((original or (most if whole is None else 0)) * factor)
        if kind == "linear" and not original and claimed is not None and claimed > 0:
            scaled = min(scaled, claimed)
        context = max(most, scaled)
    if kind not in GROWING or (rope.get("alpha") and config.model_type.startswith("hunyuan")):
        return context, None
    unscaled = int(original) if kind == "longrope" and original else most
    if config.model_type == _SHORT_ALONE:
        context = min(context, unscaled)
    return context, unscaled if unscaled < context else None


def fix_frequencies(model: Any, context: int) -> None:
    """Let the rotary embeddings of a loaded model have the frequencies of a sequence of `context`
    tokens, whatever the length."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for rotary in model.modules():
        of_all = getattr(rotary, "rope_type", None)
        of_layers: dict[str | None, Any] = of_all if isinstance(of_all, dict) else {None: of_all}
        for layers, kind in of_layers.items():
            if kind not in GROWING:
                continue
            held = getattr(rotary, "inv_freq" if layers is None else f"{layers}_inv_freq")
            found, _ = ROPE_INIT_FUNCTIONS[kind](
                rotary.config, held.device, seq_len=context, layer_type=layers
            )
            held.copy_(found)
            of_layers[layers] = "default"  # Transformers does not change the frequencies of these
            if layers is None:
                rotary.rope_type = "default"
