"""Bytes that are here, that are still to come, and that are neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipespec.cluster.weight_arrivals import Arrivals
from pipespec.engine.checkpoint_parts.ranges import RangeSet
from pipespec.errors import ModelError

FILE = Path("m.safetensors")


def test_only_bytes_that_are_to_come_are_waited_for() -> None:
    arrivals = Arrivals()
    arrivals.set(FILE, RangeSet([(0, 10)]))
    arrivals.expect({FILE: RangeSet([(10, 20), (30, 40)])})
    assert arrivals.wait_for(FILE, (0, 10), 0)
    assert not arrivals.wait_for(FILE, (5, 15), 0)
    arrivals.came(FILE, (10, 15))
    assert arrivals.wait_for(FILE, (5, 15), 0)
    for part in ((15, 21), (20, 30), (39, 41)):
        with pytest.raises(ModelError, match="are neither here nor fetched in this start"):
            arrivals.wait_for(FILE, part, 60)
    with pytest.raises(ModelError, match=r"bytes 0 to 1 of other\.safetensors are neither"):
        arrivals.wait_for(Path("other.safetensors"), (0, 1), 60)
