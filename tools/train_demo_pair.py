"""Train the demo models: a target, and a mid-size and a small draft model distilled from it.

    python -m tools.train_demo_pair --corpus CORPUS --out demo

Its parts, in `--folder`, from which a killed run continues:

    tokenizer   byte-level BPE on the corpus
    target      next-token cross entropy                      (Muon + AdamW, warmup-stable-decay)
    text        the target's own continuations of beginnings of the corpus
    mid, draft  layers of the target, then KL divergence to
                the target's distribution                     (same optimizers, corpus and text)
    export      bf16 safetensors and tokenizer of each, into `--out`

How much each model learns is a budget of tokens. `--corpus` is described in `tools.demo_text`.
Every batch is a function of the seed, the budget and the step, so interruptions change no weight.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.demo_text import (
    CORPUS_NOTES,
    DEFAULT_NOTE,
    VOCAB_SIZE,
    corpus_files,
    encode,
    train_tokenizer,
)
from tools.distilling import OwnText, kept_layers, student_of, to_learn_from
from tools.training import Budget, Cost, Mix, console, train, written

# (from this progress on, sequence length): short is cheap, attention being half the cost at 512;
# the long end is there so that prompts of up to some thousand tokens behave.
LENGTHS = ((0.0, 256), (0.93, 1024))
# The target's own text: rows of a beginning from the corpus and a greedy continuation.
BEGINNING, CONTINUATION, ROWS_AT_ONCE = 96, 256, 128

# From this progress on a share of each batch repeats its beginning, of so many tokens; the target
# learns to be less confident each time, by this factor, so that its greedy text ends a repetition
# (DITTO, arXiv 2206.02369). The second time is not penalised, as much text rightly occurs twice.
AGAIN_FROM, AGAIN_SHARE, AGAIN_TOKENS, AS_SURE = 0.6, 0.25, (4, 40), 0.5

SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
}
# Of the target's layers, with which the others begin. In bf16 the three take 6.8, 3.7 and 1.8 MB.
LAYERS = {"mid": 8, "draft": 3}


def new_target(eos_token_id: int) -> LlamaForCausalLM:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
            bos_token_id=None,
            pad_token_id=None,
            eos_token_id=eos_token_id,
            **SHAPE,
        )
    )
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=eos_token_id)
    return model


def next_token_loss(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def said_again(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Windows `[rows, length]` that say their beginning again and again, and of how many tokens
    each beginning is `[rows]`, which the window decides."""
    least, most = AGAIN_TOKENS
    tokens = least + ids[:, 0] % (most - least)
    places = torch.arange(ids.shape[1], device=ids.device) % tokens[:, None]
    return ids.gather(1, places), tokens


def target_loss(model: LlamaForCausalLM, ids: Tensor, progress: float) -> Tensor:
    """Cross entropy of the next token, and late in the training of growing surer."""
    rows = int(len(ids) * AGAIN_SHARE) if progress >= AGAIN_FROM else 0
    if not rows:
        return next_token_loss(model, ids)
    again, tokens = said_again(ids[:rows])
    logits = model(input_ids=torch.cat((again, ids[rows:]))[:, :-1], use_cache=False).logits.float()
    plain = F.cross_entropy(logits[rows:].flatten(0, 1), ids[rows:, 1:].flatten(), reduction="sum")
    chance = logits[:rows].softmax(-1).gather(-1, again[:, 1:, None]).squeeze(-1)
    places = torch.arange(chance.shape[1], device=ids.device).expand_as(chance)
    before = chance.detach().gather(1, (places - tokens[:, None]).clamp(min=0))
    off = (chance - AS_SURE * before).abs()[places >= 2 * tokens[:, None]]
    return (plain - torch.log1p(-off.clamp(max=1 - 1e-4)).sum()) / ids[:, 1:].numel()


def learn(
    name: str,
    model: LlamaForCausalLM,
    mix: Mix,
    args: argparse.Namespace,
    loss_of: Callable[[Tensor, float], Tensor],
) -> Cost:
    budget = Budget(getattr(args, f"{name}_tokens"), args.batch_tokens, LENGTHS, args.seed)
    return train(
        name,
        model,
        mix,
        budget,
        args.folder,
        loss_of,
        checkpoint_every=args.checkpoint_every,
        log_every=args.log_every,
    )


def train_target(target: LlamaForCausalLM, mix: Mix, args: argparse.Namespace) -> Cost:
    return learn("target", target, mix, args, lambda ids, done: target_loss(target, ids, done))


def train_student(
    name: str,
    student: LlamaForCausalLM,
    target: LlamaForCausalLM,
    mix: Mix,
    args: argparse.Namespace,
) -> Cost:
    """Distil on the corpus mix and on text that the target wrote itself, as it will at run time."""
    loss_of = to_learn_from(target, student, compiled=args.compile)
    return learn(name, student, mix, args, loss_of)


def export(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> LlamaForCausalLM:
    """Write the model in bf16 and return it as a user will load it, computing in fp32."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="folder of *.txt")
    parser.add_argument(
        "--out", type=Path, required=True, help="gets target/, mid/ and draft/, at the end"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(".training"), help="tokenizer and checkpoints"
    )
    parser.add_argument("--target-tokens", type=int, default=20_000_000)
    parser.add_argument("--mid-tokens", type=int, default=2_000_000)
    parser.add_argument("--draft-tokens", type=int, default=5_000_000)
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens per optimizer step")
    parser.add_argument(
        "--target-text-rows", type=int, default=2048, help="continuations written for the drafts"
    )
    parser.add_argument(
        "--target-text-share", type=float, default=0.5, help="share of them in their batches"
    )
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps")
    parser.add_argument("--log-every", type=int, default=20, help="steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available()
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    files = corpus_files(args.corpus, held_out=False)
    if not (args.folder / "tokenizer").exists():
        written(args.folder / "tokenizer", train_tokenizer(files).save_pretrained)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.folder / "tokenizer")
    weights = [CORPUS_NOTES.get(path.stem, DEFAULT_NOTE)[0] for path in files]
    mix = Mix.of([encode(tokenizer, path) for path in files], weights)
    shares = zip((p.stem for p in files), mix.probabilities.round(3).tolist(), strict=True)
    console.print(f"corpus {sum(map(len, mix.streams)):,} tokens, mix {dict(shares)}")

    torch.manual_seed(args.seed)
    models = {"target": new_target(tokenizer.eos_token_id).to(args.device)}
    train_target(models["target"], mix, args)

    ready = args.folder / "models"

    def exported(name: str) -> LlamaForCausalLM:
        model = export(models[name], tokenizer, ready / name).to(args.device)
        return model.requires_grad_(False).eval()

    models["target"] = exported("target")
    own = OwnText(args.target_text_rows, BEGINNING, CONTINUATION, ROWS_AT_ONCE, args.seed)
    pieces = own.pieces(models["target"], mix, args.folder)
    own_text = np.concatenate([piece.flatten() for piece in pieces])
    distilled_on = mix.plus(own_text, args.target_text_share)
    for name, layers in LAYERS.items():
        kept = kept_layers(SHAPE["num_hidden_layers"], layers)
        models[name] = student_of(models["target"], kept, halve=False).to(args.device)
        models[name].generation_config = models["target"].generation_config
        train_student(name, models[name], models["target"], distilled_on, args)
        models[name] = exported(name)
    shutil.copytree(ready, args.out, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
