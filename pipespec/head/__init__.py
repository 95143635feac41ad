"""Rank 0: the tree of guesses, the policies that feed it, the draft that grows it."""
