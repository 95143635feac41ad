"""What the benchmarks know of a target and a draft: prompts, texts, accuracy, decoding.

Decoding runs the whole product with its ranks as threads of one process (`tools.rig.cluster`):
counts of steps, tokens and rows are those of processes, times are not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipespec.controller.server import EmbeddedRedis
from pipespec.core import Sampling
from pipespec.sampling.foresight import scores
from pipespec.system.resources import resource_dir
from tools.rig import cluster

PROMPTS = Path(__file__).parent.parent / "tests" / "data" / "prompts.jsonl"
GREEDY = Sampling()
# Ranks whose hit rate is measured.
RANKS = 16


def shipped(count: int | None) -> list[dict[str, str]]:
    """So many of the shipped prompts, of all kinds alike: `id`, `benchmark`, `prompt`."""
    items = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    if count is None:
        return items
    return [items[i * len(items) // count] for i in range(min(count, len(items)))]


@dataclass(frozen=True)
class Pair:
    """Folders of the two checkpoints; by default the demo pair."""

    target: Path = resource_dir("demo") / "target"
    draft: Path = resource_dir("demo") / "draft"

    def prompts(self, count: int | None, max_tokens: int) -> list[list[int]]:
        """Token ids of the shipped prompts, of all kinds alike, each cut to `max_tokens`."""
        tokenizer = AutoTokenizer.from_pretrained(self.target)
        return [tokenizer.encode(item["prompt"])[:max_tokens] for item in shipped(count)]

    def decode(
        self,
        server: EmbeddedRedis,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        *settings: str,
        sampling: Sampling = GREEDY,
        eos: tuple[int, ...] = (),
    ) -> Measured:
        """Decode `tokens` tokens after every prompt, whatever they are unless `eos` ends a text,
        one prompt at a time."""
        alone = "scheduler.max_num_seqs=1"
        deployment = cluster.make_deployment(self.target, self.draft, alone, *settings)
        how = {"max_new_tokens": tokens, "sampling": sampling, "eos": eos}
        asked = [{"prompt": tuple(prompt), **how} for prompt in prompts]
        answers = cluster.decode(deployment, server, asked)
        return Measured([tokens for tokens, *_ in answers], [stats for *_, stats in answers])

    def accuracy(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Guess:
        """How the draft ranks the target's tokens, and how sure it is, given the right text."""
        model = AutoModelForCausalLM.from_pretrained(self.draft, dtype=torch.float32)
        ranks: list[int] = []
        confidence: list[float] = []
        for prompt, answer in zip(prompts, answers, strict=True):
            text = torch.tensor([[*prompt, *answer]])
            with torch.inference_mode():
                logits = model(text).logits[0, len(prompt) - 1 : -1]
            told = logits.gather(1, torch.tensor(answer)[:, None])
            ranks += ((logits > told).sum(1) + 1).tolist()
            confidence += logits.softmax(-1).amax(1).tolist()
        shares = np.bincount(np.minimum(ranks, RANKS + 1), minlength=RANKS + 2)[1:-1] / len(ranks)
        # A later rank that by chance was hit more often than an earlier one is counted for it.
        cumulative = np.sort(shares)[::-1].cumsum()
        mean = float(np.mean(confidence))
        return Guess(
            curve=[f"{k}:{hit:.6f}" for k, hit in enumerate(cumulative, 1)],
            spread=float(np.var(confidence) / (mean * (1 - mean))),
            confidence=mean,
        )

    def foreseen(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        sampling: Sampling,
    ) -> dict[str, np.ndarray]:
        """How many tokens the draft ranks before each drawn one, given the right text before it:
        by its own probabilities (`plain`) and with the target's noise (`foresight`)."""
        model = AutoModelForCausalLM.from_pretrained(self.draft, dtype=torch.float32)
        ranks: dict[str, list[int]] = {"plain": [], "foresight": []}
        for prompt, answer in zip(prompts, answers, strict=True):
            text = torch.tensor([[*prompt, *answer]])
            with torch.inference_mode():
                logits = model(text).logits[0, len(prompt) - 1 : -1]
            drawn = torch.tensor(answer)[:, None]
            positions = list(range(len(prompt), len(prompt) + len(answer)))
            ranks["plain"] += (logits > logits.gather(1, drawn)).sum(1).tolist()
            tokens, scored, _ = scores(logits, positions, [sampling] * len(positions))
            order = tokens.gather(1, scored.argsort(1, descending=True))
            found = order == drawn
            none = torch.full((len(answer),), order.shape[1])
            ranks["foresight"] += found.int().argmax(1).where(found.any(1), none).tolist()
        return {name: np.array(values) for name, values in ranks.items()}


@dataclass(frozen=True)
class Guess:
    """A draft's accuracy as `pipespec plan` takes it; `confidence` is the mean probability of
    its best guess, which equals the curve's first point where the draft is calibrated."""

    curve: list[str]
    spread: float
    confidence: float


@dataclass(frozen=True)
class Measured:
    """Answers and statistics of some requests; means weigh every token alike."""

    answers: list[list[int]]
    stats: list[dict]

    @property
    def tokens_per_step(self) -> float:
        counted = [
            (len(answer) - 1, stats["tokens_per_step"])
            for answer, stats in zip(self.answers, self.stats, strict=True)
            if stats["tokens_per_step"]
        ]
        return sum(n for n, _ in counted) / sum(n / rate for n, rate in counted)

    def mean(self, name: str) -> float:
        values = [stats[name] for stats in self.stats if stats[name] is not None]
        return float(np.mean(values))

    @property
    def tbt_ms(self) -> float:
        return float(np.mean([stats["tbt_ms"]["mean"] for stats in self.stats]))
