"""The result of a run of the suite as JSON, with the circumstances in which it was obtained."""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

COUNTED = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


def write_results(
    path: Path, stats: Mapping[str, Sequence[Any]], exit_code: int, started_s: float
) -> None:
    """Write a run's date, commit, hardware, versions, duration and counts, and what failed.

    Args:
        stats: pytest's reports by outcome, as its terminal reporter keeps them.
        started_s: wall-clock time at which the run began.
    """
    from benchmarks.common.experiment import provenance

    skipped = [report.longrepr[2].removeprefix("Skipped: ") for report in stats.get("skipped", [])]
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    result = provenance("pytest") | {
        "date": datetime.fromtimestamp(started_s, UTC).isoformat(timespec="seconds"),
        "gpus": gpus,
        "torch": torch.__version__,
        "duration_s": round(time.time() - started_s),
        "exit_code": int(exit_code),
        "counts": {name: len(stats.get(name, [])) for name in COUNTED},
        "failures": sorted(
            report.nodeid for name in ("failed", "error") for report in stats.get(name, [])
        ),
        "skipped_because": {reason: skipped.count(reason) for reason in sorted(set(skipped))},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
