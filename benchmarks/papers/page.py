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
from typing import Any

from benchmarks.common.experiment import ROOT
from benchmarks.papers.__main__ import simulated_title
from benchmarks.papers.missing import MISSING
from tools.docs.stored_results import hardware

PAGE = ROOT / "docs" / "papers.md"
RESULT = ROOT / "benchmarks" / "results" / "papers.json"
BLOCK = re.compile(r"(<!-- papers: (?P<name>\w+) -->\n).*?(<!-- end of papers -->)", re.DOTALL)
HEADINGS = {
    "figure": "in the paper",
    "quantity": "quantity",
    "paper": "paper",
    "ours": "ours [95 %]",
    "verdict": "ours is",
    "baseline": "over, or under which conditions",
}


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of rows with the same keys, which head its columns."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "".join(f"| {' | '.join(map(_text, line))} |\n" for line in lines)


def _text(value: Any) -> str:
    return str(value).replace("|", "\\|")


def compared(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of figures beside each other."""
    return markdown([{HEADINGS[key]: row[key] for key in HEADINGS} for row in rows])


def blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """The text of every block."""
    made = f"{hardware(result)}, commit {result['commit']}, {result['date']}"
    what = "TBT by width and children, and throughput over vLLM's pipeline"
    found = {
        "source": f"`papers.json`: {made}: `{result['command']}`\n",
        "plot": f"![{what}](../benchmarks/results/papers.svg)\n",
        "missing": _missing(),
    }
    for paper in dict.fromkeys(row["of"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["of"] == paper]
        found[paper.lower()] = f"**{simulated_title(paper)}**\n\n{compared(rows)}"
    for grid in result["grids"]:
        title = f"**SIMULATED, SYNTHETIC draft: {grid['title']}**"
        found[f"grid_{grid['name']}"] = f"{title}\n\n{markdown(grid['rows'])}"
    return found


def _missing() -> str:
    return markdown(
        [
            {
                "paper": each.paper,
                "figure": each.figure,
                "shows": each.shows,
                "instead, or why not": each.why,
            }
            for each in MISSING
        ]
    )


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
