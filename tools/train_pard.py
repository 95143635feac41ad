"""Turn a draft model into one that proposes several tokens per pass (PARD, arXiv 2504.18583).

    python -m tools.train_pard --target demo/target --draft demo/draft --text CORPUS \\
        --work SCRATCH --out demo/draft_pard

The draft learns to use a *mask token*: up to `--tokens` - 1 of them follow the text, each attends
to the text and the masks before it, and predicts the token after its position. It learns from the
target's distribution at that place (KL divergence, later also its greedy choice). Masks are dropped
at random (COD, section 3.2 of the paper): of the places that have a mask of some depth a share
`--retain` has one of the next, but never less than `--least` of all; a mask is kept only if those
that it sees are. The mask token is a new row of the embedding, the last; `pard_token` in
config.json is its id and `pard_tokens` how many tokens a pass proposes.

`--text` is a folder of text files; half of what is learnt from is text that the target continues
greedily itself. If interrupted, it continues from the last checkpoint in `--work`; every batch is a
function of the seed and the step.
"""

from __future__ import annotations

import argparse
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tools.distilling import OwnText
from tools.training import Budget, Mix, console, model_folder, train

HEAD_TOKENS = 64  # of a text that the target continues
TOP_KS = (1, 4, 16)


@dataclass(frozen=True)
class Places:
    """The rows of one training batch: the text, then the masks behind its places.

    Arrays int64 `[rows]`: `anchor`, the last token of text that a row sees; `depth`, 0 for text, i
    for the i-th mask behind it. A row stands at position anchor + depth.
    """

    anchor: Tensor
    depth: Tensor

    @classmethod
    def drawn(
        cls, length: int, tokens: int, retain: float, least: float, rng: np.random.Generator
    ) -> Places:
        """Conditional drop: nested subsets of the places of `length` tokens of text."""
        kept = np.arange(length)
        anchors, depths = [kept], [np.zeros(length, np.int64)]
        for depth in range(1, tokens):
            count = round(length * max(retain**depth, least))
            inside = kept[kept + depth < length]  # what follows is known
            kept = np.sort(rng.permutation(inside)[:count])
            anchors.append(kept)
            depths.append(np.full(len(kept), depth))
        return cls(*(torch.from_numpy(np.concatenate(x)) for x in (anchors, depths)))

    @property
    def positions(self) -> Tensor:
        return self.anchor + self.depth

    def mask(self) -> Tensor:
        """The attention mask, bool `[rows, rows]`: the text up to the anchor, then the masks of the
        same anchor up to the row itself."""
        text = (self.depth == 0) & (self.anchor <= self.anchor[:, None])
        same = (self.anchor == self.anchor[:, None]) & (self.depth <= self.depth[:, None])
        return text | same


def mask_logits(model: PreTrainedModel, ids: Tensor, places: Places, mask_token: int) -> Tensor:
    """The draft's logits at every row, `[batch, rows, vocab]`, for texts `[batch, length]`."""
    rows = ids[:, places.anchor].masked_fill(places.depth > 0, mask_token)
    bias = torch.zeros(places.mask().shape).masked_fill(~places.mask(), -torch.inf)
    return model(
        input_ids=rows,
        position_ids=places.positions.to(ids.device)[None],
        attention_mask=bias.to(ids.device)[None, None],
        use_cache=False,
    ).logits


def loss_of(logits: Tensor, wanted: Tensor, top1_weight: float) -> Tensor:
    """KL(target || draft), and cross entropy to the target's greedy choice, which is what
    verification rewards; both logits are `[rows, vocab]`."""
    logits, wanted = logits.float(), wanted.float()
    logp = F.log_softmax(logits, -1)
    kl = F.kl_div(logp, F.log_softmax(wanted, -1), reduction="batchmean", log_target=True)
    return kl + top1_weight * F.nll_loss(logp, wanted.argmax(-1))


# --- text --------------------------------------------------------------------------------------


def read_text(folder: Path, tokenizer, window: int) -> list[np.ndarray]:
    """Token ids of each text file that is longer than a window of so many tokens, except licences
    and those held out (`book_*`)."""
    files = [p for p in sorted(folder.glob("*.txt")) if "LICENSE" not in p.name]
    files = [p for p in files if not p.name.startswith("book_")]
    if not files:
        raise SystemExit(f"{folder} has no text files (*.txt) to learn from; add at least one.")
    found = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(ids) > window:
            found.append(ids)
        else:
            said = f"{path} is left out: {len(ids)} tokens are no more than the {window} of a text"
            console.print(said, soft_wrap=True)
    if not found:
        raise SystemExit(
            f"No text file of {folder} has more than {window} tokens; add longer ones."
        )
    return found


# --- training ----------------------------------------------------------------------------------


def shared_vocabulary(draft: PreTrainedModel, target: PreTrainedModel) -> int:
    """Tokens that both have: either may be padded, and the draft has the mask token besides."""
    return min(draft.config.pard_token, target.config.vocab_size)


def to_learn_from(
    target: PreTrainedModel, draft: PreTrainedModel, args: argparse.Namespace
) -> Callable[[Tensor, float], Tensor]:
    """The loss of a draft on windows `[rows, length + 1]`, for `tools.training.train`; the places
    of a step's masks are drawn by its progress."""
    vocabulary = shared_vocabulary(draft, target)

    def loss(ids: Tensor, progress: float) -> Tensor:
        ids = ids[:, :-1]
        rng = np.random.default_rng([args.seed, 1, round(progress * args.steps)])
        places = Places.drawn(args.length, args.tokens, args.retain, args.least, rng)
        with torch.no_grad():
            logits = target(input_ids=ids, use_cache=False).logits[..., :vocabulary]
        wanted = logits[:, places.positions]
        logits = mask_logits(draft, ids, places, draft.config.pard_token)[..., :vocabulary]
        return loss_of(logits.flatten(0, 1), wanted.flatten(0, 1), max(0.0, 2 * progress - 1))

    return loss


# --- evaluation and export ---------------------------------------------------------------------


@torch.inference_mode()
def agreement(draft: PreTrainedModel, target: PreTrainedModel, texts: Tensor, args) -> np.ndarray:
    """How often the target's greedy choice is among the draft's k best tokens, by depth,
    `[tokens, len(TOP_KS)]`, along texts `[rows, length]`."""
    length = texts.shape[1]
    places = Places.drawn(length, args.tokens, 1.0, 1.0, np.random.default_rng(0))
    hits = np.zeros((args.tokens, len(TOP_KS)))
    counts = np.zeros(args.tokens)
    vocabulary = shared_vocabulary(draft, target)
    for ids in texts.to(args.device).split(2):
        logits = target(input_ids=ids, use_cache=False).logits[..., :vocabulary]
        wanted = logits.argmax(-1)[:, places.positions]
        logits = mask_logits(draft, ids, places, draft.config.pard_token)
        rank = (logits > logits.gather(-1, wanted[..., None])).sum(-1)
        for depth in range(args.tokens):
            mine = rank[:, places.depth == depth]
            counts[depth] += mine.numel()
            hits[depth] += [int((mine < k).sum()) for k in TOP_KS]
    return hits / counts[:, None]


def write_card(draft: PreTrainedModel, shares: np.ndarray, args) -> None:
    template = string.Template(
        Path(__file__).with_name("pard_card.md.tmpl").read_text(encoding="utf-8")
    )
    rows = [
        f"| {depth} | " + " | ".join(f"{share:.3f}" for share in mine) + " |"
        for depth, mine in enumerate(shares, 1)
    ]
    card = template.substitute(
        name=args.out.name,
        draft=Path(args.draft).name,
        target=Path(args.target).name,
        num_parameters=f"{draft.num_parameters() / 1e6:.2f} M",
        tokens=args.tokens,
        mask_token=draft.config.pard_token,
        steps=f"{args.steps:,}",
        batch=args.batch,
        length=args.length,
        retain=args.retain,
        least=args.least,
        evaluated=args.evaluated,
        top_ks=" | ".join(f"top-{k}" for k in TOP_KS),
        dashes="|".join(["---:"] * len(TOP_KS)),
        agreement="\n".join(rows),
    )
    (args.out / "README.md").write_text(card, encoding="utf-8")
    console.print(card)


def export(draft: PreTrainedModel, tokenizer, args) -> PreTrainedModel:
    """Write the model in its own type and return it as a user will load it, computing in fp32."""
    dtype = AutoConfig.from_pretrained(model_folder(args.draft)).dtype or torch.float32
    draft.to(dtype).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    return AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32).eval()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="folder or hub id of the target")
    parser.add_argument("--draft", required=True, help="folder or hub id of a plain draft")
    parser.add_argument("--text", type=Path, required=True, help="folder of *.txt")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4, help="proposed per pass (4)")
    parser.add_argument("--retain", type=float, default=0.7, help="of places, per depth (0.7)")
    parser.add_argument("--least", type=float, default=0.2, help="of places, at any depth (0.2)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32, help="texts per step (32)")
    parser.add_argument("--length", type=int, default=128, help="tokens of each (128)")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--target-rows", type=int, default=1024, help="texts of the target (1024)")
    parser.add_argument("--evaluated", type=int, default=64, help="texts for the card (64)")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    target_folder, draft_folder = model_folder(args.target), model_folder(args.draft)
    tokenizer = AutoTokenizer.from_pretrained(draft_folder)
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    target.requires_grad_(False).to(args.device)
    draft = AutoModelForCausalLM.from_pretrained(draft_folder, dtype=torch.float32)
    mask_token = draft.config.vocab_size
    draft.resize_token_embeddings(mask_token + 1)
    draft.config.pard_token, draft.config.pard_tokens = mask_token, args.tokens
    draft.to(args.device)
    streams = read_text(args.text, tokenizer, 1 + max(HEAD_TOKENS, args.length))
    mix = Mix.of(streams, [1.0] * len(streams))
    vocabulary = shared_vocabulary(draft, target)
    own = OwnText(args.target_rows, HEAD_TOKENS, args.length, 64, args.seed, vocabulary)
    pieces = own.pieces(target, mix, args.work, str(target_folder))
    learnt = np.concatenate([piece.flatten() for piece in pieces])
    batch_tokens = args.batch * args.length
    budget = Budget(args.steps * batch_tokens, batch_tokens, ((0.0, args.length),), args.seed)
    adam = torch.optim.AdamW(draft.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0)
    made_of = {name: getattr(args, name) for name in ("retain", "least", "lr", "target_rows")}
    train(
        "draft",
        draft,
        mix.plus(learnt, 0.5),
        budget,
        args.work,
        to_learn_from(target, draft, args),
        checkpoint_every=args.log_every,
        log_every=args.log_every,
        optimizers=[adam],
        made_of={
            "target": str(target_folder),
            "draft": str(draft_folder),
            "masks": args.tokens,
            **made_of,
        },
    )
    draft = export(draft, tokenizer, args).to(args.device)
    # Texts that were not learnt from: other beginnings, continued by the target.
    (args.work / "measured").mkdir(exist_ok=True)
    unseen = replace(own, rows=args.evaluated, seed=args.seed + 1)
    texts = np.concatenate(unseen.pieces(target, mix, args.work / "measured", str(target_folder)))
    texts = torch.from_numpy(texts[:, HEAD_TOKENS:].astype(np.int64))
    write_card(draft, agreement(draft, target, texts, args), args)


if __name__ == "__main__":
    main()
