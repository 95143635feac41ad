"""Finds failed ranks, and begins the next epoch."""
