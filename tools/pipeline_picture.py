"""Draw which rows each stage computed in each step, from the traces of two requests.

    pipespec generate ... cluster.stages=4 policy=root trace=plain.json
    pipespec generate ... cluster.stages=4 trace=speculative.json
    python -m tools.pipeline_picture plain.json speculative.json docs/images/pipeline.svg

`make pictures` runs these. The rows of a step are in the counter events of a trace
(`pipespec/trace.py`).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from pipespec.trace import ROWS

KINDS = ("committed", "draft", "pruned")
COLOURS = {"committed": "#1b5e8c", "draft": "#4fa3d8", "pruned": "#c3ccd5"}
LEGEND = {
    "committed": "prompt",
    "draft": "last token and draft tokens",
    "pruned": "draft tokens that a verdict ruled out in this step",
}
STEPS = 24  # of each panel
CELL, ROW, GAP = 34, 4, 8  # pixels: a step's width, a row's height, between stages
LEFT, TOP = 86, 60


@dataclass(frozen=True)
class Grid:
    """The rows of each stage in each step, `stages[stage][step]`, by kind."""

    stages: list[list[dict[str, int]]]

    @property
    def most(self) -> int:
        """The largest number of rows of a stage in a step."""
        return max(sum(rows.values()) for stage in self.stages for rows in stage)


def read_grid(trace: Path) -> Grid:
    """The rows that a trace counts; ValueError if it counts none.

    A stage counts once a step. It idles in the first steps, before the first batch reaches it, and
    counts no rows in these.
    """
    counted: dict[int, list[dict[str, int]]] = {}
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event["ph"] == "C" and event["name"].startswith(ROWS):
            counted.setdefault(event["tid"], []).append(event["args"])
    if not counted:
        raise ValueError(f"{trace} has no rows; write it with trace=FILE of this version.")
    # Stage i computes its first batch i - 1 steps after the first stage.
    idle = dict.fromkeys(KINDS, 0)
    return Grid([[idle] * number + counted[rank] for number, rank in enumerate(sorted(counted))])


def draw(panels: list[tuple[str, Grid]], steps: int = STEPS) -> str:
    """An SVG with a panel for each (title, grid): stages below one another, steps side by side."""
    parts: list[str] = []
    y = TOP
    for title, grid in panels:
        parts.append(_text(LEFT, y - 12, title, weight="bold"))
        for number, stage in enumerate(grid.stages, 1):
            height = grid.most * ROW
            parts.append(_text(LEFT - 10, y + height - 6, f"stage {number}", anchor="end"))
            for step in range(steps):
                x = LEFT + step * CELL
                parts.append(_rect(x, y, CELL - 3, height, "#f3f5f7", "step"))
                rows = stage[step] if step < len(stage) else {}
                top = y + height
                for kind in KINDS:
                    for _ in range(rows.get(kind, 0)):
                        top -= ROW
                        parts.append(_rect(x, top, CELL - 3, ROW - 1, COLOURS[kind], kind))
            y += height + GAP
        y += TOP - 16
    parts.append(_text(LEFT, y - 22, f"{steps} steps of the pipeline, one column each →"))
    x = LEFT
    for kind in KINDS:
        parts.append(_rect(x, y - 8, 14, 9, COLOURS[kind], "legend"))
        parts.append(_text(x + 20, y, LEGEND[kind]))
        x += 34 + 7 * len(LEGEND[kind])
    width, height = LEFT + steps * CELL + 14, y + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13" fill="#24292f">'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _rect(x: float, y: float, width: float, height: float, colour: str, kind: str) -> str:
    return (
        f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" fill="{colour}"/>'
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}">{text}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plain", type=Path, help="trace of a request with policy=root")
    parser.add_argument("speculative", type=Path, help="trace of the same request, speculating")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    options = parser.parse_args()
    panels = [
        ("Pipeline parallel: one token crosses the pipeline at a time", read_grid(options.plain)),
        ("pipespec: draft tokens fill the pipeline", read_grid(options.speculative)),
    ]
    options.picture.write_text(draw(panels))


if __name__ == "__main__":
    main()
