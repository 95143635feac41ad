"""The reference of settings is written from their dataclasses, and up to date."""

from __future__ import annotations

import re

from tools.settings_reference import PAGE, page


def test_docs_settings_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `python -m tools.settings_reference`"


def test_default_that_differs_between_choices_is_given_for_each() -> None:
    assert "`proposer.rounds` (`auto`; `1` with `suffix`): " in page()
    assert "| `null`; required with `url` |" in page()


def test_few_settings_are_those_of_users() -> None:
    tables = page().partition("## Experimental")[0].splitlines()
    counted = [line for line in tables if re.match(r"\| `(\w+\.\w+|trace)` \|", line)]
    assert len(counted) <= 45
