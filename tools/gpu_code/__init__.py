"""Checks the kernels for GPUs on machines without one: what they compile to, and what that does."""
