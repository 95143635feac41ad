"""A request for which a proposer drafts, without a head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from pipespec.core import Verdict
from pipespec.head.proposer import Context, Proposal, ProposalRequest, Proposer
from pipespec.head.tree import ROOT, Tree


@dataclass
class Drafted:
    """A text that a proposer knows, and its tree, at first the last token alone."""

    proposer: Proposer
    context: Context
    tree: Tree

    @classmethod
    def start(cls, proposer: Any, tokens: Sequence[int], number: int = 0, **more: Any) -> Self:
        """A prompt; `more` is of its `Context`."""
        nodes = list(range(len(tokens)))
        context = Context(number, list(tokens), nodes, prompt_len=len(tokens), **more)
        proposer.start_sequence(context)
        last = len(tokens) - 1
        return cls(proposer, context, Tree(last, last - 1, tokens[-1], last, fed=True))

    def asked(self, nodes: Sequence[int] | np.ndarray = (ROOT,), **more: Any) -> ProposalRequest:
        """What a head asks; `more` is of the `ProposalRequest`."""
        return ProposalRequest(self.context, self.tree, np.array(nodes), **more)

    def propose(
        self, children: int, nodes: Sequence[int] | np.ndarray = (ROOT,), **more: Any
    ) -> Proposal | None:
        """A draft round for this request alone."""
        (found,) = self.proposer.propose([self.asked(nodes, **more)], children)
        return found

    def add(self, found: Proposal) -> int:
        """Add a proposal to the tree; the number of its nodes."""
        return self.tree.add_children(found.parents, found.tokens, found.logps, None, found.paths)

    def decide(self, *tokens: int) -> None:
        """What the head does with a verdict."""
        base = len(self.context.tokens)
        for token in tokens:
            self.tree.advance([token])
            self.context.tokens.append(token)
            self.context.nodes.append(int(self.tree.id[ROOT]))
        self.proposer.accept_verdict(Verdict(self.context.sequence, base, tokens))
