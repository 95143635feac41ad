"""Checkpoints of which a host has the parts that it computes: folders, files and their sources."""
