"""Hit rate against time between tokens, a dot per request and method: SpecPipe's Figure 14.

    python -m benchmarks.pipeline.hits --stored benchmarks/results/tbt.json \\
        --json benchmarks/results/hits.json --plot benchmarks/results/hits

Nothing is run: the requests are those of a result of `benchmarks.pipeline.tbt` (or
`benchmarks.pipeline.sampled`). The line is the time if a hit costs one step and a miss the whole
pipeline.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import experiment, plot


def expected_ms(hit_rate: float, step_ms: float, stages: int) -> float:
    """Time between tokens if a hit takes one step and a miss refills the pipeline."""
    return step_ms * (hit_rate + (1 - hit_rate) * stages)


def row(method: str, requests: list[dict[str, Any]]) -> dict[str, str | int | float]:
    """A row over the requests of a method; the correlation is Pearson's (0: all are equal)."""
    hits, tbt = (np.array([r[name] for r in requests]) for name in ("hit_rate", "tbt_ms"))
    varies = len(requests) > 1 and hits.std() > 0 and tbt.std() > 0
    return {
        "method": method,
        "requests": len(requests),
        "hit_rate": float(hits.mean()),
        "lowest_hit_rate": float(hits.min()),
        "highest_hit_rate": float(hits.max()),
        "tbt_ms": float(tbt.mean()),
        "correlation": float(np.corrcoef(hits, tbt)[0, 1]) if varies else 0.0,
    }


def draw(
    title: str,
    by_method: dict[str, list[dict[str, Any]]],
    step_ms: float,
    stages: int,
    path: Path,
) -> None:
    shares = np.linspace(0, 1, 21)
    note = (
        "Dashed: a hit costs one step, a miss the whole pipeline. Below it: several tokens per "
        "step, or the right token was scheduled before the miss was known."
    )
    with plot.figure(path, title, size=(6.4, 4.2), note=note) as (axes,):
        axes.plot(
            shares,
            [expected_ms(share, step_ms, stages) for share in shares],
            color=plot.NEUTRAL,
            linestyle="--",
            linewidth=1,
        )
        plot.dots(
            axes,
            {
                m: [(r["hit_rate"], r["tbt_ms"]) for r in of_method]
                for m, of_method in by_method.items()
            },
            xlabel="hit rate of a request",
            ylabel="time between tokens, ms",
            colours=plot.METHODS,
        )


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    parser.add_argument(
        "--stored", type=Path, default=Path("benchmarks/results/tbt.json"), help="(%(default)s)"
    )
    options = experiment.parse(parser)
    measured = json.loads(options.stored.read_text())
    requests = measured["requests"]
    by_method: dict[str, list[dict[str, Any]]] = {}
    for request in requests:
        by_method.setdefault(request["method"], []).append(request)
    stages = next(iter(measured["settings"].values()))["cluster"]["stages"]
    # A step of the plain pipeline, which has only the root's row.
    step_ms = float(np.median([request["tbt_ms"] for request in by_method["root"]])) / stages
    title = f"Hit rate and time between tokens; {measured['title']}"
    experiment.publish(
        options,
        title,
        [row(method, of_method) for method, of_method in by_method.items()],
        draw=partial(draw, measured["title"], by_method, step_ms, stages),
        source={key: measured[key] for key in ("title", "date", "commit", "command", "hardware")},
        step_ms=step_ms,
        settings=measured["settings"],
        overrides=measured["overrides"],
    )


if __name__ == "__main__":
    main()
