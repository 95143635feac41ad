"""Ranks 1..n: receive, compute, verify, prune, send."""
