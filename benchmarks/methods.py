"""Tokens per step of every method: policy × width × children (SpecPipe's Figure 10).

    python -m benchmarks.methods --json benchmarks/results/methods.json
    python -m benchmarks.methods --prompts 4 --tokens 32 --widths 16,64 --children 8

Every figure comes from whole runs of the product on the demo pair, prompts of all four kinds
that are shipped; the answers are compared with those of `root`, token for token. A step's
number of draft rounds is fixed, so that no figure depends on how fast this machine is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.progress import track

from benchmarks.pair import Pair
from benchmarks.report import publish_table
from pipespec.control.server import EmbeddedRedis


@dataclass(frozen=True)
class Way:
    """One row of the table, before it is measured."""

    policy: str
    width: int
    children: int
    rounds: int
    settings: tuple[str, ...] = ()

    @property
    def overrides(self) -> list[str]:
        return [f"feed={self.policy}", f"source.rounds={self.rounds}", *self.settings]


def ways(widths: list[int], children: list[int], rounds: list[int]) -> Iterator[Way]:
    """Every row of the table."""
    yield Way("root", 1, 0, 1)
    yield Way("static_tree", 21, 8, max(rounds))
    for width in widths:
        for count in children:
            size = (f"feed.width={width}", f"feed.children={count}")
            yield Way("level", width, count, 1, size)
            for most in rounds:
                yield Way("best_first", width, count, most, size)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--widths", type=numbers, default=[4, 8, 16, 32, 64])
    parser.add_argument("--children", type=numbers, default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=numbers, default=[1, 3], help="per step (1,3)")
    parser.add_argument("--prompts", type=int, help="how many of the shipped prompts (all)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="cut prompts to (128)")
    parser.add_argument("--tokens", type=int, default=64, help="decoded after each prompt (64)")
    parser.add_argument("--policy", help="only this one, and root")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    pair = Pair()
    prompts = pair.prompts(options.prompts, options.prompt_tokens)
    rows = []
    expected: list[list[int]] | None = None
    chosen = [
        way
        for way in ways(options.widths, options.children, options.rounds)
        if way.policy == "root" or options.policy in (None, way.policy)
    ]
    with EmbeddedRedis() as server:
        for way in track(chosen, "decoding"):
            ran = pair.decode(
                server, prompts, options.tokens, f"cluster.stages={options.stages}", *way.overrides
            )
            expected = expected or ran.answers
            assert ran.answers == expected, f"{way} changed the text"
            rows.append(
                {
                    "policy": way.policy,
                    "width": way.width,
                    "children": way.children,
                    "rounds": way.rounds,
                    "tokens_per_step": ran.tokens_per_step,
                    "hit_rate": ran.mean("hit_rate"),
                    "rows_per_step": ran.mean("rows_per_step"),
                    "rounds_per_step": ran.mean("draft_rounds_per_step"),
                }
            )
    title = (
        f"{options.stages} stages, demo pair, {len(prompts)} prompts × {options.tokens} tokens, "
        "equal text in all rows"
    )
    publish_table(title, rows, path=options.json)


if __name__ == "__main__":
    main()
