"""The demo models' cards: measured losses, agreement with the target, loops, cost."""

from __future__ import annotations

import argparse
import json
import math
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tools.demo_text import (
    CORPUS_NOTES,
    DEFAULT_NOTE,
    VOCAB_SIZE,
    corpus_files,
    encode,
    prompt_ids,
)
from tools.distilling import continue_greedily
from tools.training import Cost, Mix, console

EVALUATION_LEN = 512
TOP_KS = (1, 2, 4, 8, 16, 32)
# A text loops when this many last tokens repeat with a period of at most that many.
LOOP_TOKENS, LOOP_PERIOD = 64, 32


def num_multiply_adds(model: LlamaForCausalLM) -> int:
    """Multiply-adds per token in the matrices, with the output head, without attention."""
    matrices = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    return matrices + model.lm_head.weight.numel()


@dataclass
class Agreement:
    """How often the target's greedy choice is among the draft's k best tokens."""

    hits: np.ndarray = field(default_factory=lambda: np.zeros(len(TOP_KS), np.int64))
    count: int = 0

    def add(self, target_logits: Tensor, draft_logits: Tensor) -> None:
        """Count positions; both logits are `[positions, vocab]`."""
        score = draft_logits.gather(-1, target_logits.argmax(-1, keepdim=True))
        rank = (draft_logits > score).sum(-1)
        self.hits += np.array([int((rank < k).sum()) for k in TOP_KS])
        self.count += rank.numel()

    def row(self, label: str) -> str:
        rates = " | ".join(f"{hits / self.count:.3f}" for hits in self.hits)
        return f"| {label} | {self.count:,} | {rates} |"


def loops(tokens: Sequence[int]) -> bool:
    """Whether the last `LOOP_TOKENS` tokens repeat the text up to `LOOP_PERIOD` before them."""
    tail = list(tokens[-LOOP_TOKENS:])
    return len(tail) == LOOP_TOKENS and any(
        tail[period:] == tail[:-period] for period in range(1, LOOP_PERIOD + 1)
    )


@torch.inference_mode()
def on_held_out(models, tokenizer, args) -> tuple[dict[str, tuple[float, float]], dict]:
    """Of each model the loss (nats per token, bits per byte), of each draft its agreement with the
    target, on the held-out books."""
    agreement = {name: Agreement() for name in models if name != "target"}
    nats, num_tokens, num_bytes = dict.fromkeys(models, 0.0), 0, 0
    for path in corpus_files(args.corpus, held_out=True):
        stream = encode(tokenizer, path)
        usable = (len(stream) - 1) // EVALUATION_LEN * EVALUATION_LEN
        windows = [
            torch.from_numpy(stream[i : i + EVALUATION_LEN + 1].astype(np.int64))
            for i in range(0, usable, EVALUATION_LEN)
        ]
        num_bytes += len(tokenizer.decode(stream[1 : usable + 1]).encode())
        num_tokens += usable
        for batch in torch.stack(windows).split(16):
            ids = batch.to(args.device)
            logits = {
                name: model(input_ids=ids[:, :-1], use_cache=False).logits.flatten(0, 1)
                for name, model in models.items()
            }
            next_ids = ids[:, 1:].flatten()
            for name, mine in logits.items():
                nats[name] += F.cross_entropy(mine, next_ids, reduction="sum").item()
            for name, found in agreement.items():
                found.add(logits["target"], logits[name])
    losses = {
        name: (total / num_tokens, total / math.log(2) / num_bytes) for name, total in nats.items()
    }
    return losses, agreement


@torch.inference_mode()
def on_prompts(models, tokenizer, args) -> tuple[dict[str, dict[str, Agreement]], dict[str, list]]:
    """Along the target's own greedy continuations of a sample of each prompt file: the agreement
    by draft and file, and by file whether each continuation loops."""
    found = {name: {} for name in models if name != "target"}
    looping: dict[str, list[bool]] = {}
    target = models["target"]
    for path in sorted(args.prompts.glob("*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for line in lines[:: max(1, len(lines) // args.prompts_per_file)][: args.prompts_per_file]:
            ids = torch.tensor([prompt_ids(json.loads(line), tokenizer)], device=args.device)
            text = continue_greedily(target, ids, args.continuation_tokens)
            ends = (text[0, ids.shape[1] :] == tokenizer.eos_token_id).nonzero()
            stop = ids.shape[1] + (int(ends[0]) + 1 if len(ends) else args.continuation_tokens)
            looping.setdefault(path.stem, []).append(loops(text[0, ids.shape[1] : stop].tolist()))
            judged = slice(ids.shape[1] - 1, stop - 1)
            logits = {
                name: model(input_ids=text[:, :stop], use_cache=False).logits[0, judged]
                for name, model in models.items()
            }
            for name, by_file in found.items():
                by_file.setdefault(path.stem, Agreement()).add(logits["target"], logits[name])
    return found, looping


def agreement_rows(name: str, held_out: Agreement, by_file: dict[str, Agreement]) -> list[str]:
    together = Agreement(
        sum(a.hits for a in by_file.values()), sum(a.count for a in by_file.values())
    )
    return [
        held_out.row(f"{name}, held-out books (text given)"),
        together.row(f"{name}, shipped prompts (target's own text)"),
        *(a.row(f"&nbsp;&nbsp;{file}") for file, a in by_file.items()),
    ]


def write_cards(
    models: dict[str, LlamaForCausalLM],
    tokenizer: PreTrainedTokenizerFast,
    mix: Mix,
    costs: dict[str, Cost],
    folder: Path,
    args: argparse.Namespace,
) -> None:
    """Measure the models, the target among them, and write `README.md` of each in `folder`."""
    losses, held_out = on_held_out(models, tokenizer, args)
    by_file, looping = on_prompts(models, tokenizer, args)
    corpus_rows = []
    for path, stream, share in zip(
        corpus_files(args.corpus, held_out=False), mix.streams, mix.probabilities, strict=True
    ):
        _, origin, licence = CORPUS_NOTES.get(path.stem, DEFAULT_NOTE)
        corpus_rows.append(f"| {origin} | {licence} | {len(stream) / 1e6:.2f} M | {share:.0%} |")
    template = string.Template(
        Path(__file__).with_name("model_card.md.tmpl").read_text(encoding="utf-8")
    )
    for name, model in models.items():
        config = model.config
        ratio = num_multiply_adds(models["target"]) / num_multiply_adds(model)
        card = template.substitute(
            name=name,
            role=ROLES[name],
            num_parameters=f"{model.num_parameters() / 1e6:.2f} M",
            shape=f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, "
            f"{config.num_attention_heads} heads ({config.num_key_value_heads} for K and V), "
            f"intermediate {config.intermediate_size}, tied embeddings, vocabulary {VOCAB_SIZE}",
            multiply_adds=f"{num_multiply_adds(model) / 1e6:.2f} M",
            ratio=f"{ratio:.1f}",
            tokens_seen=f"{costs[name].tokens / 1e6:.1f} M",
            cpu_hours=f"{costs[name].cpu_seconds / 3600:.1f} hours",
            device=args.device,
            losses="\n".join(
                f"| {n} | {nats:.3f} | {bpb:.3f} |" for n, (nats, bpb) in losses.items()
            ),
            corpus="\n".join(corpus_rows),
            looping="\n".join(
                f"| {file} | {sum(found)} of {len(found)} |" for file, found in looping.items()
            ),
            loop_tokens=LOOP_TOKENS,
            loop_period=LOOP_PERIOD,
            top_ks=" | ".join(f"top-{k}" for k in TOP_KS),
            dashes="|".join(["---:"] * len(TOP_KS)),
            agreement="\n".join(
                row for n in by_file for row in agreement_rows(n, held_out[n], by_file[n])
            ),
            continuation_tokens=args.continuation_tokens,
            prompts_per_file=args.prompts_per_file,
        )
        (folder / name / "README.md").write_text(card, encoding="utf-8")
    console.print(card)


ROLES = {
    "target": "The large model of the three: the one whose greedy output must be reproduced.",
    "mid": "The model between the two others: in a cascade it scores what the draft proposes. It "
    "was distilled from the target and is of no use without it.",
    "draft": "The small model of the three: it proposes what the target will say. It was distilled "
    "from the target and is of no use without it.",
}
