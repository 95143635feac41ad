"""The lossy acceptance rules of SpecPipe, which prefer draft tokens (docs/sampling.md)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from pipespec.system.device_copy import to_device, to_host


def relaxed(scores: Tensor, draft_tokens: Collection[int], eos: Sequence[int]) -> int | None:
    """SpecPipe 3.4: "from the candidate tokens, select the one with the highest probability under
    the large model", the end of the text being one of them; None: there are no draft tokens.

    `scores` are the target's adjusted logits, `[vocab]`; -inf: not allowed. Of equals the lowest
    token id is taken.
    """
    found = _values(scores, draft_tokens, eos)
    if not any(found[token] > -math.inf for token in draft_tokens):
        return None
    return max(found, key=lambda token: (found[token], -token))


def strict(logprobs: Tensor, draft_tokens: Mapping[int, float], eos: Sequence[int]) -> int | None:
    """SpecPipe 3.4: "accept a draft token if it lies within the top-p cumulative probability set
    of the large model, and within that set choose the token with the highest draft-model
    probability"; None: no draft token is in the set.

    `logprobs` `[vocab]` is the distribution to draw from, whose finite part is that set.
    `draft_tokens` have the draft's log-probabilities. The end of the text is a candidate too, with
    the target's log-probability if the draft did not propose it.
    """
    found = _values(logprobs, draft_tokens, eos)
    inside = {token: logp for token, logp in draft_tokens.items() if found[token] > -math.inf}
    if not inside:
        return None
    ends = {token: found[token] for token in eos if token in found}
    return max((ends | inside).items(), key=lambda pair: (pair[1], -pair[0]))[0]


def _values(scores: Tensor, draft_tokens: Collection[int], eos: Sequence[int]) -> dict[int, float]:
    """The scores of the draft tokens, and of the ends of the text that the model knows, if there
    are draft tokens; the host waits for the device once."""
    if not draft_tokens:
        return {}
    tokens = [*{*draft_tokens, *(token for token in eos if token < len(scores))}]
    (found,) = to_host(scores.index_select(0, to_device(torch.tensor(tokens), scores.device)))
    return dict(zip(tokens, found.tolist(), strict=True))
