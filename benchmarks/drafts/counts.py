"""Tokens per step of the demo pair under other conditions: counts, which depend on no machine.

    python -m benchmarks.drafts.counts noise --json benchmarks/results/foresight.json
    python -m benchmarks.drafts.counts schemas --prompts 4 --tokens 100
    python -m benchmarks.drafts.counts bits --prompts 15 --tokens 48
    python -m benchmarks.drafts.counts acceptance --prompts 6 --tokens 48

`noise`: sampling parameters, with a draft that knows the target's sampling noise and without
(docs/sampling.md); `top_k` is how often the sampled token is among the draft's k best. `schemas`:
answers held to JSON schemas, whose forced tokens are drafted with certainty. `bits`: the draft in
fewer bits, the target in bfloat16. `acceptance`: the lossy rules of SpecPipe's section 3.4;
*agreement* is the share of tokens that are the target's own first choice, *loss* by how much less
probable than that choice they are, in nats per token."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from transformers import AutoModelForCausalLM

from benchmarks.common import experiment, run_options
from benchmarks.common.demo_pair import GREEDY, Measured, Pair
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.core import EXACT, RELAXED, STRICT, SamplingParams
from pipespec.engine.llguidance_backend import grammar_from_json_schema
from tools import inflate
from tools.rig.packing import KINDS, pack
from tools.rig.schemas import SCHEMAS

SHOWN = (1, 2, 4, 8, 16)  # whose hit rates are shown
EOS = 0  # of the demo pair
# Hidden and intermediate size of a draft whose matrices fit every format.
FITTING = (192, 576)
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
    """What is decoded for one row.

    Attributes:
        label: its first columns.
        equal_to: a name that cells share whose answers must be equal; empty: none.
    """

    label: Mapping[str, str]
    policy: str = "best_first"
    settings: Sequence[str] = ()
    sampling: SamplingParams = GREEDY
    pair: Pair = field(default_factory=Pair)
    eos: tuple[int, ...] = ()
    equal_to: str = ""
    figures: Figures = lambda pair, prompts, decoded: {}


def noise(_: Path) -> Iterator[Cell]:
    for name, sampling in SAMPLINGS.items():

        def hits(
            pair: Pair,
            prompts: Sequence[Sequence[int]],
            decoded: Measured,
            sampling: SamplingParams = sampling,
        ) -> Mapping[str, float]:
            ranks = pair.draft_ranks(prompts, decoded.answers, sampling)["foresight"]
            return {f"top_{k}": float((ranks < k).mean()) for k in SHOWN}

        for policy in ("level", "best_first"):
            yield Cell(
                {"sampling": name},
                policy,
                sampling=sampling,
                equal_to=name,
                figures=hits,
            )


def schemas(_: Path) -> Iterator[Cell]:
    for name, schema in ({"free text": None} | SCHEMAS).items():
        grammar = grammar_from_json_schema(schema) if schema else ""
        for policy in ("root", "level", "best_first"):
            yield Cell(
                {"schema": name},
                policy,
                sampling=SamplingParams(grammar=grammar),
                eos=(EOS,) if grammar else (),
                equal_to=name,
            )


def bits(folder: Path) -> Iterator[Cell]:
    """AWQ is rounded to the nearest code, in groups of 32."""
    draft = Pair().draft
    shape = inflate.Shape.of(inflate.read_config(draft))
    hidden, intermediate = FITTING
    size = shape.grow(hidden, shape.layers, intermediate)
    inflate.write(draft, folder / "plain", size, torch.bfloat16)
    pack(folder / "plain", folder / "packed", folder / "dense", KINDS["awq"])
    for name, packed, settings in (
        ("bfloat16", False, []),
        ("int8", False, ["model.draft_quantization=int8"]),
        ("nf4", False, ["model.draft_quantization=nf4"]),
        ("AWQ, 4 bits kept", True, []),
        ("AWQ, plain weights", True, ["model.keep_quantized=no"]),
    ):
        pair = Pair(draft=folder / ("packed" if packed else "plain"))
        yield Cell({"draft": name}, settings=["model.dtype=bfloat16", *settings], pair=pair)


def acceptance(_: Path) -> Iterator[Cell]:
    # Relaxed takes the most probable candidate, whatever the temperature.
    rules = {
        "greedy": (GREEDY, (EXACT, RELAXED)),
        "temperature 0.6, top-p 0.9": (NUCLEUS, (EXACT, STRICT)),
    }
    for policy in ("level", "best_first"):
        for name, (sampling, allowed) in rules.items():
            for rule in allowed:
                label = {"sampling": name, "acceptance": rule}
                how = replace(sampling, acceptance=rule)
                yield Cell(label, policy, sampling=how, figures=loss)


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


EXPERIMENTS = {cells.__name__: cells for cells in (noise, schemas, bits, acceptance)}


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

    prompts = Pair().prompts(options.prompts, options.prompt_tokens)
    shared = [f"cluster.stages={options.stages}", f"proposer.rounds={options.rounds}"]
    rows: list[dict[str, Any]] = []
    expected: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as name, EmbeddedRedis() as server:
        for cell in track([*EXPERIMENTS[options.experiment](Path(name))], "decoding"):
            policy = run_options.counted_method(cell.policy, options)
            decoded = cell.pair.decode(
                server,
                prompts,
                options.tokens,
                *(*shared, *policy, *cell.settings),
                sampling=cell.sampling,
                eos=cell.eos,
            )
            if cell.equal_to and decoded.answers != expected.setdefault(
                cell.equal_to, decoded.answers
            ):
                sys.exit(f"{cell.policy} changed the text of {dict(cell.label)}.")
            rows.append(
                {
                    **cell.label,
                    "policy": cell.policy,
                    "tokens": sum(map(len, decoded.answers)) / len(prompts),
                    "tokens_per_step": decoded.tokens_per_step,
                    "hit_rate": decoded.mean("hit_rate"),
                    **cell.figures(cell.pair, prompts, decoded),
                }
            )
    title = (
        f"{options.experiment}: demo pair, {len(prompts)} prompts × {options.tokens} tokens, "
        f"{options.stages} stages, width {options.width}, {options.rounds} rounds"
    )
    experiment.publish(options, title, rows)


if __name__ == "__main__":
    main()
