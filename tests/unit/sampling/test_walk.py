"""The acceptance loop of the last stage: it never assumes one depth per batch."""

from pipespec.sampling.verifier import walk

#          id  parent token drawn after it
ROWS = [
    (10, 9, 5, 7),  # the tip
    (11, 10, 6, 1),  # a wrong guess
    (12, 10, 7, 8),  # right
    (13, 12, 8, 3),  # right, one deeper
    (14, 13, 2, 4),  # wrong
    (15, 11, 7, 9),  # below a wrong guess
]
COLUMNS = [list(column) for column in zip(*ROWS, strict=True)]


def test_the_walk_follows_right_guesses_and_ends_one_token_beyond_them():
    nodes, parents, tokens, drawn = COLUMNS
    assert walk(10, nodes, parents, tokens, drawn.__getitem__) == [7, 8, 3]


def test_the_walk_is_empty_when_the_tip_is_not_in_the_batch():
    nodes, parents, tokens, drawn = COLUMNS
    assert walk(99, nodes, parents, tokens, drawn.__getitem__) == []


def test_a_right_guess_below_a_wrong_one_does_not_count():
    nodes, parents, tokens, drawn = ([row[i] for row in ROWS if row[0] != 12] for i in range(4))
    assert walk(10, nodes, parents, tokens, drawn.__getitem__) == [7]
