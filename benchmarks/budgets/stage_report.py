"""The output of `benchmarks.budgets.stage_time`: tables and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.budgets.rank_memory import MIB
from benchmarks.common import experiment, plot


def show(title: str, result: dict[str, Any]) -> None:
    """Print the tables of medians, in milliseconds; the quartiles are in the JSON."""
    steps = [
        {"rows": cell["rows"], "context": cell["context"]}
        | {name: cell["ms"][name]["median"] for name in ("step", "admit", "forward", "attention")}
        | {"floor": cell["floor_ms"], "by": cell["floor_by"]}
        | {"to_floor": cell["ratio"], "to_1_row": cell["over_one_row"]}
        for cell in result["steps"]
    ]
    experiment.show(f"{title}; ms", steps)
    verdicts = [
        {"context": cell["context"], "rows": cell["rows"]}
        | {
            f"{kind} {part}": cell[kind][part]["median"]
            for kind in ("hit", "miss")
            for part in ("apply", "prune", "sum")
        }
        | {"budget": cell["budget_ms"], "KV in place": "yes" if cell["kv_in_place"] else "NO"}
        for cell in result["verdicts"]
    ]
    experiment.show("A verdict at that stage, which holds so many rows; ms", verdicts)
    if result["drafts"]:
        drafts = [
            {name: cell[name] for name in ("shape", "layers", "of", "rows", "context")}
            | {"round": cell["ms"]["round"]["median"]}
            | {"floor": cell["floor_ms"], "by": cell["floor_by"], "to_floor": cell["ratio"]}
            for cell in result["drafts"]
        ]
        cut = ", its depth CUT" if any(cell["layers"] < cell["of"] for cell in drafts) else ""
        about = f"A draft round{cut}, {result['children']} candidates for each row; ms"
        experiment.show(about, drafts)
    limit, memory = result["limits"], result["memory_bytes"]
    peak = "unknown" if memory["peak"] is None else f"{memory['peak'] / MIB:.0f} MiB"
    print(
        f"Copy {limit['bandwidth_gb_s']:.1f} GB/s, matrix product {limit['matmul_tflop_s']:.3f} "
        f"Tflop/s. Weights {memory['weights'] / MIB:.0f} MiB, KV pools {memory['kv'] / MIB:.0f} "
        f"MiB ({memory['slots']} slots), peak {peak}. Load {result['load'][0]:.1f} at the start, "
        f"{result['load'][1]:.1f} at the end."
    )


def draw(title: str, steps: Sequence[dict[str, Any]], path: Path) -> None:
    contexts = list(dict.fromkeys(cell["context"] for cell in steps))
    colours = dict(zip(map(str, contexts), plot.COLOURS, strict=False))
    colours |= {f"floor {context}": colours[str(context)] for context in contexts}
    measured, floors, relative = {}, {}, {}
    for context in contexts:
        mine = [cell for cell in steps if cell["context"] == context]
        measured[str(context)] = [(c["rows"], c["ms"]["step"]["median"]) for c in mine]
        floors[f"floor {context}"] = [(c["rows"], c["floor_ms"]) for c in mine]
        relative[str(context)] = [(c["rows"], c["over_one_row"]) for c in mine]
    note = "Colours: tokens of committed text. Dashed: the floor of each, bytes or arithmetic."
    with plot.figure(path, title, columns=2, size=(9.2, 3.6), note=note) as (left, right):
        for axes, series, ylabel in (
            (left, measured | floors, "ms per step"),
            (right, relative, "times as long as one row"),
        ):
            plot.lines(
                axes,
                series,
                xlabel="rows",
                ylabel=ylabel,
                colours=colours,
                log_x=True,
                dashed=list(floors),
                legend=False,
            )
        handles, _ = left.get_legend_handles_labels()
        plot.legend_above(left, handles[: len(contexts)])
