"""Attention over the slots of a batch, one function for each backend."""
