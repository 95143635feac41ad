"""Which layers each stage holds."""

from __future__ import annotations

from itertools import pairwise

from pipespec.errors import ConfigError


def split_evenly(num_layers: int, num_stages: int) -> list[range]:
    """Contiguous slices whose sizes differ by one at most; the later ones are the shorter.

    The last stage also computes the head, so it should not be among the longest. Raises
    ConfigError if a stage would be left without a layer.
    """
    if num_stages > num_layers:
        raise ConfigError(
            f"cluster.stages is {num_stages}, but the target has only {num_layers} layers; "
            f"use at most {num_layers} stages."
        )
    size, longer = divmod(num_layers, num_stages)
    starts = [stage * size + min(stage, longer) for stage in range(num_stages + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
