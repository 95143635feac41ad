"""Write the figures of README.md and of pages of docs/ from the stored results of the benchmarks.

A block of a page between `<!-- figures: NAME -->` and `<!-- end of figures -->` is written by the
function of that name, from the files of `benchmarks/results/`.

    python -m benchmarks.pages.figures
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping

from benchmarks.pages import benchmark_tables, decision_table
from tools.docs.markdown import ROOT

DOCS = ROOT / "docs"
PAGES = (
    ROOT / "README.md",
    DOCS / "benchmarks.md",
    DOCS / "gpus.md",
    DOCS / "peers.md",
    DOCS / "planning.md",
    DOCS / "sampling.md",
)
BLOCK = re.compile(r"(<!-- figures: (?P<name>\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
BLOCKS: Mapping[str, Callable[[], str]] = {
    "results": decision_table.short,
    "decision": decision_table.long,
    **benchmark_tables.BLOCKS,
}


def updated(text: str) -> str:
    """A text whose blocks of figures are those of the stored results."""
    return BLOCK.sub(lambda found: found[1] + BLOCKS[found["name"]]() + found[3], text)


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    for page in PAGES:
        page.write_text(updated(page.read_text()))


if __name__ == "__main__":
    main()
