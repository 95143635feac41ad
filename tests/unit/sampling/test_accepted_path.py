"""The accepted path through a batch, whose rows may be of any depth."""

from collections.abc import Sequence

from pipespec.sampling.verifier import AcceptedPath

#          id  parent token drawn after it
ROWS = [
    (10, 9, 5, 7),  # the tip
    (11, 10, 6, 1),  # rejected
    (12, 10, 7, 8),  # accepted
    (13, 12, 8, 3),  # accepted, one deeper
    (14, 13, 2, 4),  # rejected
    (15, 11, 7, 9),  # below a rejected one
]


def path_tokens(tip: int, rows: Sequence[tuple[int, int, int, int]]) -> list[int]:
    """The tokens of the path through some of the rows."""
    nodes, parents, tokens, drawn = (list(column) for column in zip(*rows, strict=True))
    path = AcceptedPath(tip, nodes, parents, tokens)
    while path.row is not None:
        path.append(drawn[path.row])
    return path.tokens


def test_accepted_path_ends_one_token_after_the_accepted_draft_tokens():
    assert path_tokens(10, ROWS) == [7, 8, 3]


def test_accepted_path_is_empty_without_the_tip():
    assert path_tokens(99, ROWS) == []


def test_matching_token_below_a_rejected_one_is_not_accepted():
    assert path_tokens(10, [row for row in ROWS if row[0] != 12]) == [7]
