"""Tables of docs/peers.md, from the stored results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tools.docs.stored_results import columns, command_of, result, row, table, with_range


def engines(name: str) -> str:
    """A table of `peers.compare_engines`: every engine on one machine."""
    stored = result(name)
    rows: list[dict[str, Any]] = [
        {
            key: with_range(value) if isinstance(value, dict) else value
            for key, value in each.items()
        }
        for each in stored["rows"]
    ]
    listed = [
        ("engine", "{engine}"),
        ("load s", "{load_s}"),
        ("TTFT ms", "{ttft_ms}"),
        ("TBT ms", "{tbt_ms}"),
        ("tokens/s", "{tokens_per_s}"),
        ("× HF", "{times_hugging_face}"),
        ("equal", "{equal_answers} of {answers}"),
    ]
    return columns(listed, rows) + command_of(stored)


def race(name: str) -> str:
    """A table of `peers.links`: milliseconds between tokens by delay and engine."""
    stored = result(name)
    names = list(dict.fromkeys(each["engine"] for each in stored["rows"]))
    names.sort(key=lambda engine: engine.startswith("pipespec"))
    lines = [
        [
            f"{delay:g} ms",
            *(with_range(row(stored, delay_ms=delay, engine=engine)["tbt_ms"]) for engine in names),
        ]
        for delay in sorted({each["delay_ms"] for each in stored["rows"]})
    ]
    headings = [engine.replace("pipespec root", "pipespec, `root`") for engine in names]
    return table(["one way", *headings], lines) + command_of(stored)


BLOCKS: Mapping[str, Callable[[], str]] = {
    **{name: partial(engines, name) for name in ("peers", "peers_bfloat16", "peers_h200")},
    **{name: partial(race, name) for name in ("links", "links_bfloat16", "links_one_step")},
}
