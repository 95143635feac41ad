"""The lossy acceptance rules of SpecPipe, which prefer draft tokens (docs/sampling.md)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor


def relaxed(scores: Tensor, draft_tokens: Collection[int], eos: Sequence[int]) -> int | None:
    """SpecPipe 3.4: "from the candidate tokens, select the one with the highest probability under
    the large model", the end of the text being one of them; None: there are no draft tokens.

    `scores` are the target's adjusted logits, `[vocab]`; -inf: not allowed. Of equals the lowest
    token id is taken.
    """
    if not any(scores[token] > -float("inf") for token in draft_tokens):
        return None
    candidates = {*draft_tokens, *(token for token in eos if token < len(scores))}
    return max(candidates, key=lambda token: (float(scores[token]), -token))


def strict(logprobs: Tensor, draft_tokens: Mapping[int, float], eos: Sequence[int]) -> int | None:
    """SpecPipe 3.4: "accept a draft token if it lies within the top-p cumulative probability set
    of the large model, and within that set choose the token with the highest draft-model
    probability"; None: no draft token is in the set.

    `logprobs` `[vocab]` is the distribution to draw from, whose finite part is that set.
    `draft_tokens` have the draft's log-probabilities. The end of the text is a candidate too, with
    the target's log-probability if the draft did not propose it.
    """
    inside = {
        token: logp for token, logp in draft_tokens.items() if logprobs[token] > -float("inf")
    }
    if not inside:
        return None
    ends = {token: float(logprobs[token]) for token in eos if token < len(logprobs)}
    return max((ends | inside).items(), key=lambda pair: (pair[1], -pair[0]))[0]
