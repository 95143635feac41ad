"""Transports: how batches travel from one rank to the next."""
