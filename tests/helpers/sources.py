"""Every source of `conf/source`, with what it needs beside a target and a draft."""

from __future__ import annotations

from pathlib import Path


def chosen(source: str, *, truth: Path, mid: Path) -> list[str]:
    """The overrides; `truth` is what synthetic drafts know, `mid` a cascade's second model."""
    overrides = [f"source={source}"]
    if source.startswith("synthetic"):
        overrides.append(f"source.truth={truth}")
    if source == "cascade":
        overrides.append(f"model.mid={mid}")
    return overrides
