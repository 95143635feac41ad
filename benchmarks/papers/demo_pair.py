"""The demo pair under the papers' conditions: chains with a draft in fewer bits, and sampling.

    python -m benchmarks.papers.demo_pair chains --json benchmarks/results/papers_chains.json
    python -m benchmarks.papers.demo_pair SpecPipe --json benchmarks/results/papers_sampled_8.json
    python -m benchmarks.papers.demo_pair PipeDec --json benchmarks/results/papers_sampled_14.json

MEASURED counts of real models, which depend on no machine: what the demo target says, greedy and
sampled, is replayed with the real draft through the head's own scheduler
(`benchmarks.drafts.replay`), so that all formats of the draft and all policies decode the same
texts. Tokens per call of the target with a chain of draft tokens are those of Meta's Table 2 and
Table 1; steps per token, greedy and sampled, those of SpecPipe's Figure 15 and PipeDec's Figure 7.
Intervals are over texts.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from benchmarks.common import experiment
from benchmarks.common.demo_pair import Pair
from benchmarks.drafts.quantized_draft import FITTING, FORMATS
from benchmarks.drafts.replay import Replay
from benchmarks.papers import intervals
from benchmarks.papers.cells import num_jobs
from benchmarks.papers.intervals import Interval
from benchmarks.papers.specpipe import SPECPIPE
from pipespec.cluster import rank_components
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.core import SamplingParams
from pipespec.engine.runner import SliceRunner
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.level import Level
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.head.policies.static_tree import StaticTree
from tools import inflate
from tools.rig import cluster
from tools.rig.packing import KINDS, pack

CHAINS_PART = "chains"
CHAINS = (3, 5, 7)
# SpecPipe and PipeDec: temperature, top-p and top-k, and the number of runs.
TEMPERATURE, TOP_P, TOP_K, RUNS = 0.6, 0.9, 80, 5
ROUNDS = 2  # draft rounds a step, as fit beside stages of 37.8 ms


@dataclass(frozen=True)
class Conditions:
    """A policy under the conditions of a paper."""

    paper: str
    method: str
    policy: SpeculationPolicy
    stages: int
    rounds: int


CONDITIONS = (
    Conditions("SpecPipe", "static_tree", StaticTree(), 8, ROUNDS),
    Conditions("SpecPipe", "level cut before", SPECPIPE, 8, 1),
    Conditions("SpecPipe", "best_first", BestFirst(64, 16, row_cost=0.0001), 8, ROUNDS),
    Conditions("PipeDec", "static_tree", StaticTree(), 14, 1),
    Conditions("PipeDec", "level", Level(32, 16), 14, 1),
    Conditions("PipeDec", "best_first", BestFirst(32, 16, row_cost=0.0001), 14, 1),
)


@dataclass(frozen=True)
class Text:
    """A prompt and the text after it, and how that was decided."""

    prompt: list[int]
    answer: list[int]
    sampling: SamplingParams


def greedy_texts(pair: Pair, prompts: Sequence[list[int]], tokens: int) -> list[Text]:
    """The target's greedy answers."""
    answers = cluster.reference(pair.target, prompts, tokens)
    return [Text(*each, SamplingParams()) for each in zip(prompts, answers, strict=True)]


def sampled_texts(pair: Pair, prompts: Sequence[list[int]], tokens: int, seeds: int) -> list[Text]:
    """The target's answers with the papers' sampling; prompts have the seeds 1, 2, ... in turn."""
    found: list[Text | None] = [None] * len(prompts)
    plain = ("cluster.stages=1", "policy=root", "proposer=suffix")
    with EmbeddedRedis() as server:
        for seed in range(1, seeds + 1):
            chosen = range(seed - 1, len(prompts), seeds)
            asked = [prompts[i] for i in chosen]
            sampling = SamplingParams(TEMPERATURE, top_p=TOP_P, top_k=TOP_K, seed=seed)
            answers = pair.decode(server, asked, tokens, *plain, sampling=sampling).answers
            for i, answer in zip(chosen, answers, strict=True):
                found[i] = Text(prompts[i], answer, sampling)
    return [text for text in found if text is not None]


class Draft:
    """A draft model as rank 0 holds it."""

    def __init__(self, pair: Pair, stages: int, *settings: str):
        chosen = ["proposer=draft_model", f"cluster.stages={stages}", *settings]
        deployment = cluster.make_deployment(pair.target, pair.draft, *chosen)
        model = rank_components.load_model(deployment, 0)
        assert model is not None
        runner = SliceRunner(model, model.num_slots)
        self.proposer = rank_components.make_proposer(deployment, runner, None)

    def replay(
        self, policy: SpeculationPolicy, stages: int, rounds: int, replayed: Sequence[Text]
    ) -> list[tuple[int, int]]:
        """Tokens and steps of each text."""
        replay = Replay(policy, self.proposer, stages=stages, rounds=rounds)
        for text in replayed:
            replay.decode(text.prompt, text.answer, text.sampling)
        return replay.result.by_text


def tokens_per_step(by_text: Sequence[tuple[int, int]]) -> Interval:
    return intervals.ratio([tokens for tokens, _ in by_text], [steps for _, steps in by_text])


def slowdown(greedy: Sequence[tuple[int, int]], sampled: Sequence[tuple[int, int]]) -> Interval:
    """How many times as many steps a token takes when it is sampled, in pairs of texts of one
    prompt, all of which have as many tokens."""
    return intervals.ratio([steps for _, steps in sampled], [steps for _, steps in greedy])


def row(interval: Interval, **named: Any) -> dict[str, Any]:
    return {**named, **asdict(interval)}


def chain_rows(
    pair: Pair, replayed: Sequence[Text], chains: Sequence[int], folder: Path
) -> list[dict[str, Any]]:
    """Tokens per call by the draft's format, and of the first one by the length of the chain."""
    shape = inflate.Shape.of(inflate.read_config(pair.draft))
    hidden, units = FITTING
    inflate.write(
        pair.draft, folder / "plain", shape.grow(hidden, shape.layers, units), torch.bfloat16
    )
    pack(folder / "plain", folder / "packed", folder / "dense", KINDS["awq"])
    rows = []
    for form in track(FORMATS, "formats", transient=True):
        path = folder / ("packed" if form.packed else "plain")
        for length in chains if form is FORMATS[0] else chains[:1]:
            policy = StaticTree([1] * length)
            draft = Draft(Pair(pair.target, path), 1, "model.dtype=bfloat16", *form.settings)
            found = draft.replay(policy, 1, length, replayed)
            tokens = sum(of_text for of_text, _ in found)
            rows.append(row(tokens_per_step(found), draft=form.name, chain=length, tokens=tokens))
    return rows


def sampling_row(
    pair: Pair, each: Conditions, greedy: Sequence[Text], sampled: Sequence[Text]
) -> dict[str, Any]:
    """Steps per token of one method, sampled over greedy."""
    torch.set_num_threads(1)  # as in a rank
    draft = Draft(pair, each.stages, f"proposer.rounds={each.rounds}")
    found = {
        name: draft.replay(each.policy, each.stages, each.rounds, which)
        for name, which in (("greedy", greedy), ("sampled", sampled))
    }
    return row(
        slowdown(**found),
        paper=each.paper,
        method=each.method,
        stages=each.stages,
        tokens=sum(tokens for tokens, _ in found["sampled"]),
        **{f"{name}_tokens_per_step": tokens_per_step(found[name]).value for name in found},
    )


def measure_chains(pair: Pair, options: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """Title and rows of the draft's formats and of longer chains."""
    prompts = pair.prompts(options.prompts, options.prompt_tokens)
    greedy = greedy_texts(pair, prompts, options.tokens)
    with tempfile.TemporaryDirectory() as name:
        rows = chain_rows(pair, greedy, options.chains, Path(name))
    return f"Tokens per call, demo pair, {len(prompts)} prompts × {options.tokens} tokens", rows


def measure_sampling(pair: Pair, options: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """Title and rows of the methods of a paper."""
    prompts = pair.prompts(options.prompts, options.prompt_tokens)
    greedy = greedy_texts(pair, prompts, options.tokens)
    sampled = sampled_texts(pair, prompts, options.tokens, options.runs)
    chosen = [each for each in CONDITIONS if each.paper == options.part]
    # A fork would take over the threads of torch.
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(sampling_row, pair, each, greedy, sampled) for each in chosen]
        rows = [job.result() for job in jobs]
    title = (
        f"Steps per token, sampled over greedy ({options.runs} seeds), demo pair, "
        f"{len(prompts)} prompts × {options.tokens} tokens"
    )
    return title, rows


def main() -> None:
    parser = experiment.parser(__doc__)
    papers = dict.fromkeys(each.paper for each in CONDITIONS)
    parser.add_argument("part", choices=(CHAINS_PART, *papers), help="what is measured")
    parser.add_argument("--prompts", type=int, help="how many of the shipped ones (all)")
    parser.add_argument("--prompt-tokens", type=int, default=96, help="cut to (96)")
    parser.add_argument("--tokens", type=int, default=46, help="after each prompt (46)")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"seeds ({RUNS})")
    parser.add_argument("--chains", type=experiment.numbers, default=list(CHAINS))
    parser.add_argument("--jobs", type=int, default=num_jobs(), help="processes (one per core)")
    options = experiment.parse(parser, prompts=5, tokens=8, runs=1, chains=[3])
    torch.set_num_threads(1)  # as in a rank
    measure = measure_chains if options.part == CHAINS_PART else measure_sampling
    title, rows = measure(Pair(), options)
    experiment.publish(options, f"MEASURED: {title}", rows)


if __name__ == "__main__":
    main()
