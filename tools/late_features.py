"""Whether a draft head may feed a full pipeline: how accurate it is by the age of its features.

    python -m tools.late_features --target SmolLM2.gguf

A head is trained as by `tools/train_head.py`, over more steps, on the target's greedy answers. A
*distance* d counts positions from the newest true features. Measured on held-out prompts, given the
right text: A(d) over all positions; over survivors, where the d - 1 predictions before were right;
and after a surprise, in the 8 positions after a token that the head missed, whose features are the
newest. The control is the same head without features.

Texts, features and heads are kept in `--folder`; a run that was killed continues there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tools.draft_head import DraftHead
from tools.train_head import Text, counts, parser, prepared, right, trained
from tools.training import console

DISTANCES = 32
SURPRISE = 8  # positions after a miss
TEST_AT, CEILING = 8, 0.55  # the distance of the thresholds, and the least accuracy there
RESAMPLES = 1000


def measured(
    head: DraftHead, embeddings: Tensor, held_out: Sequence[Text]
) -> dict[str, np.ndarray]:
    """Of all texts, `[texts, 2, distances]`."""
    long = [text for text in held_out if len(text.tokens) > DISTANCES + 2 + text.answer]
    each = [counts(right(head, embeddings, text, DISTANCES)) for text in long]
    return {name: np.stack([of[name] for of in each]) for name in each[0]}


def at(positions: str, first: int, last: int = 0) -> Any:
    """A figure of counts: accuracy at these positions, at one distance or from one to another."""

    def share(of: Mapping[str, np.ndarray]) -> float:
        hits, cases = of[positions].sum(0)[:, first - 1 : last or first].sum(1)
        return float(hits / max(cases, 1))

    return share


def interval(of: Mapping[str, np.ndarray], figure: Any) -> dict[str, float]:
    """A figure of counts, with the 95 % interval of resampled texts."""
    random = np.random.default_rng(0)
    size = len(next(iter(of.values())))
    drawn = []
    for _ in range(RESAMPLES):
        chosen = random.integers(size, size=size)
        drawn.append(figure({name: value[chosen] for name, value in of.items()}))
    low, high = np.percentile(drawn, (2.5, 97.5))
    return {"value": figure(of), "low": float(low), "high": float(high)}


def decision(found: Mapping[str, Mapping[str, float]]) -> str:
    """By thresholds that were set before: no, yes, or between."""
    first, later = found["A(1)"]["value"], found[f"survivors({TEST_AT})"]["value"]
    surprised = found["after a surprise"]["value"]
    if found["added by features"]["value"] < 0.03:
        return "the test does not count: features add less than .03 at distance 1"
    if later < CEILING or surprised < 0.6 * first:
        return "no"
    return "yes" if later >= 0.9 * first and surprised >= 0.75 * first else "between"


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--folder", type=Path, default=Path("build/late_features"))
    options_of.set_defaults(steps=8, epochs=4)
    options = options_of.parse_args()
    begun, embeddings, learnt, held_out = prepared(options)
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, features in (("head", 1), ("control", 0)):
        seen, unseen = (
            [replace(text, features=text.features * features) for text in each]
            for each in (learnt, held_out)
        )
        head = deepcopy(begun)
        trained(head, embeddings, seen, options, name, lambda epoch: None)
        found[name] = measured(head.eval(), embeddings, unseen)
    both = found["head"] | {f"control {name}": of for name, of in found["control"].items()}
    figures = {
        "A(1)": interval(both, at("all", 1)),
        f"survivors({TEST_AT})": interval(both, at("survivors", TEST_AT)),
        "after a surprise": interval(both, at("after a surprise", 1, SURPRISE)),
        "added by features": interval(both, lambda of: at("all", 1)(of) - at("control all", 1)(of)),
    }
    rows = [
        {"positions": kind, "distance": d, **interval(both, at(kind, d))}
        for kind in both
        for d in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    ]
    for row in rows:
        console.print(row)
    console.print(figures, decision(figures))


if __name__ == "__main__":
    main()
