"""Every code block of README and docs does what its page says, or is marked with why not.

`tests/helpers/documentation.py` has the marks. To list what is not run:

    python -m pytest -rP tests/acceptance/test_documented_commands.py -k not_run
"""

from itertools import chain
from pathlib import Path

import pytest

from tests.helpers.documentation import LANGUAGES, PARSED, RUN, Block, Page, blocks, pages
from tests.helpers.sandbox import Sandbox

SHORTEST_REASON = 3  # words


def tried(page: Path) -> list[Block]:
    """The blocks of a page that are run, parsed or written into files."""
    return [
        block
        for block in blocks(page)
        if (block.language in (*RUN, *PARSED) or "file" in block.marks) and block.not_run is None
    ]


def cases(*, slow: bool) -> list[object]:
    """The pages that have such blocks; slow ones with the others of their page."""
    return [
        pytest.param(page, id=tried(page)[0].page)
        for page in pages()
        if any(block.slow == slow for block in tried(page))
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", cases(slow=False))
def test_commands_of_a_page_work(page: Path, tmp_path: Path) -> None:
    run_all(tmp_path, [block for block in tried(page) if not block.slow])


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", cases(slow=True))
def test_commands_of_a_page_work_slow_ones_too(page: Path, tmp_path: Path) -> None:
    run_all(tmp_path, tried(page))


def run_all(folder: Path, found: list[Block]) -> None:
    with Sandbox(folder) as sandbox:
        run = Page(sandbox)
        for block in found:
            run.run(block)


def test_blocks_that_are_not_run_say_why() -> None:
    """The list is what this test prints."""
    for block in chain.from_iterable(map(blocks, pages())):
        assert block.language in LANGUAGES, f"{block.place} is of no known language"
        if block.not_run is not None:
            print(f"{block.place}: {block.not_run}")
            assert block.language in (*RUN, *PARSED), f"{block.place} is never run"
            assert len(block.not_run.split()) >= SHORTEST_REASON, block.place
