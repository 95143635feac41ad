"""A target and its draft: prompts, decoding, and the draft's accuracy.

Decoding runs the whole product with its ranks as threads of one process (`tools.rig.cluster`):
counts of steps, tokens and rows are the same as with processes, times are not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common.experiment import ROOT
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.core import SamplingParams
from pipespec.sampling.shared_noise import score_tokens
from pipespec.system.folders import resource_dir
from tools.rig import cluster

PROMPTS = ROOT / "tests" / "data" / "prompts.jsonl"
GREEDY = SamplingParams()


def shipped(count: int | None) -> list[dict[str, str]]:
    """`count` of the shipped prompts, evenly of all kinds: `id`, `benchmark`, `prompt`."""
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
        """Token ids of shipped prompts, evenly of all kinds, each cut to `max_tokens`."""
        tokenizer = AutoTokenizer.from_pretrained(self.target)
        return [tokenizer.encode(item["prompt"])[:max_tokens] for item in shipped(count)]

    def decode(
        self,
        server: EmbeddedRedis,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        *settings: str,
        sampling: SamplingParams = GREEDY,
        eos: tuple[int, ...] = (),
    ) -> Measured:
        """Decode `tokens` tokens after every prompt, or until a token of `eos`, one prompt at a
        time."""
        one_at_a_time = "scheduler.max_num_seqs=1"
        deployment = cluster.make_deployment(self.target, self.draft, one_at_a_time, *settings)
        how = {"max_new_tokens": tokens, "sampling": sampling, "eos": eos}
        requests = [{"prompt": tuple(prompt), **how} for prompt in prompts]
        answers = cluster.decode(deployment, server, requests)
        return Measured([tokens for tokens, *_ in answers], [stats for *_, stats in answers])

    def draft_ranks(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        sampling: SamplingParams,
    ) -> dict[str, np.ndarray]:
        """How many tokens the draft ranks before each sampled one, given the text before it: by its
        own probabilities (`plain`) and with the shared sampling noise (`foresight`)."""
        model = AutoModelForCausalLM.from_pretrained(self.draft, dtype=torch.float32)
        ranks: dict[str, list[int]] = {"plain": [], "foresight": []}
        for prompt, answer in zip(prompts, answers, strict=True):
            text = torch.tensor([[*prompt, *answer]])
            with torch.inference_mode():
                logits = model(text).logits[0, len(prompt) - 1 : -1]
            drawn = torch.tensor(answer)[:, None]
            positions = list(range(len(prompt), len(prompt) + len(answer)))
            ranks["plain"] += (logits > logits.gather(1, drawn)).sum(1).tolist()
            tokens, scored, _ = score_tokens(logits, positions, [sampling] * len(positions))
            order = tokens.gather(1, scored.argsort(1, descending=True))
            found = order == drawn
            none = torch.full((len(answer),), order.shape[1])
            ranks["foresight"] += found.int().argmax(1).where(found.any(1), none).tolist()
        return {name: np.array(values) for name, values in ranks.items()}


@dataclass(frozen=True)
class Measured:
    """Answers and statistics of some requests; `tokens_per_step` weighs all tokens equally."""

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
