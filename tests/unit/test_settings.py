"""Fields of settings: their limits are checked, and what they say of themselves can be read."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest

from pipespec.errors import ConfigError
from pipespec.settings import REQUIRED, about, check_settings, kinds, setting


@dataclass(frozen=True)
class Example:
    folder: str = setting(REQUIRED, "Where.", visible=False)
    rows: int = setting(4, "How many.", "rows", limits=(1, 8))
    seconds: float | None = setting(None, "How long.", "s", limits=(0, 9), above=True)
    sizes: list[int] = setting([2], "Of each.", limits=(1, 8), hint=", or nothing: []")
    mode: str | None = setting("fast", "Which way.", choices=("fast", "safe"))
    groups: Any = setting(None, "Together.", kind=int | list[int] | None)

    def __post_init__(self) -> None:
        check_settings("example", self)


def test_defaults_and_limits_themselves_are_accepted() -> None:
    assert Example("x").rows == 4
    assert Example("x", rows=8, seconds=0.1, sizes=[], mode=None, groups=[1]).mode is None


def test_default_list_is_not_shared() -> None:
    Example("x").sizes.append(3)
    assert Example("x").sizes == [2]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"rows": 9}, "example.rows is 9, but must be a whole number from 1 to 8."),
        ({"rows": 2.5}, "example.rows is 2.5, but must be a whole number from 1 to 8."),
        ({"seconds": 0}, "example.seconds is 0, but must be a number above 0 and at most 9."),
        ({"seconds": float("nan")}, "example.seconds is nan, but must be a number above 0"),
        ({"sizes": [2, 0]}, "example.sizes is 0, but must be a whole number from 1 to 8, or nothi"),
        ({"mode": "fats"}, "example.mode is 'fats'; did you mean fast? (choose from fast, safe)."),
    ],
)
def test_value_beyond_the_limits_of_its_field_is_refused(
    wrong: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Example("x", **wrong)
    assert str(caught.value).startswith(sentence)


def test_setting_without_default_must_be_given_and_secret_is_not_shown() -> None:
    with pytest.raises(TypeError):
        Example()  # type: ignore[call-arg]
    assert "hunter2" not in repr(Example("hunter2"))


def test_type_unit_and_help_of_a_setting_can_be_read() -> None:
    by_name = {entry.name: about(entry) for entry in fields(Example)}
    assert (by_name["rows"].unit, by_name["rows"].help) == ("rows", "How many.")
    assert kinds(Example)["groups"] == (int | list[int] | None)
    assert kinds(Example)["seconds"] == (float | None)
