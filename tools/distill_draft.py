"""Make a small independent draft for a target, from the target's own answers.

    python -m tools.distill_draft --target TARGET --text CORPUS --out DRAFT --layers 4
    python -m tools.distill_draft --target TARGET --answers FOLDER --out DRAFT --layers 4 --halve

The draft has the target's architecture with fewer layers, and with `--halve` half its widths. With
the target's widths it begins as so many of its layers, from the first to the last, and keeps its
embeddings and output head; with half of them it begins at random. It learns the target's
distribution (KL divergence, later also its greedy choice) on the target's own text: on answers that
`pipespec serve` has kept, `--answers`, or on the target's continuations of beginnings of `--text`,
a folder of text files, on which it learns too. `--target` is a folder, a GGUF file or a hub id,
`--tokens` the budget. A run that was killed continues in `--folder`. At every checkpoint the draft
is written, and measured on text that the target wrote and that it does not learn from, of kept
answers the newest; the curve goes into its `accuracy.json`. At the end `pipespec plan --drafts`
says what it would gain.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from pipespec.cli.main import main as pipespec
from pipespec.client.model_info import full_name
from tools.distilling import (
    BEGINNING,
    Text,
    kept_answers,
    kept_layers,
    kl_loss,
    load_target,
    model_folder,
    own_text,
    read,
    read_text,
    saying,
    student_of,
    suffix_ranks,
)
from tools.training import Budget, Mix, console, key_of, optimizers_for, train, written

TOP_KS = (1, 4, 16)
# Texts on which it is measured: of its own, and of kept answers the newest, such a share of them.
MEASURED_ROWS, MEASURED_SHARE = 32, 0.1


@torch.inference_mode()
def own_logits(model: PreTrainedModel, text: Text) -> Tensor:
    """`[tokens, vocabulary]`, for the part of a text that is the target's own."""
    ids = torch.from_numpy(text.ids.astype(np.int64))[None].to(model.device)
    return model(input_ids=ids, use_cache=False).logits[0, text.begin - 1 : -1]


def draft_ranks(
    draft: PreTrainedModel, texts: Sequence[Text], choices: Sequence[Tensor]
) -> np.ndarray:
    """The rank of the target's choices for the draft, from 1, where texts are the target's own."""
    ranks = []
    for text, chosen in zip(texts, choices, strict=True):
        logits = own_logits(draft, text)
        score = logits.gather(-1, chosen[:, None])
        ranks.append((logits > score).sum(-1).cpu().numpy() + 1)
    return np.concatenate(ranks)


def points(ranks: np.ndarray) -> list[str]:
    """How often the token is among the k best, as `pipespec plan` takes a curve: it begins above 0,
    and no rank is likelier than those before it, which by chance it may be."""
    hits = np.bincount(np.minimum(ranks, TOP_KS[-1] + 1), minlength=TOP_KS[-1] + 2)[1:-1]
    shares = np.maximum(np.sort(hits)[::-1].cumsum() / len(ranks), 1e-3)
    return [f"{k}:{share:.6f}" for k, share in enumerate(shares.tolist(), 1)]


def said(row: dict[str, Any]) -> str:
    shares = ", ".join(f"{top:.3f} among {k}" for k, top in zip(TOP_KS, row["top"], strict=True))
    return f"after {row['tokens'] / 1e6:.2f} M tokens the target's token is {shares} of the draft's"


def store(path: Path, values: dict[str, Any]) -> None:
    text = json.dumps(values, indent=2) + "\n"
    written(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="folder, GGUF file or hub id")
    parser.add_argument("--text", type=Path, help="folder of *.txt")
    parser.add_argument("--answers", type=Path, help="folder of answers that a server has kept")
    parser.add_argument("--out", type=Path, required=True, help="folder of the draft")
    parser.add_argument("--folder", type=Path, help="for checkpoints (.training/NAME of --out)")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--halve", action="store_true", help="half the target's widths")
    parser.add_argument("--tokens", type=int, default=20_000_000, help="to learn from (20 M)")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="per optimizer step (8192)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence (256)")
    parser.add_argument("--own-rows", type=int, default=1024, help="texts of the target (1024)")
    parser.add_argument("--own-share", type=float, default=0.5, help="of a batch (0.5)")
    parser.add_argument(
        "--vocabulary", type=int, help="the tokens, most frequent first, of the loss (all)"
    )
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps (100)")
    parser.add_argument("--log-every", type=int, default=20, help="steps (20)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.text is None and args.answers is None:
        parser.error("give --text, --answers or both, to learn from")
    if args.halve and args.vocabulary:
        parser.error("--halve makes an output head anew, which learns all tokens")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    args.folder = args.folder or Path(".training") / args.out.name
    args.folder.mkdir(parents=True, exist_ok=True)
    folder = model_folder(args.target)
    layers = kept_layers(read(AutoConfig, folder).num_hidden_layers, args.layers)
    tokenizer = read(AutoTokenizer, folder)
    target = load_target(folder, torch.float32).to(args.device)
    torch.manual_seed(args.seed)
    draft = student_of(target, layers, halve=args.halve).to(args.device)

    window = 1 + max(BEGINNING, args.length)
    text = [] if args.text is None else [read_text(args.text, tokenizer, window)]
    mix = Mix.of(text, [1.0] * len(text))
    if args.answers is None:
        learnt, texts = (
            own_text(target, mix, rows, args.length, seed, args.folder, str(folder))
            for rows, seed in ((args.own_rows, args.seed), (MEASURED_ROWS, args.seed + 1))
        )
    else:
        copied = args.folder / "answers"  # as a server goes on writing
        if not copied.exists():
            shutil.copytree(args.answers, copied)
        kept = kept_answers(copied, full_name(args.target))
        measured = max(1, int(MEASURED_SHARE * len(kept)))
        learnt, texts = kept[:-measured], kept[-measured:][-MEASURED_ROWS:]
    own = np.concatenate([each.ids for each in learnt])
    if len(own) <= window:
        raise SystemExit(
            f"The answers have {len(own)} tokens, of which more than {window} are needed."
        )
    mix = mix.plus(own, args.own_share if text else 1.0)

    budget = Budget(args.tokens, args.batch_tokens, args.length, args.seed)
    made_of = {
        "target": str(folder),
        "layers": layers,
        "halve": args.halve,
        "vocabulary": args.vocabulary,
    }
    path = args.folder / f"accuracy_{key_of(made_of, budget, mix.digest())}.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["accuracy"] if path.exists() else []
    dtype = read(AutoConfig, folder).dtype or torch.float32
    choices = [own_logits(target, each).argmax(-1) for each in texts]
    suffix = points(suffix_ranks(learnt, texts, TOP_KS[-1]))
    teacher, student = target, draft
    if args.vocabulary:
        seen = torch.from_numpy(np.bincount(np.concatenate(mix.streams)))
        frequent = seen.argsort(descending=True, stable=True)[: args.vocabulary].to(args.device)
        teacher, student = saying(target, frequent), saying(draft, frequent)

    def loss_of(step: int) -> Tensor:
        ids = budget.batch("draft", mix, step).to(args.device)
        return kl_loss(teacher, student, ids, step / budget.steps)

    def measure(step: int) -> None:
        ranks, tokens = draft_ranks(draft, texts, choices), step * budget.batch_tokens
        top = [float((ranks <= k).mean()) for k in TOP_KS]
        rows[:] = [*(row for row in rows if row["tokens"] < tokens), {"tokens": tokens, "top": top}]
        store(path, {"top_ks": TOP_KS, "accuracy": rows})
        console.print(said(rows[-1]), soft_wrap=True)
        copy.deepcopy(draft).to(dtype).save_pretrained(args.out)
        tokenizer.save_pretrained(args.out)
        plan = {"target": full_name(args.target), "curve": points(ranks), "suffix": suffix}
        store(args.out / "accuracy.json", {"top_ks": TOP_KS, "accuracy": rows, "plan": plan})

    if not rows:
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
    models = f"model.target={args.target}", f"model.draft={args.out}"
    console.print(f"The draft is in {args.out}.", soft_wrap=True)
    console.print(f"To decode with it: pipespec generate {' '.join(models)}", soft_wrap=True)
    pipespec(["plan", "--drafts", *models])


if __name__ == "__main__":
    main()
