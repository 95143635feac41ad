"""The stored results of the benchmarks, and how a page of documentation cites them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# What makes a result today; the stored command has the names of its own commit.
COMMANDS = {
    "tbt_synthetic_1b": (
        "pipeline.tbt --proposer synthetic --scale 2 --num-prompts 16 --tokens 64"
    ),
    "tbt": "pipeline.tbt --scale 4",
    "methods": "pipeline.methods --rounds 3 --tokens 24",
    "chaos": "faults.chaos --faults 200",
    "chaos_in_flight": (
        "faults.chaos --in-flight 16 --hosts 2 --stages 3 --tokens 32 --faults 300"
    ),
    "controller": "budgets.controller_hop --steps 1000",
    "startup": "budgets.startup --repeats 3",
    "memory": "budgets.rank_memory",
    "sync": "pipeline.sync --proposer synthetic --num-prompts 3 --tokens 24 --scale 4",
}
# What older results call the modules and options of today.
RENAMED = {
    "benchmarks.tbt ": "benchmarks.pipeline.tbt ",
    "benchmarks.sampled ": "benchmarks.pipeline.sampled ",
    "benchmarks.methods ": "benchmarks.pipeline.methods ",
    "benchmarks.groups ": "benchmarks.pipeline.device_groups ",
    "benchmarks.two_groups ": "benchmarks.pipeline.two_groups ",
    "benchmarks.overhead ": "benchmarks.pipeline.overhead ",
    "benchmarks.cascade ": "benchmarks.drafts.cascade_tbt ",
    "benchmarks.load ": "benchmarks.load.throughput ",
    "benchmarks.long_prompt ": "benchmarks.load.long_prompt ",
    "static_tree,level,level shared,best_first": '"static_tree,level,level shared,best_first"',
    "--stage-ms 1:22.7 64:24.0": '--stage-ms "1:22.7 64:24.0"',
    "--source ": "--proposer ",
    "--sources ": "--proposers ",
}


def result(name: str) -> dict[str, Any]:
    """A stored result: rows, and the hardware, commit, date and command that made it."""
    stored: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return stored


def row(stored: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """The only row of a result with these values."""
    found = [each for each in stored["rows"] if values.items() <= each.items()]
    assert len(found) == 1, f"{len(found)} rows have {values}"
    chosen: dict[str, Any] = found[0]
    return chosen


def origin(stored: Mapping[str, Any]) -> str:
    """Hardware, commit and date of a result."""
    hardware = stored["hardware"].replace("Intel(R) Xeon(R) Processor", "Intel Xeon")
    return f"{hardware}, {stored['commit']}, {stored['date']}"


def source(name: str) -> str:
    """Where a figure comes from: file, command, hardware, commit and date."""
    return f"`{name}.json`: `python -m benchmarks.{COMMANDS[name]}`; {origin(result(name))}"


def table(header: str, rows: list[str]) -> str:
    """A Markdown table."""
    columns = header.count("|") - 1
    return "\n".join([header, "|" + "---|" * columns, *rows]) + "\n"


def command_of(stored: Mapping[str, Any]) -> str:
    """The line under a table: where its result was made, and with which command of today."""
    command = stored["command"]
    for old, new in RENAMED.items():
        command = command.replace(old, new)
    return f"\n{origin(stored)}: `{command}`\n"
