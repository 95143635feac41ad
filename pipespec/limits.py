"""Ranges and choices of values, and the messages for values outside them. The upper limits are far
above sensible values, and low enough that a larger memory demand than the machine has is detected
at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from pipespec.errors import ConfigError
from pipespec.system.validation import shown

# Limits that several settings share.
LARGEST_PORT = 65535
MAX_STAGES = 1000
MAX_ROWS = 4096  # draft tokens in a batch
MAX_NODES = 2**20  # of a tree
MAX_PARALLEL = 64  # tokens that one pass of a draft proposes
MAX_CHILDREN = 2**20  # no vocabulary has so many tokens
MAX_COUNT = 10**9  # of values that need no memory
MAX_PRIORITY = 10**6  # lua/enqueue.lua orders by it exactly
MAX_SEED = 2**60  # a stream's number takes three more bits
MAX_MS = 1e6
MAX_SECONDS = 1e6
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
A_DEVICE = "a device is auto, cpu, cuda or cuda:N"


def fault(
    name: str,
    value: Any,
    least: float,
    most: float,
    *,
    whole: bool = True,
    above: bool = False,
    hint: str = "",
) -> str | None:
    """The message for a wrong `value`; None: it is a number from `least` to `most`. `above`: and
    more than `least`. `hint` is appended to the limits."""
    kinds = (int,) if whole else (int, float)
    if type(value) in kinds and least <= value <= most and not (above and value == least):
        return None
    kind = "a whole number" if whole else "a number"
    limits = f"above {least:g} and at most" if above else f"from {_plain(least)} to"
    return f"{name} is {shown(value)}, but must be {kind} {limits} {_plain(most)}{hint}."


def check_whole(name: str, value: Any, least: int, most: int, hint: str = "") -> None:
    wrong = fault(name, value, least, most, hint=hint)
    if wrong:
        raise ConfigError(wrong)


def check_number(
    name: str, value: Any, least: float, most: float, *, above: bool = False, hint: str = ""
) -> None:
    """Raise ConfigError unless `value` is a number from (or above) `least` to `most`."""
    wrong = fault(name, value, least, most, whole=False, above=above, hint=hint)
    if wrong:
        raise ConfigError(wrong)


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise ConfigError, with the nearest choice, if `value` is none of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name} is {shown(value)}; {suggest(value, list(choices))}.")


def suggest(value: str, known: Sequence[str], prefix: str = "") -> str:
    """The nearest of the known names, for the end of an error message."""
    near = get_close_matches(value, known, n=1)
    listed = "choose from " + ", ".join(known)
    return f"did you mean {prefix}{near[0]}? ({listed})" if near else listed


def _plain(limit: float) -> str:
    """A limit without exponent or needless zeros."""
    return str(int(limit)) if math.floor(limit) == limit else f"{limit:g}"
