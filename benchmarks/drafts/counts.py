"""The demo pair under other rules: sampling with shared noise, and lossy acceptance.

    python -m benchmarks.drafts.counts noise --json benchmarks/results/foresight.json
    python -m benchmarks.drafts.counts acceptance --prompts 6 --tokens 48

`noise`: how often a drawn token is among the draft's k best, ranked by its own probabilities
(`plain_top_k`) and with the noise that the target draws with (`top_k`; docs/sampling.md).
`acceptance`: greedy and sampled (SpecPipe, Fig. 15), exact and by the lossy rules of its section
3.4; *agreement* is the share of tokens that are
the target's own first choice, *loss* by how much less probable than that choice they are, in nats
per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.progress import track
from transformers import AutoModelForCausalLM

from benchmarks.common import experiment, run_options
from benchmarks.common.demo_pair import GREEDY, Measured, Pair
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.core import EXACT, RELAXED, STRICT, SamplingParams

SHOWN = (1, 2, 4, 8, 16)  # whose hit rates are shown
NUCLEUS = SamplingParams(0.6, top_p=0.9, seed=1)
SAMPLINGS = {
    "temperature 1": SamplingParams(1.0, seed=1),
    "temperature 0.7": SamplingParams(0.7, seed=1),
    "temperature 0.6, top-p 0.9": NUCLEUS,
    "temperature 0.6, top-p 0.9, top-k 80": replace(NUCLEUS, top_k=80),
}

# More figures of a cell, from its pair, prompts and answers.
Figures = Callable[[Pair, Sequence[Sequence[int]], Measured], Mapping[str, float]]


@dataclass(frozen=True)
class Cell:
    """What is decoded for one row; `label` has its first columns."""

    label: Mapping[str, str]
    policy: str
    sampling: SamplingParams
    figures: Figures


def noise() -> Iterator[Cell]:
    for name, sampling in SAMPLINGS.items():
        yield Cell({"sampling": name}, "root", sampling, partial(hits, sampling))


def hits(
    sampling: SamplingParams, pair: Pair, prompts: Sequence[Sequence[int]], decoded: Measured
) -> Mapping[str, float]:
    ranks = pair.draft_ranks(prompts, decoded.answers, sampling)
    return {
        f"{label}top_{k}": float((ranks[name] < k).mean())
        for label, name in (("plain_", "plain"), ("", "foresight"))
        for k in SHOWN
    }


def acceptance() -> Iterator[Cell]:
    # Relaxed takes the most probable candidate, whatever the temperature.
    papers = "temperature 0.6, top-p 0.9, top-k 80"
    rules = {"greedy": (GREEDY, RELAXED), papers: (SAMPLINGS[papers], STRICT)}
    for policy in ("static_tree", "level", "best_first"):
        for name, (sampling, lossy) in rules.items():
            for rule in (EXACT,) if policy == "static_tree" else (EXACT, lossy):
                label = {"sampling": name, "acceptance": rule}
                how = replace(sampling, acceptance=rule)
                yield Cell(label, policy, how, loss)


def loss(pair: Pair, prompts: Sequence[Sequence[int]], decoded: Measured) -> Mapping[str, float]:
    """Agreement with the target's first choice, and the nats that the answers lose to it."""
    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    found = []
    for prompt, answer in zip(prompts, decoded.answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        found.append((logits.amax(1) - chosen).numpy())
    lost = np.concatenate(found)
    return {"agreement": float(np.mean(lost == 0)), "loss": float(np.mean(lost))}


EXPERIMENTS = {cells.__name__: cells for cells in (noise, acceptance)}


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    run_options.add_size(parser)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2, help="draft rounds a step (2)")
    parser.add_argument("--prompts", type=int, default=6, help="of the shipped prompts (6)")
    parser.add_argument("--prompt-tokens", type=int, default=96, help="cut prompts to (96)")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer at most (48)")
    options = experiment.parse(parser, prompts=1, tokens=24)

    pair = Pair()
    prompts = pair.prompts(options.prompts, options.prompt_tokens)
    shared = [f"cluster.stages={options.stages}", f"proposer.rounds={options.rounds}"]
    rows: list[dict[str, Any]] = []
    with EmbeddedRedis() as server:
        for cell in track([*EXPERIMENTS[options.experiment]()], "decoding"):
            settings = shared + run_options.counted_method(cell.policy, options)
            if cell.policy == "root":
                settings = [shared[0], "policy=root", "proposer=suffix"]
            how = {"sampling": cell.sampling}
            decoded = pair.decode(server, prompts, options.tokens, *settings, **how)
            rows.append(
                {
                    **cell.label,
                    "policy": cell.policy,
                    "tokens": sum(map(len, decoded.answers)) / len(prompts),
                    "tokens_per_step": decoded.tokens_per_step,
                    "hit_rate": decoded.mean("hit_rate"),
                    **cell.figures(pair, prompts, decoded),
                }
            )
    title = (
        f"{options.experiment}: demo pair, {len(prompts)} prompts × {options.tokens} tokens, "
        f"{options.stages} stages, width {options.width}, {options.rounds} rounds"
    )
    experiment.publish(options, title, rows)


if __name__ == "__main__":
    main()
