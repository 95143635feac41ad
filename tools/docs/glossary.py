"""`python -m tools.docs.glossary` writes docs/statistics.md from the dashboard's own glossary."""

from __future__ import annotations

import json
import re

from tools.docs.markdown import ROOT, table

SOURCE = ROOT / "pipespec" / "extras" / "pages" / "page" / "glossary.js"
PAGE = ROOT / "docs" / "statistics.md"
HEAD = """\
# Glossary

<!-- Written by `python -m tools.docs.glossary` from pipespec/extras/pages/page/glossary.js. -->

The words of the [dashboard](serving.md#dashboard), which shows these meanings by a hover, and the
names by which [statistics](#statistics) and [metrics](metrics.md) have them.
"""
TAIL = """
## Statistics

`pipespec generate` prints the main ones to standard error; `generate --stats` and `bench` print
all, with `--json` as one object; the [Python API](python-api.md) returns them with each output.
`trace=FILE.json` writes what each rank did, with its rows by kind, for <https://ui.perfetto.dev>.
"""
Entry = tuple[str, str, list[str], list[str]]


def glossary() -> dict[str, list[Entry]]:
    """The groups of words: of each the meaning, and its names in statistics and metrics."""
    (found,) = re.findall(r"^const GLOSSARY = (\{.*?^\});$", SOURCE.read_text(), re.M | re.S)
    found = re.sub(r"^  (\w+):", r'"\1":', found, flags=re.M)
    return json.loads(re.sub(r",(\s*[\]}])", r"\1", found))  # type: ignore[no-any-return]


def page() -> str:
    """The text of docs/statistics.md."""
    text = HEAD
    for title, words in glossary().items():
        rows = [
            [word, meaning, *(", ".join(f"`{name}`" for name in names) for names in lists)]
            for word, meaning, *lists in words
        ]
        text += f"\n## {title}\n\n" + table(("word", "meaning", "statistic", "metric"), rows)
    return text + TAIL


if __name__ == "__main__":
    PAGE.write_text(page())
