"""Devices of this machine that compute."""

from __future__ import annotations


def num_cuda() -> int:
    """How many CUDA devices torch can use, which is imported only here."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
