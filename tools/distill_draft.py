"""Make a small independent draft for a target, from the target's own answers.

    python -m tools.distill_draft --target TARGET --text CORPUS --out DRAFT --layers 4
    python -m tools.distill_draft --target TARGET --text CORPUS --out DRAFT --layers 4 --halve

The draft has the target's architecture with fewer layers, and with `--halve` half its widths. With
the target's widths it begins as so many of its layers, from the first to the last; with half of
them, at random. It learns the target's distribution (KL divergence, later also its greedy choice)
on `--text`, a folder of text files, and on the target's own continuations of beginnings of it.
`--target` is a folder or a hub id, `--tokens` the budget. A run that was killed continues in
`--folder`. At every checkpoint the draft is measured on text that the target wrote and that it does
not learn from; the curve goes into `accuracy.json` of the draft and its model card.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tools.distilling import OwnText, kept_layers, kl_loss, model_folder, read_text, student_of
from tools.training import Budget, Mix, console, key_of, optimizers_for, train, written

TOP_KS = (1, 4, 16)
# Beginnings that the target continues, in tokens; of those it is measured on, so many rows.
BEGINNING, MEASURED_ROWS, ROWS_AT_ONCE = 64, 32, 64


@torch.inference_mode()
def accuracy(target: PreTrainedModel, draft: PreTrainedModel, texts: np.ndarray) -> list[float]:
    """How often the target's greedy token is among the draft's k best, for each of TOP_KS, behind
    the beginnings of texts `[rows, tokens]`."""
    hits, count = np.zeros(len(TOP_KS), np.int64), 0
    for ids in torch.from_numpy(texts.astype(np.int64)).split(8):
        ids = ids.to(target.device)
        wanted, logits = (
            model(input_ids=ids, use_cache=False).logits[:, BEGINNING - 1 : -1]
            for model in (target, draft)
        )
        score = logits.gather(-1, wanted.argmax(-1, keepdim=True))
        rank = (logits > score).sum(-1)
        hits += [int((rank < k).sum()) for k in TOP_KS]
        count += rank.numel()
    return (hits / count).tolist()


class Curve:
    """Accuracy by tokens learnt from, kept in a file."""

    def __init__(self, path: Path):
        self.path = path
        self.rows: dict[int, list[float]] = {}
        if path.exists():
            held = json.loads(path.read_text(encoding="utf-8"))["accuracy"]
            self.rows = {each["tokens"]: each["top"] for each in held}

    def add(self, tokens: int, shares: list[float]) -> None:
        self.rows[tokens] = shares
        values = [{"tokens": n, "top": self.rows[n]} for n in sorted(self.rows)]
        text = json.dumps({"top_ks": TOP_KS, "accuracy": values}, indent=2) + "\n"
        written(self.path, lambda partial: partial.write_text(text, encoding="utf-8"))

    def table(self) -> str:
        """As Markdown."""
        lines = [
            f"| {tokens / 1e6:.2f} M | " + " | ".join(f"{share:.3f}" for share in self.rows[tokens])
            for tokens in sorted(self.rows)
        ]
        head = " | ".join(f"top-{k}" for k in TOP_KS)
        return "\n".join(
            [f"| tokens | {head} |", "|---" * (len(TOP_KS) + 1) + "|", *(f"{x} |" for x in lines)]
        )


def findings(tokens: int, shares: list[float]) -> str:
    """A measurement in words, one sentence a line."""
    return "\n".join(
        f"After {tokens / 1e6:.2f} M tokens the target's greedy token is "
        f"{'the best' if k == 1 else f'among the {k} best'} of the draft in {100 * share:.1f} % "
        "of places."
        for k, share in zip(TOP_KS, shares, strict=True)
    )


def conclusion(args: argparse.Namespace, shares: list[float]) -> str:
    """The draft's folder and the next steps, one sentence a line."""
    points = ",".join(f"{k}:{share:.3f}" for k, share in zip(TOP_KS, shares, strict=True))
    return (
        f"The draft is in {args.out}.\n"
        f"To decode with it: pipespec generate model.target={args.target} model.draft={args.out}\n"
        f"To predict what it gains: pipespec plan curve={points}"
    )


def card(draft: PreTrainedModel, budget: Budget, curve: Curve, args: argparse.Namespace) -> str:
    config, widths = draft.config, "half its widths" if args.halve else "its widths"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {args.out.name}

A draft for {Path(args.target).name}: {config.num_hidden_layers} layers, {widths}, \
{draft.num_parameters() / 1e6:.2f} M parameters. Made by `tools/distill_draft.py` of pipespec from \
{budget.steps * budget.batch_tokens / 1e6:.1f} M tokens.

How often the target's greedy token is among the best k of the draft, along text that the target
writes itself and that the draft did not learn from:

{curve.table()}
"""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="folder or hub id of the target")
    parser.add_argument("--text", type=Path, required=True, help="folder of *.txt")
    parser.add_argument("--out", type=Path, required=True, help="folder of the draft")
    parser.add_argument("--folder", type=Path, help="for checkpoints (.training/NAME of --out)")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--halve", action="store_true", help="half the target's widths")
    parser.add_argument("--tokens", type=int, default=20_000_000, help="to learn from (20 M)")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="per optimizer step (8192)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence (256)")
    parser.add_argument("--own-rows", type=int, default=1024, help="texts of the target (1024)")
    parser.add_argument("--own-share", type=float, default=0.5, help="of a batch (0.5)")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps (100)")
    parser.add_argument("--log-every", type=int, default=20, help="steps (20)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    args.folder = args.folder or Path(".training") / args.out.name
    args.folder.mkdir(parents=True, exist_ok=True)
    folder = model_folder(args.target)
    layers = kept_layers(AutoConfig.from_pretrained(folder).num_hidden_layers, args.layers)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    target.requires_grad_(False).eval().to(args.device)
    torch.manual_seed(args.seed)
    draft = student_of(target, layers, halve=args.halve).to(args.device)

    streams = read_text(args.text, tokenizer, 1 + max(BEGINNING, args.length))
    mix = Mix.of(streams, [1.0] * len(streams))
    own = OwnText(args.own_rows, BEGINNING, args.length, ROWS_AT_ONCE, args.seed)
    learnt = own.pieces(target, mix, args.folder, str(folder))
    unseen = replace(own, rows=MEASURED_ROWS, seed=args.seed + 1)
    texts = np.concatenate(unseen.pieces(target, mix, args.folder, str(folder)))
    mix = mix.plus(np.concatenate([piece.flatten() for piece in learnt]), args.own_share)

    budget = Budget(args.tokens, args.batch_tokens, args.length, args.seed)
    made_of = {"target": str(folder), "layers": layers, "halve": args.halve}
    curve = Curve(args.folder / f"accuracy_{key_of(made_of, budget, mix.digest())}.json")

    def loss_of(step: int) -> Tensor:
        ids = budget.batch("draft", mix, step).to(args.device)
        return kl_loss(target, draft, ids, step / budget.steps)

    def measure(step: int) -> None:
        shares = accuracy(target, draft, texts)
        curve.add(step * budget.batch_tokens, shares)
        console.print(findings(step * budget.batch_tokens, shares), soft_wrap=True)

    if not curve.rows:
        measure(0)
    train(
        "draft",
        draft,
        optimizers_for(draft, draft.model.layers),
        budget.steps,
        args.folder,
        loss_of,
        began_with=budget.began_with(mix) | made_of,
        checkpoint_every=args.checkpoint_every,
        log_every=args.log_every,
        on_checkpoint=measure,
    )
    stored = AutoConfig.from_pretrained(folder).dtype or torch.float32
    draft.to(stored).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "accuracy.json").write_bytes(curve.path.read_bytes())
    text = card(draft, budget, curve, args)
    (args.out / "README.md").write_text(text, encoding="utf-8")
    console.print(curve.table(), soft_wrap=True)
    console.print(conclusion(args, shares=curve.rows[max(curve.rows)]), soft_wrap=True)


if __name__ == "__main__":
    main()
