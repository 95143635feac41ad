"""Which bytes of its weight files a host has, and which are still to come to it."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from pipespec.engine.checkpoint_parts.ranges import Range, RangeSet
from pipespec.errors import ModelError


class Arrivals:
    """Several threads may use it at once."""

    def __init__(self) -> None:
        self._here: defaultdict[Path, RangeSet] = defaultdict(RangeSet)
        self._expected: Mapping[Path, RangeSet] = {}
        self._changed = threading.Condition()

    def set(self, path: Path, here: RangeSet) -> None:
        """What of a file is here."""
        with self._changed:
            self._here[path] = RangeSet(here)

    def expect(self, expected: Mapping[Path, RangeSet]) -> None:
        """What is to come, and nothing else."""
        with self._changed:
            self._expected = expected

    def came(self, path: Path, part: Range) -> None:
        """These bytes are here."""
        with self._changed:
            self._here[path].add(part)
            self._changed.notify_all()

    def wait_for(self, path: Path, part: Range, timeout_s: float) -> bool:
        """Whether these bytes are here within so many seconds. Raises ModelError at once if they
        will not come."""
        with self._changed:
            expected = self._expected.get(path, RangeSet())
            if not all(gap in expected for gap in self._here[path].gaps(part)):
                raise ModelError(
                    f"bytes {part[0]} to {part[1]} of {path} are neither here nor fetched in this "
                    "start; start again"
                )
            return self._changed.wait_for(lambda: part in self._here[path], timeout_s)
