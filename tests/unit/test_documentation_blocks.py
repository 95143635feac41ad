"""How code blocks are read from Markdown, which the tests of documented commands rely on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.documentation import (
    Block,
    Page,
    blocks,
)
from tests.helpers.sandbox import Sandbox

TEXT = """\
Text.

<!-- slow -->
<!-- exit: 2 -->
```console
$ false
```

- item

  ```text
  a
  ```

<!-- not run: needs two hosts -->
```bash
true
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with Sandbox(tmp_path) as sandbox:
        yield Page(sandbox)


def console(text: str, **marks: str) -> Block:
    return Block("page.md", 1, "console", text, marks)


def test_blocks_have_language_text_and_marks(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(TEXT)
    first, second, third = blocks(tmp_path / "page.md")
    assert (first.language, first.text, first.slow, first.line) == ("console", "$ false\n", True, 5)
    assert first.marks["exit"] == "2"
    assert (second.language, second.text, second.marks) == ("text", "a\n", {})
    assert third.not_run == "needs two hosts"


def test_command_that_fails_or_prints_something_else_fails_the_page(page: Page) -> None:
    with pytest.raises(AssertionError, match=r"page\.md:1: false"):
        page.run(console("$ false\n$ true\n"))
    with pytest.raises(AssertionError, match="not b"):
        page.run(console("$ echo a\nb\n"))
    with pytest.raises(AssertionError, match="not last"):
        page.run(console("$ echo first last\nlast ... first\n"))
    page.run(console("$ echo it took .48 ms and more\ntook 12.5 ms ... more\n"))
    page.run(console("$ true\n$ exit 3\n", exit="3"))
