"""How long requests get no token while a host joins their cluster, and while it leaves.

    python -m benchmarks.faults.join_pause --json benchmarks/results/join_pause.json

Needs root: the hosts are two network namespaces. The cluster has a head and two stages on the first
one; the second one joins and leaves, over and over, and three requests are always open. The exit
code is 1 if a text differs from Hugging Face's.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import experiment
from pipespec.system.folders import resource_dir
from tools.rig import testbed
from tools.rig.cluster import reference
from tools.rig.joining import PROMPT, Answer, JoinableCluster
from tools.rig.testbed import Testbed

LENGTHS = (60, 80, 100)


def measure(times: int) -> tuple[list[dict[str, Any]], int]:
    """A row for each kind of change, and how many texts were wrong."""
    wrong = 0
    joins, leaves, usual = list[float](), list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="pipespec-") as folder:
        models = Path(folder) / "models"
        for name in ("target", "draft"):
            shutil.copytree(resource_dir("demo") / name, models / name)
        with (
            Testbed(hosts=2, with_ssh=False) as bed,
            JoinableCluster(bed, models) as cluster,
        ):
            prompt = cluster.running.served.encode(PROMPT)
            expected = reference(models / "target", [prompt], max(LENGTHS))[0]

            def pause(answers: Sequence[Answer]) -> float:
                nonlocal wrong
                wrong += sum(each.tokens != expected[: each.length] for each in answers)
                return max(answer.longest_s for answer in answers)

            for _ in range(times):
                host = cluster.join(cluster.token())
                host.await_line("It gets the weights")
                with cluster.asking(LENGTHS) as answers:
                    host.await_line("It computes")
                joins.append(pause(answers))
                with cluster.asking(LENGTHS) as answers:
                    pass
                usual.append(pause(answers))
                with cluster.asking(LENGTHS) as answers:
                    host.interrupt()
                    host.await_line("This host has left")
                leaves.append(pause(answers))
                host.wait()
    rows = [
        {
            "change": change,
            "times": len(pauses),
            "median_s": statistics.median(pauses),
            "worst_s": max(pauses),
        }
        for change, pauses in (
            ("a host joins", joins),
            ("a host leaves", leaves),
            ("none, four ranks", usual),
        )
    ]
    return rows, wrong


def main() -> int:
    """Measure, print and store."""
    parser = experiment.parser(__doc__)
    parser.add_argument("--times", type=int, default=5)
    options = experiment.parse(parser, times=1)
    if (lacking := testbed.missing(with_ssh=False)) is not None:
        print(lacking, file=sys.stderr)
        return 2
    rows, wrong = measure(options.times)
    title = "The longest time between two tokens of a request while a host joins or leaves"
    experiment.publish(options, title, rows, texts_that_differ=wrong)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
