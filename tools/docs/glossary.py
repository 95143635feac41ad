"""`python -m tools.docs.glossary` writes docs/statistics.md from the dashboard's own glossary."""

from __future__ import annotations

import json
import re

from tools.docs.markdown import ROOT, by_hand, table

SOURCE = ROOT / "pipespec" / "extras" / "pages" / "page" / "glossary.js"
PAGE = ROOT / "docs" / "statistics.md"
LAST = "\n## Statistics\n"  # the last section, which is written by hand too
Entry = tuple[str, str, list[str], list[str]]


def glossary() -> dict[str, list[Entry]]:
    """The groups of words: of each the meaning, and its names in statistics and metrics."""
    (found,) = re.findall(r"^const GLOSSARY = (\{.*?^\});$", SOURCE.read_text(), re.M | re.S)
    found = re.sub(r"^  (\w+):", r'"\1":', found, flags=re.M)
    return json.loads(re.sub(r",(\s*[\]}])", r"\1", found))  # type: ignore[no-any-return]


def page() -> str:
    """The text of docs/statistics.md."""
    text = by_hand(PAGE)
    for title, words in glossary().items():
        rows = [
            [word, meaning, *(", ".join(f"`{name}`" for name in names) for names in lists)]
            for word, meaning, *lists in words
        ]
        text += f"\n## {title}\n\n" + table(("word", "meaning", "statistic", "metric"), rows)
    return "".join([text, *PAGE.read_text().partition(LAST)[1:]])


if __name__ == "__main__":
    PAGE.write_text(page())
