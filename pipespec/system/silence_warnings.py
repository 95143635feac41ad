"""Silences packages that warn of what the user cannot change, such as missing kernels."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# torchao, which Transformers imports wherever it is installed, what it touches, and bitsandbytes.
_NOISY_PACKAGES = ("torchao", "torch.utils._pytree", "bitsandbytes")


@contextmanager
def silence_warnings() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _NOISY_PACKAGES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
