"""The reference of settings is written from their dataclasses, and up to date."""

from __future__ import annotations

from dataclasses import fields

from pipespec.config.choices import groups, options, read_choice
from tools.settings_reference import PAGE, page


def test_docs_settings_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `python -m tools.settings_reference`"


def test_every_choice_and_every_setting_is_in_the_reference() -> None:
    rows = {line.split("|")[1].strip().split(" ")[0] for line in page().splitlines() if "|" in line}
    for group in groups():
        for name in options(group):
            assert f"`{name}`" in rows
            assert {f"`{group}.{f.name}`" for f in fields(read_choice(group, name).cls)} <= rows


def test_default_that_differs_between_choices_is_given_for_each() -> None:
    assert "| `auto`; `1` with `suffix` |" in page()
    assert "| `null`; required with `url` |" in page()
