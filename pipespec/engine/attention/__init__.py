"""Attention over the slots of a batch, one class for each backend."""
