"""Readers of checkpoints whose weights are stored in another format than they are computed in."""
