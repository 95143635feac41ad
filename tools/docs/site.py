"""Hooks of the documentation site (`mkdocs.yml`): files from outside `docs/`.

Pages link to the pictures of `benchmarks/results/` as `../benchmarks/results/NAME`, so that they
also show on GitHub; the site has them in `results/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE, INSIDE = "../benchmarks/results/", "results/"


def on_files(files: Files, config: Any) -> Files:
    """Add the pictures of the stored results."""
    for picture in sorted((ROOT / "benchmarks" / "results").glob("*.svg")):
        source = INSIDE + picture.name
        files.append(File.generated(config, source, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to stored results point into the site."""
    up = "../" * page.file.src_uri.count("/")
    return markdown.replace(up + OUTSIDE, up + INSIDE)
