"""How long hosts take to get their weights, beside what their links allow.

    python -m benchmarks.budgets.weights [--parameters 200M] [--mbit 100] [--repeats 3]

Four hosts, namespaces of this machine, each sending at most so many Mbit/s (`tools.rig.testbed`),
get a quarter of a bfloat16 Llama each:

- `nothing on three`: the first one has the model in a folder, the others have nothing.
- `the next quarter`: then the layers of each host move on to the next one.

`least_s` is the time that the most bytes into or out of any one host take at the rate of its link;
bytes are those of the tensors that must move. `moving_s` is the time from the first byte to the
last, `whole_s` that of the whole distribution, whose ratio to `least_s` should be at most 1.3: it
includes starting Python on the hosts, without SSH, and asking what they have. Medians. Needs root.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import experiment
from pipespec.cluster.deployment import decide
from pipespec.cluster.weight_distribution import distribute_weights
from pipespec.config.compose import compose
from pipespec.system.folders import resource_dir
from tools.inflate import Shape, number_of, read_config, write
from tools.rig import testbed
from tools.rig.testbed import Testbed
from tools.rig.weight_hosts import WeightHosts

BUDGET = 1.3
HOSTS = 4
FROM_ONE, NEXT = "nothing on three", "the next quarter"


@dataclass
class Run:
    """One distribution: seconds of all of it, from the first byte on, and the bytes that each host
    fetched."""

    whole_s: float = 0.0
    moving_s: float = 0.0
    fetched: dict[str, int] = field(default_factory=dict)


def distribute(hosts: WeightHosts, settings: Sequence[str]) -> Run:
    """Give the hosts their weights."""
    run, here, began_at = Run(), dict[str, int](), list[float]()

    def note(host: str, done: int, _total: int) -> None:
        if done > here.setdefault(host, done) and not began_at:
            began_at.append(time.monotonic())
        run.fetched[host] = done - here[host]

    with hosts.launcher():
        deployment = decide(compose(settings))
        began = time.monotonic()
        distribute_weights(deployment, note, _fail)
        ended = time.monotonic()
    run.whole_s, run.moving_s = ended - began, ended - began_at[0]
    return run


def _fail(sentence: str) -> None:
    raise SystemExit(sentence)


def runs_of(model: Path, mbit: float, quarter: int, folder: Path) -> dict[str, Run]:
    """Both distributions, over hosts of their own."""
    target, split = f"model.target={model}", [quarter] * HOSTS
    with Testbed(HOSTS, gbit=mbit / 1e3, with_ssh=False) as bed:
        hosts = WeightHosts(bed, folder, hidden=model.parent)
        return {
            FROM_ONE: distribute(hosts, [hosts.file(split), target]),
            NEXT: distribute(hosts, [hosts.file(split, bed.hosts[1:] + bed.hosts[:1]), target]),
        }


def row(name: str, runs: Sequence[Run], mbit: float) -> dict[str, Any]:
    """The figures of the runs of one kind."""
    most: Callable[[Run], int] = lambda run: (  # noqa: E731
        sum(run.fetched.values()) if name == FROM_ONE else max(run.fetched.values())
    )
    least_s = most(runs[0]) * 8 / (mbit * 1e6)
    whole_s = statistics.median(run.whole_s for run in runs)
    moving_s = statistics.median(run.moving_s for run in runs)
    return {
        "what": name,
        "moved_mb": sum(runs[0].fetched.values()) / 1e6,
        "most_mb": most(runs[0]) / 1e6,
        "least_s": least_s,
        "moving_s": moving_s,
        "whole_s": whole_s,
        "moving_ratio": moving_s / least_s,
        "ratio": whole_s / least_s,
        "budget": BUDGET,
        "repeats": len(runs),
    }


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--parameters", type=number_of, default=200_000_000)
    parser.add_argument("--mbit", type=float, default=100.0, help="of the link of each host")
    parser.add_argument("--repeats", type=int, default=3)
    options = experiment.parse(parser, parameters=40_000_000, repeats=1)
    if (lacking := testbed.missing(with_ssh=False)) is not None:
        parser.error(f"{lacking}.")
    source = resource_dir("demo") / "target"
    shape = Shape.of(read_config(source)).grow_to(options.parameters)
    found: dict[str, list[Run]] = {FROM_ONE: [], NEXT: []}
    with tempfile.TemporaryDirectory() as made:
        model = Path(made) / "only" / "model"
        write(source, model, shape, torch.bfloat16)
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as folder:
                runs = runs_of(model, options.mbit, shape.layers // HOSTS, Path(folder))
            for name, run in runs.items():
                found[name].append(run)
    rows = [row(name, runs, options.mbit) for name, runs in found.items()]
    title = f"Weights of {HOSTS} hosts over links of {options.mbit:g} Mbit/s"
    experiment.publish(options, title, rows, mbit=options.mbit, parameters=shape.num_parameters)


if __name__ == "__main__":
    main()
