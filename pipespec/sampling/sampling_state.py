"""The sampling state of one sequence at the last stage: its parameters, and what depends on its
tokens."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import torch

from pipespec.core import RELAXED, STRICT, DraftTokens, PromptLogprobs, SequenceStart
from pipespec.sampling.distribution import TokenCounts, adjust, distribution, logprobs
from pipespec.sampling.grammar import Compile, GrammarFailed, unpack_mask
from pipespec.sampling.wire_format import unpack
from pipespec.system.device_copy import to_device, to_host
from pipespec.system.fair_thread import FairThread


class SamplingState:
    """The sampling parameters of a sequence, and the state that the next token depends on.

    That is the text's length and, with penalties, its token counts, with a grammar, its matcher.
    Every decided token is appended to the text, so the state only moves forward.
    """

    def __init__(
        self,
        start: SequenceStart,
        compile_grammar: Compile | None = None,
        masks: FairThread | None = None,
    ):
        """`compile_grammar` begins to compile a grammar, and `masks` follows the text in it; None:
        no request has one."""
        self.sampling, self.eos = unpack(start.params)
        self.failure: str | None = None  # why the grammar cannot be followed any further
        if self.sampling.grammar:
            assert compile_grammar is not None and masks is not None
            self._masks, self._compiling = masks, compile_grammar(self.sampling.grammar)
        self._mask: Future[np.ndarray] | None = None  # of the next token, once it is asked for
        self._allowed: np.ndarray | None = None  # the tokens that may follow, if there is a grammar
        self.length = start.committed_len
        self._prompt_len = start.prompt_len
        self._text: Sequence[int] | None = None  # before the first decision, if it is needed
        self._counts: TokenCounts | None = None
        self._scored = 0  # tokens of the prompt whose logits were scored
        self.prompt_failed = False  # whether any of these logits is not finite
        self._before: torch.Tensor | None = None  # the last of these logits
        # The draft tokens below each node with their log-probabilities, and by step (lossy rules).
        self._draft_tokens: dict[int, dict[int, float]] = {}
        self._draft_steps: deque[DraftTokens] = deque()

    @property
    def needs_text(self) -> bool:
        """Whether `set_text` must be called before the first decision."""
        sampling = self.sampling
        return bool(sampling.has_penalties or sampling.grammar) and self._text is None

    def set_text(self, text: Sequence[int]) -> None:
        self._text = text

    @property
    def num_unscored(self) -> int:
        """How many rows of the prompt are left to score (`score_prompt`)."""
        return 0 if self.sampling.prompt_logprobs is None else self._prompt_len - self._scored

    def score_prompt(self, tokens: Sequence[int], logits: torch.Tensor) -> PromptLogprobs:
        """The log-probabilities of the prompt's next tokens, given the logits of their rows
        `[rows, vocab]`. The first token of the text has none, and none has any from the first on
        whose logits are not finite (`prompt_failed`)."""
        assert self.sampling.prompt_logprobs is not None
        before = logits[:-1]
        if self._before is None:
            tokens = tokens[1:]
        else:
            before = torch.cat((self._before, before))
        found = logprobs(before, tokens, self.sampling.prompt_logprobs)
        # -inf: the token cannot follow. NaN: the row is not a distribution.
        self.prompt_failed |= any(math.isnan(each.logprob) for each in found)
        self._scored += len(logits)
        if self.prompt_failed:
            found = []
        self._before = logits[-1:].clone() if self.num_unscored else None
        return PromptLogprobs(self._scored - len(found), tuple(found))

    def add_draft_tokens(self, draft_tokens: DraftTokens, since: int) -> None:
        """Add the draft tokens that the head sent in a step, for lossy rules; those of steps before
        `since` are decided and dropped."""
        self._draft_steps.append(draft_tokens)
        for parent, token, logp in zip(
            draft_tokens.parents.tolist(),
            draft_tokens.tokens.tolist(),
            draft_tokens.logps.tolist(),
            strict=True,
        ):
            self._draft_tokens.setdefault(parent, {})[token] = logp
        while self._draft_steps and self._draft_steps[0].step < since:
            for parent in self._draft_steps.popleft().parents.tolist():
                self._draft_tokens.pop(parent, None)

    def update_allowed(self) -> bool:
        """Look up which tokens may follow. False: that is not known yet, or the grammar cannot be
        followed (`failure`)."""
        if not self.sampling.grammar:
            return True
        try:
            if self._mask is None:
                if not self._masks.wait_for(self._compiling):
                    return False
                assert self._text is not None
                self._follow(self._text[self._prompt_len :])
            assert self._mask is not None
            if not self._masks.wait_for(self._mask):
                return False
            self._allowed = self._mask.result()
            if not self._allowed.any():
                raise GrammarFailed("nothing may follow")
        except GrammarFailed as error:
            self.failure = str(error)
        return self.failure is None

    def _follow(self, tokens: Sequence[int]) -> None:
        """Begin to compute the mask that follows these tokens."""
        matcher = self._compiling.result()

        def mask() -> np.ndarray:
            matcher.consume(tokens)
            return matcher.allowed()

        self._mask = self._masks.submit(self.sampling.grammar, mask)

    def adjust(self, scores: torch.Tensor) -> torch.Tensor:
        """The next token's logits `[vocab]` after bias, penalties and what is barred, float64;
        `scores` itself if there is none of these. Call `update_allowed` before."""
        sampling = self.sampling
        if sampling.has_penalties and self._counts is None:
            assert self._text is not None, "set_text was not called"
            prompt, answer = self._text[: self._prompt_len], self._text[self._prompt_len :]
            self._counts = TokenCounts(prompt, answer, len(scores), scores.device)
        if sampling.logit_bias or sampling.has_penalties:
            scores = adjust(scores, sampling, self._counts)
        ends = [token for token in self.eos if token < len(scores)]
        if self.length - self._prompt_len >= sampling.min_tokens:
            ends = []
        if self._allowed is not None:
            allowed = unpack_mask(self._allowed, len(scores))
            if allowed.sum() > allowed[ends].sum():  # a text that must end here ends
                allowed[ends] = False
            return scores.masked_fill(to_device(~allowed, scores.device), -torch.inf)
        if ends:
            barred = to_device(torch.tensor(ends), scores.device)
            return scores.index_fill(0, barred, -torch.inf)
        return scores

    def lossy_choice(self, node: int, scores: torch.Tensor) -> int | None:
        """The token after a node that a lossy rule chooses, given the adjusted logits `[vocab]`;
        None: the target's own."""
        sampling, draft_tokens = self.sampling, self._draft_tokens.get(node, {})
        if sampling.acceptance == RELAXED:
            return relaxed(scores, draft_tokens, self.eos)
        if sampling.acceptance == STRICT:
            return strict(distribution(scores, sampling), draft_tokens, self.eos)
        return None

    def append(self, token: int) -> None:
        if self._counts is not None:
            self._counts.append(token)
        if self._mask is not None and token not in self.eos:
            self._follow([token])
        self.length += 1


# --- the lossy acceptance rules of SpecPipe, which prefer draft tokens (docs/sampling.md) ---------


def relaxed(scores: torch.Tensor, draft_tokens: Collection[int], eos: Sequence[int]) -> int | None:
    """SpecPipe 3.4: "from the candidate tokens, select the one with the highest probability under
    the large model", the end of the text being one of them; None: there are no draft tokens.

    `scores` are the target's adjusted logits, `[vocab]`; -inf: not allowed. Of equals the lowest
    token id is taken.
    """
    found = _values(scores, draft_tokens, eos)
    if not any(found[token] > -math.inf for token in draft_tokens):
        return None
    return max(found, key=lambda token: (found[token], -token))


def strict(
    logprobs: torch.Tensor, draft_tokens: Mapping[int, float], eos: Sequence[int]
) -> int | None:
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


def _values(
    scores: torch.Tensor, draft_tokens: Collection[int], eos: Sequence[int]
) -> dict[int, float]:
    """The scores of the draft tokens, and of the ends of the text that the model knows, if there
    are draft tokens; the host waits for the device once."""
    if not draft_tokens:
        return {}
    tokens = [*{*draft_tokens, *(token for token in eos if token < len(scores))}]
    (found,) = to_host(scores.index_select(0, to_device(torch.tensor(tokens), scores.device)))
    return dict(zip(tokens, found.tolist(), strict=True))
