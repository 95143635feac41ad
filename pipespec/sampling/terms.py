"""How a request's tokens are to be decided, as bytes that travel with its first rows.

Only the last stage reads them. What has its default is left out, so most are a few bytes.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from pipespec.core import Sampling

_DEFAULTS = asdict(Sampling())


def pack(sampling: Sampling, eos: tuple[int, ...]) -> bytes:
    """`eos` are the tokens that end the text."""
    changed = {name: value for name, value in asdict(sampling).items() if value != _DEFAULTS[name]}
    return json.dumps([changed, eos], separators=(",", ":")).encode()


def unpack(terms: bytes) -> tuple[Sampling, tuple[int, ...]]:
    """The inverse of `pack`."""
    changed, eos = json.loads(terms)
    if "logit_bias" in changed:
        changed["logit_bias"] = tuple(map(tuple, changed["logit_bias"]))
    return Sampling(**changed), tuple(eos)
