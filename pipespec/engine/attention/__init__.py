"""Attention over KV slots, one class for each backend."""
