"""Time as an argument: the product passes `monotonic_ns`, a test passes a counter."""

from __future__ import annotations

import time
from collections.abc import Callable

# Nanoseconds since an arbitrary moment that all processes of one machine share.
Clock = Callable[[], int]

monotonic_ns: Clock = time.monotonic_ns
