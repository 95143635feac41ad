"""The combinations of settings that the suite tries, and those that only `--long` does."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def some_of(*factors: Iterable[Any], share: int = 2) -> list[Any]:
    """Every combination of one value from each, for `parametrize`; all but one in `share` of them
    are `long`.

    A value remains if another factor has `share` values or more. Of two factors, each value remains
    beside one in `share` of the other's; of three and more, if every second combination remains, so
    does every pair of values of any two.
    """
    chosen = []
    for places in product(*(enumerate(values) for values in factors)):
        marks = [pytest.mark.long] if sum(index for index, _ in places) % share else []
        values = [value for _, value in places]
        chosen.append(pytest.param(*values, marks=marks, id="-".join(map(_name, values))))
    return chosen


def _name(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
