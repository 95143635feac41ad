"""What the last stage knows of a sequence whose tokens it decides, and the lossy rules."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from pipespec.core import RELAXED, STRICT, Guesses, Opening, Scored
from pipespec.sampling.distribution import Tally, adjust, distribution, logprobs
from pipespec.sampling.grammar import Compile, GrammarFailed, Matcher, as_bools
from pipespec.sampling.terms import unpack


class Verifier:
    """What was asked for of one sequence, and what its text says of the next token.

    It keeps the length of the text and, if there are penalties, its tally; if there is a grammar,
    where the text stands in it. All tokens that are decided join the text, so these only ever move
    forward.
    """

    def __init__(self, opening: Opening, compile_grammar: Compile | None = None):
        """`compile_grammar` begins to compile a grammar; None: no request names one."""
        self.sampling, self.eos = unpack(opening.terms)
        self.failure: str | None = None  # why the grammar cannot be followed any further
        self._compiling = None
        if self.sampling.grammar:
            assert compile_grammar is not None
            self._compiling = compile_grammar(self.sampling.grammar)
        self._matcher: Matcher | None = None
        self._allowed: np.ndarray | None = None  # what may follow now, if there is a grammar
        self.length = opening.known
        self._prompt = opening.prompt
        self._text: Sequence[int] | None = None  # before the first decision, if it matters
        self._tally: Tally | None = None
        self._scored = 0  # tokens of the prompt whose logits were seen, if they are to be told of
        self._before: torch.Tensor | None = None  # what the last of them says of the next
        # What was guessed below each node and how likely the draft found it, and in which step.
        self._guessed: dict[int, dict[int, float]] = {}
        self._steps: deque[Guesses] = deque()

    @property
    def reads(self) -> bool:
        """Whether it must be told the text before it decides; else how many tokens there are is
        enough."""
        asked = self.sampling
        return bool(asked.penalises or asked.grammar) and self._text is None

    def read(self, text: Sequence[int]) -> None:
        """Know the text before the first token that is to be decided."""
        self._text = text

    @property
    def unscored(self) -> int:
        """How many rows of the prompt's are to come whose logits it must see."""
        return 0 if self.sampling.prompt_logprobs is None else self._prompt - self._scored

    def score(self, tokens: Sequence[int], logits: torch.Tensor) -> Scored:
        """What the target thinks of the prompt's next tokens, of whose rows these are the logits
        `[rows, vocab]`; of the text's first it thinks nothing."""
        assert self.sampling.prompt_logprobs is not None
        before = logits[:-1]
        if self._before is None:
            tokens = tokens[1:]
        else:
            before = torch.cat((self._before, before))
        told = logprobs(before, tokens, self.sampling.prompt_logprobs)
        self._scored += len(logits)
        self._before = logits[-1:].clone() if self.unscored else None
        return Scored(self._scored - len(told), tuple(told))

    def guess(self, guesses: Guesses, since: int) -> None:
        """Know what the head has fed in a step; what it fed before the step `since` is decided
        and forgotten. For lossy requests."""
        self._steps.append(guesses)
        for parent, token, logp in zip(
            guesses.parents.tolist(), guesses.tokens.tolist(), guesses.logps.tolist(), strict=True
        ):
            self._guessed.setdefault(parent, {})[token] = logp
        while self._steps and self._steps[0].step < since:
            for parent in self._steps.popleft().parents.tolist():
                self._guessed.pop(parent, None)

    def look(self) -> bool:
        """Look up what may follow now; False: the grammar does not tell (`failure`)."""
        if not self.sampling.grammar:
            return True
        try:
            if self._matcher is None:
                assert self._compiling is not None and self._text is not None
                self._matcher = self._compiling.result()
                self._matcher.consume(self._text[self._prompt :])
            self._allowed = self._matcher.allowed()
            if not self._allowed.any():
                raise GrammarFailed("nothing may follow")
        except GrammarFailed as error:
            self.failure = str(error)
        return self.failure is None

    def adjusted(self, scores: torch.Tensor) -> torch.Tensor:
        """The next token's logits after what was asked for, float64 `[vocab]`; those given, if
        nothing was. What may follow was looked up."""
        sampling = self.sampling
        if sampling.penalises and self._tally is None:
            assert self._text is not None, "the text before was not read"
            prompt, answer = self._text[: self._prompt], self._text[self._prompt :]
            self._tally = Tally(prompt, answer, len(scores), scores.device)
        if sampling.logit_bias or sampling.penalises:
            scores = adjust(scores, sampling, self._tally)
        ends = [token for token in self.eos if token < len(scores)]
        if self.length - self._prompt >= sampling.min_tokens:
            ends = []
        if self._allowed is not None:
            allowed = as_bools(self._allowed, len(scores))
            if allowed.sum() > allowed[ends].sum():  # a text that must end here ends
                allowed[ends] = False
            barred = torch.from_numpy(~allowed).to(scores.device)
            return scores.masked_fill(barred, -torch.inf)
        if ends:
            scores = scores.clone()
            scores[ends] = -torch.inf
        return scores

    def preferred(self, node: int, scores: torch.Tensor) -> int | None:
        """The token after a node that a lossy rule takes, given the adjusted logits `[vocab]`;
        None: the target's own."""
        sampling, guesses = self.sampling, self._guessed.get(node, {})
        if sampling.acceptance == RELAXED:
            return relaxed(scores, guesses, self.eos)
        if sampling.acceptance == STRICT:
            return strict(distribution(scores, sampling), guesses, self.eos)
        return None

    def append(self, token: int) -> None:
        """The text goes on with a token."""
        if self._tally is not None:
            self._tally.append(token)
        if self._matcher is not None and token not in self.eos:
            self._matcher.consume([token])
        self.length += 1


def relaxed(scores: torch.Tensor, guesses: Collection[int], eos: Sequence[int]) -> int | None:
    """SpecPipe 3.4: "from the candidate tokens, select the one with the highest probability under
    the large model", the end of the text being one of them; None: nothing was guessed.

    `scores` are the target's, `[vocab]`; of equals the lowest id is taken. -inf: not now.
    """
    if not any(scores[token] > -torch.inf for token in guesses):
        return None
    candidates = {*guesses, *(token for token in eos if token < len(scores))}
    return max(candidates, key=lambda token: (float(scores[token]), -token))


def strict(logprobs: torch.Tensor, guesses: Mapping[int, float], eos: Sequence[int]) -> int | None:
    """SpecPipe 3.4: "accept a draft token if it lies within the top-p cumulative probability set
    of the large model, and within that set choose the token with the highest draft-model
    probability"; None: no guess lies there.

    `logprobs` `[vocab]` is the distribution that is drawn from, whose finite part is that set.
    The end of the text is a candidate beside the guesses; of a draft that did not propose it, it
    has the target's probability.
    """
    inside = {token: logp for token, logp in guesses.items() if logprobs[token] > -torch.inf}
    if not inside:
        return None
    ends = {token: float(logprobs[token]) for token in eos if token < len(logprobs)}
    return max((ends | inside).items(), key=lambda pair: (pair[1], -pair[0]))[0]
