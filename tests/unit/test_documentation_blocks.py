"""A page fails with a command of its blocks, which the tests of documented commands rely on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.documentation import Block, Page
from tests.helpers.sandbox import Sandbox


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with Sandbox(tmp_path) as sandbox:
        yield Page(sandbox)


def console(text: str, **marks: str) -> Block:
    return Block("page.md", 1, "console", text, marks)


def test_command_that_fails_or_prints_something_else_fails_the_page(page: Page) -> None:
    with pytest.raises(AssertionError, match=r"page\.md:1: false"):
        page.run(console("$ false\n$ true\n"))
    with pytest.raises(AssertionError, match="not b"):
        page.run(console("$ echo a\nb\n"))
    with pytest.raises(AssertionError, match="not last"):
        page.run(console("$ echo first last\nlast ... first\n"))
    page.run(console("$ echo it took .48 ms and more\ntook 12.5 ms ... more\n"))
    page.run(console("$ true\n$ exit 3\n", exit="3"))
