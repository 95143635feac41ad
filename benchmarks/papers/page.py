"""Write the tables of docs/papers.md from the stored results of benchmarks/results/.

A block of the page between `<!-- papers: NAME -->` and `<!-- end of papers -->` is the table of
that name, with the commands, machines, commits and dates of its numbers.

    python -m benchmarks.papers.page          # writes the blocks
    python -m benchmarks.papers.page --check  # exit code 1 if a block is not up to date
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from benchmarks.common.experiment import ROOT
from benchmarks.pages.stored_results import origin
from benchmarks.papers.missing import MISSING
from tools.docs.markdown import table

PAGE = ROOT / "docs" / "papers.md"
RESULT = ROOT / "benchmarks" / "results" / "papers.json"
BLOCK = re.compile(r"(<!-- papers: (?P<name>\w+) -->\n).*?(<!-- end of papers -->)", re.DOTALL)
HEADINGS = {
    "figure": "in the paper",
    "quantity": "quantity",
    "paper": "paper",
    "ours": "ours [95 %]",
    "verdict": "ours is",
    "conditions": "over, or under which conditions",
}
ABSENT = ("paper", "figure", "shows", "instead, or why not")


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of rows with the same keys, which head its columns."""
    cells = [[str(value).replace("|", "\\|") for value in row.values()] for row in rows]
    return table([*rows[0]], cells)


def compared(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of figures beside each other."""
    return markdown([{HEADINGS[key]: row[key] for key in HEADINGS} for row in rows])


def blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """The text of every block."""
    found = {
        "source": f"`papers.json`: {origin(result)}: `{result['command']}`\n",
        "missing": markdown([dict(zip(ABSENT, astuple(each), strict=True)) for each in MISSING]),
    }
    for paper in dict.fromkeys(row["of"] for row in result["rows"]):
        found[paper.lower()] = compared([row for row in result["rows"] if row["of"] == paper])
    return found


def updated(text: str) -> str:
    """The page with the blocks as the stored result has them."""
    found = blocks(json.loads(RESULT.read_text()))
    return BLOCK.sub(lambda block: f"{block[1]}{found[block['name']]}{block[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    text = PAGE.read_text()
    if text == updated(text):
        return
    if options.check:
        sys.exit("docs/papers.md is not up to date; run python -m benchmarks.papers.page")
    PAGE.write_text(updated(text))


if __name__ == "__main__":
    main()
