"""The sampling parameters of a request as bytes, which the batch that starts its sequence carries.

Only the last stage reads them. Fields with default values are left out, so most take a few bytes.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from pipespec.core import SamplingParams

_DEFAULTS = asdict(SamplingParams())


def pack(sampling: SamplingParams, eos: tuple[int, ...]) -> bytes:
    """`eos`: the tokens that end the text."""
    values = {name: getattr(sampling, name) for name in _DEFAULTS}  # asdict copies a long bias
    changed = {name: value for name, value in values.items() if value != _DEFAULTS[name]}
    return json.dumps([changed, eos], separators=(",", ":")).encode()


def unpack(params: bytes) -> tuple[SamplingParams, tuple[int, ...]]:
    """The inverse of `pack`."""
    changed, eos = json.loads(params)
    if "logit_bias" in changed:
        changed["logit_bias"] = tuple(map(tuple, changed["logit_bias"]))
    return SamplingParams(**changed), tuple(eos)
