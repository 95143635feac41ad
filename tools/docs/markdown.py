"""What the tools that write pages of documentation share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [" | ".join(cell.replace("|", r"\|") for cell in cells) for cells in (headings, *rows)]
    first, *others = [f"| {line} |" for line in lines]
    return "\n".join([first, "|" + "---|" * len(headings), *others]) + "\n"


def by_hand(page: Path) -> str:
    """What a generated page says before its first section, which is written in it by hand."""
    return page.read_text(encoding="utf-8").partition("\n## ")[0]
