"""A tree of draft tokens against a dictionary of texts, and its invariants."""

import numpy as np

from pipespec.head.tree import MIN_PROBABILITY, ROOT, Tree

Text = tuple[int, ...]  # below the root


def check_tree(tree: Tree) -> None:
    """Assert what the rest of the code relies on."""
    index = np.arange(len(tree))
    assert tree.parent[ROOT] == ROOT and tree.cum[ROOT] == 0
    assert tree.num_fed == np.count_nonzero(tree.fed)
    assert (tree.parent[1:] < index[1:]).all(), "a parent comes before its children"
    assert (np.diff(tree.position) >= 0).all(), "breadth-first order"
    assert (tree.position[1:] == tree.position[tree.parent[1:]] + 1).all()
    assert (tree.parent_id[1:] == tree.id[tree.parent[1:]]).all()
    assert len(set(tree.id.tolist())) == len(tree)
    assert np.allclose(tree.cum[1:], tree.cum[tree.parent[1:]] + tree.logp[1:])
    siblings = list(zip(tree.parent[1:].tolist(), tree.token[1:].tolist(), strict=True))
    assert len(set(siblings)) == len(siblings), "siblings differ in their token"


def texts_of(tree: Tree) -> dict[Text, int]:
    """Every node by what it and those above it say, below the root."""
    found = {tuple(tree.token[tree.path(i)[1:]].tolist()): i for i in range(len(tree))}
    assert len(found) == len(tree), "a text stands twice"
    return found


class TextTree:
    """The log-probabilities that a tree is to hold, by text."""

    def __init__(self) -> None:
        self.logp: dict[Text, float] = {(): 0.0}

    def expand(self, said: dict[Text, dict[int, float]]) -> None:
        """`said`: log-probabilities of what follows some texts."""
        for above, row in said.items():
            left = max(1 - sum(np.exp([*row.values()])), MIN_PROBABILITY)
            bound = min([*row.values(), float(np.log(left))])
            for text in [text for text in self.logp if text and text[:-1] == above]:
                self.logp[text] = min(self.logp[text], bound)
            self.logp |= {(*above, token): logp for token, logp in row.items()}

    def cum(self, text: Text) -> float:
        return sum(self.logp[text[:end]] for end in range(len(text) + 1))
