"""The plots of all benchmarks. Only this module needs matplotlib (the `bench` extra), and only when
something is drawn.

    with plot.figure(path, "Title", columns=2) as (left, right):
        plot.bars(left, groups, series, ylabel="ms")
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

# Decoding methods, from pale to dark.
METHODS = {
    "root": "#b9bec4",
    "static_tree": "#c9a66b",
    "level": "#7fa8c9",
    "two_levels": "#5b87a6",
    "best_first": "#1f4e79",
}
# For other series, in the order of use.
COLOURS = ["#1f4e79", "#c9784a", "#5b7f5b", "#8a6fa8", "#7fa8c9", "#c9a66b", "#8c9096", "#a34b5a"]
INK, NEUTRAL, FAINT = "#30343a", "#8c9096", "#dfe2e6"
NOTE_CHARACTERS = 17  # of the note, per inch of the figure's width
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.dpi": 100,
    "font.size": 9,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "savefig.dpi": 160,
    "savefig.facecolor": "white",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "pipespec",  # ids that do not change from run to run
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


@contextmanager
def figure(
    path: Path,
    title: str,
    *,
    columns: int = 1,
    rows: int = 1,
    size: tuple[float, float] = (7.2, 3.6),
    note: str = "",
) -> Iterator[list[Axes]]:
    """Panels to draw on, row by row; the figure is written at the end of the block.

    Args:
        path: without suffix; `.png` and `.svg` are added.
        size: of the whole figure, in inches.
        note: a small line below the panels.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE | {"axes.prop_cycle": mpl.cycler(color=COLOURS)}):
        drawn = Figure(figsize=size, layout="constrained")
        drawn.suptitle(title, fontsize=10.5, x=0.01, ha="left", wrap=True)
        axes = drawn.subplots(rows, columns, squeeze=False).ravel().tolist()
        yield axes
        if note:
            note = textwrap.fill(note, int(size[0] * NOTE_CHARACTERS))
            drawn.supxlabel(note, fontsize=7.5, color="#6b7078", x=0.01, ha="left")
        for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            drawn.savefig(path.with_name(f"{path.name}.{suffix}"), metadata=metadata)


def bars(
    axes: Axes,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    ylabel: str,
    colours: Mapping[str, str] | None = None,
    labels: Mapping[str, Sequence[str]] | None = None,
    legend: bool = True,
) -> None:
    """Bars side by side in each group, one per series, with `labels` above them."""
    colours = colours or dict(zip(series, COLOURS, strict=False))
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        at = [group + (i - (len(series) - 1) / 2) * width for group in range(len(groups))]
        heights = [value or 0.0 for value in values]
        drawn = axes.bar(at, heights, width * 0.94, label=name, color=colours[name])
        if labels and name in labels:
            axes.bar_label(drawn, labels[name], fontsize=6.5, padding=1.5)
    axes.set_xticks(range(len(groups)), groups)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(ylabel)
    axes.margins(y=0.12)
    if legend:
        legend_above(axes, axes.get_legend_handles_labels()[0])


def speed_ups(
    title: str, rows: Sequence[Mapping[str, Any]], path: Path, *, by: str, size: tuple[float, float]
) -> None:
    """Time between tokens of every method, side by side for each value of the column `by`."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    of = {method: [row for row in rows if row["method"] == method] for method in methods}
    with figure(path, title, size=size, note="On the bars: speed-up over root.") as (axes,):
        bars(
            axes,
            list(dict.fromkeys(row[by] for row in rows)),
            {method: [row["tbt_ms"] for row in of_row] for method, of_row in of.items()},
            ylabel="time between tokens, ms",
            colours=METHODS,
            labels={
                method: [f"{row['speed_up']:.2f}×" for row in of_row]
                for method, of_row in of.items()
                if method != "root"
            },
        )


def legend_above(axes: Axes, handles: Sequence[Artist]) -> None:
    """The legend in one line above a panel; it may be wider than the panel."""
    legend = axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=len(handles),
        handlelength=1.0,
        columnspacing=1.2,
        borderaxespad=0.2,
    )
    legend.set_in_layout(False)
    axes.set_title(" ")  # makes room for it


def lines(
    axes: Axes,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    xlabel: str,
    ylabel: str,
    colours: Mapping[str, str] | None = None,
    log_x: bool = False,
    dashed: Sequence[str] = (),
    legend: bool = True,
) -> None:
    """One line per series of (x, y), with dots or dashed; every x that occurs gets a tick."""
    colours = colours or dict(zip(series, COLOURS, strict=False))
    for name, points in series.items():
        style = {"linestyle": "--", "marker": ""} if name in dashed else {"marker": "o"}
        axes.plot(
            *zip(*points, strict=True),
            label=name,
            color=colours.get(name, NEUTRAL),
            markersize=3.5,
            linewidth=1.5,
            **style,
        )
    ticks = sorted({x for points in series.values() for x, _ in points})
    if log_x:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
    axes.set_xticks(ticks, [f"{x:g}" if x < 4096 else f"{x / 1024:g}k" for x in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if legend:
        legend_above(axes, axes.get_legend_handles_labels()[0])
    else:
        axes.set_title(" ")  # as high as the panel beside it
