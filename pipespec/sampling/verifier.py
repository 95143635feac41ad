"""What the last stage accepts (design: losslessness).

The target alone decides every token: its arg-max, or a draw from its own distribution with
randomness keyed by (seed, position). Only then is it asked whether the tree guessed that
token, i.e. whether the decision after it was computed already. So the tree changes when a
token is known, never which; the lossy rules are the exceptions, and say so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from pipespec.core import RELAXED, STRICT, Guesses, Opening, Scored, TokenLogprobs
from pipespec.sampling.distribution import Tally, adjust, distribution, logprobs
from pipespec.sampling.draw import draw
from pipespec.sampling.terms import unpack


class Verifier:
    """Decides the tokens of one sequence, at the last stage.

    It keeps the length of the text and, if there are penalties, its tally. All tokens that it
    decides join the text, so both only ever move forward.
    """

    def __init__(self, opening: Opening):
        self.sampling, self.eos = unpack(opening.terms)
        self.length = self._known = opening.known
        self._prompt = opening.prompt
        self._read: list[int] = []  # of the text before the first decision, if it matters
        self._tally: Tally | None = None
        self._scored = 0  # tokens of the prompt whose logits were seen, if they are to be told of
        self._before: torch.Tensor | None = None  # what the last of them says of the next
        # What was guessed below each node and how likely the draft found it, and in which step.
        self._guessed: dict[int, dict[int, float]] = {}
        self._steps: deque[Guesses] = deque()

    @property
    def reads(self) -> bool:
        """Whether it must know tokens of the text that it was not told yet; else how many there
        are is enough."""
        return self.sampling.penalises and len(self._read) < self._known

    def read(self, tokens: Sequence[int]) -> None:
        """The decided text goes on with `tokens`: what the sequence was opened with."""
        self._read += tokens

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

    def decide(
        self,
        tip: int,
        nodes: Sequence[int],
        parents: Sequence[int],
        guesses: Sequence[int],
        logits: torch.Tensor,
    ) -> tuple[list[int], list[TokenLogprobs]]:
        """The tokens that follow the tip, as far as this batch tells, and their log-probabilities.

        Args:
            tip, nodes, parents, guesses: see `walk`.
            logits: of the batch's rows, `[rows, vocab]`.

        Rows off the accepted path cost an arg-max at most: what is drawn depends on the text
        before it, so it is drawn only once that text is decided.
        """
        reports: list[TokenLogprobs] = []
        if self.sampling.plain:
            tokens = walk(tip, nodes, parents, guesses, logits.argmax(-1).tolist().__getitem__)
            self.length += len(tokens)
            return tokens, reports

        def draw_after(row: int) -> int:
            token = self._next(logits[row], self._guessed.get(nodes[row], {}))
            if self.sampling.logprobs is not None:
                reports.extend(logprobs(logits[row, None], [token], self.sampling.logprobs))
            return token

        return walk(tip, nodes, parents, guesses, draw_after), reports

    def _next(self, logits: torch.Tensor, guesses: Mapping[int, float]) -> int:
        """Decide one token from its logits `[vocab]`; the text then ends with it.

        `guesses`: what a lossy rule may prefer, with the draft's log-probabilities.
        """
        sampling = self.sampling
        if sampling.penalises and self._tally is None:
            assert not self.reads, "the text before was not read"
            prompt, answer = self._read[: self._prompt], self._read[self._prompt :]
            self._tally = Tally(prompt, answer, len(logits), logits.device)
        scores = adjust(logits, sampling, self._tally)
        if self.length - self._prompt < sampling.min_tokens:
            scores[[token for token in self.eos if token < len(scores)]] = -torch.inf
        token = None
        if sampling.acceptance == RELAXED:
            token = relaxed(scores, guesses, self.eos)
        elif sampling.acceptance == STRICT:
            token = strict(distribution(scores, sampling), guesses, self.eos)
        if token is None and sampling.temperature == 0:
            token = int(scores.argmax())
        if token is None:
            token = draw(distribution(scores, sampling), sampling.seed, self.length)
        if self._tally is not None:
            self._tally.append(token)
        self.length += 1
        return token


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


def walk(
    tip: int,
    nodes: Sequence[int],
    parents: Sequence[int],
    guesses: Sequence[int],
    draw_after: Callable[[int], int],
) -> list[int]:
    """The tokens that follow the tip, as far as this batch tells.

    Args:
        tip: node id of the last committed row.
        nodes, parents, guesses: the batch's rows `[rows]`; a guess is a row's token.
        draw_after: the token that follows a row, given its index; called along the path only.

    Returns the drawn tokens along the successor chain: empty if the tip is not in the batch,
    else one more than the number of guesses that were right.
    """
    row_of = {node: i for i, node in enumerate(nodes)}
    row_by_guess = {guess: i for i, guess in enumerate(zip(parents, guesses, strict=True))}
    accepted: list[int] = []
    row = row_of.get(tip)
    while row is not None:
        accepted.append(draw_after(row))
        row = row_by_guess.get((nodes[row], accepted[-1]))
    return accepted
