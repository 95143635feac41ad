"""Tokens per step of every method: policy × width × children (SpecPipe's Figure 10), and of every
source.

    python -m benchmarks.methods --json benchmarks/results/methods.json
    python -m benchmarks.methods --prompts 4 --tokens 32 --widths 16,64 --children 8
    python -m benchmarks.methods --sources demo,parallel,suffix,hybrid --policy best_first
    python -m benchmarks.methods --source methods.json --plot methods    # only draws it

Every figure comes from whole runs of the product on the demo pair, prompts of all four kinds
that are shipped; the answers are compared with those of `root`, token for token. A step's
number of draft rounds is fixed, so that no figure depends on how fast this machine is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks import experiment, plot
from benchmarks.emulated import GUESSERS
from benchmarks.experiment import names, numbers
from benchmarks.pair import Pair
from pipespec.config.compose import compose
from pipespec.controller.server import EmbeddedRedis

# Methods whose size no setting of this table changes.
FIXED = ("root", "static_tree")
# SpecPipe's cut of a level; `level` by itself is PipeDec's (docs/feeding.md).
BEFORE = "level, cut before"


@dataclass(frozen=True)
class Way:
    """One row of the table, before it is measured."""

    policy: str
    width: int
    children: int
    rounds: int
    settings: tuple[str, ...] = ()
    source: str = "demo"

    @property
    def overrides(self) -> list[str]:
        policy = self.policy.partition(",")[0]
        guesser = GUESSERS[self.source]
        return [f"feed={policy}", *guesser, f"source.rounds={self.rounds}", *self.settings]


def ways(
    widths: list[int], children: list[int], rounds: list[int], sources: list[str]
) -> Iterator[Way]:
    """Every row of the table: of the first source all policies, of the others `best_first` alone,
    with the most children."""
    yield Way("root", 1, 0, 1, (), sources[0])
    first, *others = sources
    yield Way("static_tree", 21, 8, max(rounds), (), first)
    for width in widths:
        for count in children:
            size = (f"feed.width={width}", f"feed.children={count}")
            yield Way("level", width, count, 1, size, first)
            if count == max(children):
                yield Way(BEFORE, width, count, 1, (*size, "feed.cut=before"), first)
            for most in rounds:
                # A stated cost: as measured, the counts would depend on how fast this machine is.
                costs = (*size, "feed.row_cost=0.0001")
                yield Way("best_first", width, count, most, costs, first)
                if count == max(children):
                    for source in others:
                        yield Way("best_first", width, count, most, costs, source)


def draw(title: str, rows: list[dict[str, Any]], path: Path) -> None:
    """Tokens per step against the width and against the children; the other is the largest.

    The methods whose size is not set stand as dashed lines.
    """
    fixed = {row["policy"]: row for row in rows if row["policy"] in FIXED}
    of_first = [row for row in rows if row.get("source") == rows[0].get("source")]
    sized = [row for row in of_first if row["policy"] not in FIXED]
    if not sized:
        raise SystemExit("Only level and best_first can be drawn, and there is neither.")
    named: dict[str, list[dict[str, Any]]] = {}
    for row in sized:
        rounds = f", rounds {row['rounds']}" if row["policy"] == "best_first" else ""
        named.setdefault(row["policy"] + rounds, []).append(row)
    colours = dict(zip(named, plot.COLOURS[4::-2], strict=False)) | plot.METHODS
    with plot.figure(path, title, columns=2, size=(8.4, 3.6)) as panels:
        for axes, varies, other in (
            (panels[0], "width", "children"),
            (panels[1], "children", "width"),
        ):
            most = max(row[other] for row in sized)
            lines = {
                name: [(row[varies], row["tokens_per_step"]) for row in mine if row[other] == most]
                for name, mine in named.items()
            }
            ends = sorted({row[varies] for row in sized})
            level = {
                name: [(end, row["tokens_per_step"]) for end in (ends[0], ends[-1])]
                for name, row in fixed.items()
            }
            plot.lines(
                axes,
                lines | level,
                xlabel=f"{varies} ({other} {most})",
                ylabel="tokens per step",
                colours=colours,
                log_x=True,
                dashed=[*level],
                legend=varies == "width",
            )


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--widths", type=numbers, default=[4, 8, 16, 32, 64])
    parser.add_argument("--children", type=numbers, default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=numbers, default=[1, 3], help="per step (1,3)")
    parser.add_argument("--prompts", type=int, help="how many of the shipped prompts (all)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="cut prompts to (128)")
    parser.add_argument("--tokens", type=int, default=64, help="decoded after each prompt (64)")
    parser.add_argument("--policy", help="only this one, and root")
    parser.add_argument(
        "--sources", type=names, default=["demo"], help=f"of {', '.join(GUESSERS)} (demo)"
    )
    parser.add_argument("--source", type=Path, help="draw this stored result and run nothing")
    options = experiment.parse(parser, prompts=4, tokens=16, widths=[16, 64], children=[8])
    if options.source:
        if not options.plot:
            parser.error("--source FILE draws what is stored; say where with --plot PATH.")
        stored = json.loads(options.source.read_text())
        draw(stored["title"], stored["rows"], options.plot)
        return

    if unknown := set(options.sources) - GUESSERS.keys():
        parser.error(f"--sources: {', '.join(sorted(unknown))}? There are {', '.join(GUESSERS)}.")
    pair = Pair()
    prompts = pair.prompts(options.prompts, options.prompt_tokens)
    rows = []
    expected: list[list[int]] | None = None
    chosen = [
        way
        for way in ways(options.widths, options.children, options.rounds, options.sources)
        if way.policy == "root" or options.policy in (None, way.policy)
    ]
    overrides = [[f"cluster.stages={options.stages}", *way.overrides] for way in chosen]
    with EmbeddedRedis() as server:
        for way, given in track([*zip(chosen, overrides, strict=True)], "decoding"):
            ran = pair.decode(server, prompts, options.tokens, *given)
            expected = expected or ran.answers
            assert ran.answers == expected, f"{way} changed the text"
            rows.append(
                {
                    "policy": way.policy,
                    "source": way.source,
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
    experiment.publish(
        options,
        title,
        rows,
        draw=partial(draw, title, rows),
        overrides=[experiment.overrides(given) for given in overrides],
        settings=[experiment.settings(compose(given)) for given in overrides],
    )


if __name__ == "__main__":
    main()
