"""The reference of settings is written from their dataclasses; test_docs.py compares the page."""

import re

from tools.settings_reference import page


def test_default_that_differs_between_choices_is_given_for_each() -> None:
    assert "`proposer.rounds` (`auto`; `1` with `suffix`): " in page()
    assert "| `null`; required with `url` |" in page()


def test_few_settings_are_those_of_users() -> None:
    tables = page().partition("## Experimental")[0].splitlines()
    counted = [line for line in tables if re.match(r"\| `(\w+\.\w+|trace)` \|", line)]
    assert len(counted) <= 45
