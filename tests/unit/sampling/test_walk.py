"""The acceptance loop of the last stage: it never assumes one depth per batch."""

from collections.abc import Sequence

from pipespec.sampling.decide import Walk

#          id  parent token drawn after it
ROWS = [
    (10, 9, 5, 7),  # the tip
    (11, 10, 6, 1),  # a wrong guess
    (12, 10, 7, 8),  # right
    (13, 12, 8, 3),  # right, one deeper
    (14, 13, 2, 4),  # wrong
    (15, 11, 7, 9),  # below a wrong guess
]


def walked(tip: int, rows: Sequence[tuple[int, int, int, int]]) -> list[int]:
    """What the walk gives through some of the rows."""
    nodes, parents, tokens, drawn = (list(column) for column in zip(*rows, strict=True))
    walk = Walk(tip, nodes, parents, tokens)
    while walk.row is not None:
        walk.go_on(drawn[walk.row])
    return walk.tokens


def test_the_walk_follows_right_guesses_and_ends_one_token_beyond_them():
    assert walked(10, ROWS) == [7, 8, 3]


def test_the_walk_is_empty_when_the_tip_is_not_in_the_batch():
    assert walked(99, ROWS) == []


def test_a_right_guess_below_a_wrong_one_does_not_count():
    assert walked(10, [row for row in ROWS if row[0] != 12]) == [7]
