"""GPUs and networks that people have, for plans of clusters that do not exist yet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipespec.errors import ConfigError
from pipespec.limits import suggest

MAX_GPUS = 64
# Assumed shares of the stated bandwidth and arithmetic that a stage reaches.
BANDWIDTH_SHARE, ARITHMETIC_SHARE = 0.8, 0.6
# Assumed: of a GPU's memory, what weights and KV can have.
MEMORY_SHARE = 0.92


@dataclass(frozen=True)
class GPU:
    """Memory in GiB, bandwidth in GB/s, and arithmetic in teraflops, all as stated."""

    name: str
    memory_gib: float
    gb_per_s: float
    tflops: float

    @property
    def usable_bytes(self) -> float:
        """For weights and KV."""
        return self.memory_gib * 2**30 * MEMORY_SHARE

    def ms(self, num_bytes: float, flops: float) -> float:
        """To read so many bytes of weights and compute with them: the longer of both."""
        reading = num_bytes / (self.gb_per_s * 1e9 * BANDWIDTH_SHARE)
        computing = flops / (self.tflops * 1e12 * ARITHMETIC_SHARE)
        return 1e3 * max(reading, computing)


# GeForce by the architecture white papers of Ampere GA102, Ada and RTX Blackwell, all others by the
# data sheet of the card.
TABLE = Path(__file__).with_name("gpus.json")
GPUS = {name: GPU(name, *figures) for name, figures in json.loads(TABLE.read_text()).items()}


def parse_gpus(parts: Sequence[str]) -> list[GPU]:
    """The GPUs of `NAME:COUNT` or `NAME`, in their order. Raises ConfigError."""
    found: list[GPU] = []
    for part in parts:
        name, _, count = part.partition(":")
        gpu = GPUS.get(name.lower())
        if gpu is None:
            raise ConfigError(
                f"The GPU {name!r} is not known; {suggest(name.lower(), list(GPUS))}. For others "
                "measure a stage and give stage_ms."
            )
        if count and not (count.isdecimal() and int(count) > 0):
            raise ConfigError(f"{part!r} is no number of GPUs; write NAME:COUNT, as in rtx3090:4.")
        found += [gpu] * int(count or 1)
    if len(found) > MAX_GPUS:
        raise ConfigError(f"{len(found)} GPUs are too many; give at most {MAX_GPUS}.")
    return found
