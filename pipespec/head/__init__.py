"""Rank 0: the scheduler, the trees of draft tokens, the policies and the proposers."""
