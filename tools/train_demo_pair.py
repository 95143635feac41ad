"""Train the demo pair: a small target model, and a smaller draft model distilled from it.

    python tools/train_demo_pair.py --corpus CORPUS --prompts PROMPTS --work SCRATCH --out demo

Four steps, each picking up where an earlier run stopped, from what it finds in `--work`:

    tokenizer   byte-level BPE on the corpus
    target      next-token cross entropy                      (Muon + AdamW, warmup-stable-decay)
    draft       KL divergence to the target's distribution    (same optimizers, same corpus mix)
    export      bf16 safetensors, tokenizer and measured model card, for both models

The corpus is a folder of text files whose documents are separated by a line `<|endoftext|>`. Files
named `book_*` are held out: no step but the evaluation reads them. Every batch is a function of the
seed and the step, so a resumed run sees the batches that an uninterrupted one would have seen.
"""

from __future__ import annotations

import argparse
import json
import math
import string
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = "<|endoftext|>"
VOCAB_SIZE = 2048
# (from this progress on, sequence length): short is cheap, attention being half the cost at 512;
# the long end is there so that prompts of up to some thousand tokens behave.
LENGTHS = ((0.0, 256), (0.93, 1024))
EVALUATION_LEN = 512
WARMUP_STEPS = 50
DECAY_FRACTION = 0.3
MUON_LR, ADAM_LR = 0.02, 4e-3
TOP_KS = (1, 2, 4, 8, 16, 32)
CODE_BENCHMARKS = ("HumanEval", "HumanEval-X")  # continued as they are; the others are questions

# Words keep their leading space; digits stand alone, so that numbers of any length look alike.
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# A user turn reads as a problem of the arithmetic corpus, the only question-and-answer text seen.
# Calls of tools are as `tool_choice: required` has them written.
CHAT_TEMPLATE = (
    "{% if tools %}Functions: {{ tools | tojson }}\n\n{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' and message['tool_calls'] %}Answer: ["
    "{% for call in message['tool_calls'] %}{{ call['function'] | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}"
    "{% elif message['role'] == 'assistant' %}"
    "Answer: {{ message['content'] | trim }}{{ eos_token }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] | trim }}\n\n"
    "{% elif message['role'] == 'tool' %}Result: {{ message['content'] | trim }}\n"
    "{% else %}Question: {{ message['content'] | trim }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)

TARGET_SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
}
DRAFT_SHAPE = {
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 288,
}

# How often a file is read relative to its size, and what the model card says about it.
CORPUS_NOTES = {
    "childrens_books": (
        1.0,
        "58 children's books of Project Gutenberg (GITenberg)",
        "public domain (US)",
    ),
    "gsm8k_train": (2.0, "GSM8K, training split (openai/grade-school-math)", "MIT"),
    "python_stdlib": (1.0, "CPython 3.11.7 standard library, without tests", "PSF-2.0"),
    "tinyshakespeare": (2.0, "Tiny Shakespeare (karpathy/char-rnn)", "public domain"),
}
DEFAULT_NOTE = (1.0, "supplied by the user", "see its origin")

console = Console()


# --- text and tokens ---------------------------------------------------------------------------


def corpus_files(folder: Path, held_out: bool) -> list[Path]:
    """Text files to train on, or those held out (`book_*`); licence texts are neither."""
    files = [p for p in sorted(folder.glob("*.txt")) if "LICENSE" not in p.name]
    files = [p for p in files if p.name.startswith("book_") == held_out]
    if not files:
        kind = "held-out text files (book_*.txt)" if held_out else "text files to train on"
        raise SystemExit(f"{folder} has no {kind}; add at least one.")
    return files


def documents(path: Path) -> list[str]:
    parts = path.read_text(encoding="utf-8").split(f"\n{EOS}\n")
    return [part.strip("\n") for part in parts if part.strip()]


def train_tokenizer(files: list[Path]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator((doc for path in files for doc in documents(path)), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, path: Path) -> np.ndarray:
    """The file as one stream of token ids `[tokens]`, each document closed by the end token."""
    encodings = tokenizer.backend_tokenizer.encode_batch(documents(path), add_special_tokens=False)
    return np.concatenate([np.array([*e.ids, tokenizer.eos_token_id], np.int32) for e in encodings])


@dataclass(frozen=True)
class Mix:
    """Token streams and the probability of drawing a training window from each."""

    streams: list[np.ndarray]
    probabilities: np.ndarray

    @classmethod
    def of(cls, streams: list[np.ndarray], weights: list[float]) -> Mix:
        mass = np.array([len(s) * w for s, w in zip(streams, weights, strict=False)], float)
        return cls(streams, mass / mass.sum())

    def plus(self, stream: np.ndarray, share: float) -> Mix:
        return Mix([*self.streams, stream], np.append(self.probabilities * (1 - share), share))

    def windows(self, rng: np.random.Generator, rows: int, length: int) -> Tensor:
        """Random windows `[rows, length]`."""
        picked = rng.choice(len(self.streams), rows, p=self.probabilities)
        starts = [rng.integers(len(self.streams[i]) - length) for i in picked]
        rows_ = [self.streams[i][s : s + length] for i, s in zip(picked, starts, strict=False)]
        return torch.from_numpy(np.stack(rows_).astype(np.int64))


# --- models ------------------------------------------------------------------------------------


def new_model(shape: dict, eos_token_id: int) -> LlamaForCausalLM:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
            bos_token_id=None,
            pad_token_id=None,
            eos_token_id=eos_token_id,
            **shape,
        )
    )
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=eos_token_id)
    return model


def num_multiply_adds(model: LlamaForCausalLM) -> int:
    """Multiply-adds per token in the matrices, with the output head, without attention."""
    matrices = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    return matrices + model.lm_head.weight.numel()


def next_token_loss(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def distillation_loss(
    draft: LlamaForCausalLM, ids: Tensor, target_logits: Tensor, top1_weight: Tensor
) -> Tensor:
    """KL(target || draft), plus cross entropy to the target's greedy choice.

    The second term is what verification rewards: the draft is kept when its guess is the target's
    arg-max. It enters late, when the draft already knows the distribution.
    """
    wanted = target_logits.flatten(0, 1).float()
    logits = draft(input_ids=ids, use_cache=False).logits.flatten(0, 1).float()
    kl = F.kl_div(
        F.log_softmax(logits, -1), F.log_softmax(wanted, -1), reduction="batchmean", log_target=True
    )
    return kl + top1_weight * F.cross_entropy(logits, wanted.argmax(-1))


@torch.inference_mode()
def continue_greedily(model: LlamaForCausalLM, ids: Tensor, num_new: int) -> Tensor:
    """Greedy continuation that runs through end tokens: `[rows, n]` -> `[rows, n + num_new]`."""
    out = model(input_ids=ids, use_cache=True)
    tokens = [ids, out.logits[:, -1:].argmax(-1)]
    while len(tokens) <= num_new:
        out = model(input_ids=tokens[-1], past_key_values=out.past_key_values, use_cache=True)
        tokens.append(out.logits[:, -1:].argmax(-1))
    return torch.cat(tokens, 1)


# --- training ----------------------------------------------------------------------------------


def sequence_length(progress: float) -> int:
    return max(length for start, length in LENGTHS if progress >= start)


def learning_rate_scale(step: int, steps: int) -> float:
    """Warmup, stable, then linear decay; only the decay depends on the total number of steps."""
    decay = (steps - step) / max(1.0, steps * DECAY_FRACTION)
    return min(1.0, (step + 1) / WARMUP_STEPS, decay)


def optimizers_for(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    hidden = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is h for h in hidden)]
    return [
        torch.optim.Muon(hidden, lr=MUON_LR, weight_decay=0.05),
        torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(
    name: str,
    model: LlamaForCausalLM,
    mix: Mix,
    steps: int,
    args: argparse.Namespace,
    loss_of: Callable[[Tensor, float], Tensor],
) -> int:
    """Train to `steps`, resuming from the checkpoint of `name`; return the tokens seen in all.

    `loss_of(ids, progress)` gives the loss of `ids` `[rows, length]` at `progress` in [0, 1).
    """
    path = args.work / f"{name}.pt"
    optimizers = optimizers_for(model)
    base_lrs = [group["lr"] for opt in optimizers for group in opt.param_groups]
    first, tokens_seen = 0, 0
    if path.exists():
        state = torch.load(path, map_location=args.device)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=False):
            optimizer.load_state_dict(saved)
        first, tokens_seen = state["step"], state["tokens_seen"]
    groups = [group for opt in optimizers for group in opt.param_groups]

    def save(step: int) -> None:
        partial = path.with_suffix(".partial")
        torch.save(
            {
                "model": model.state_dict(),
                "step": step,
                "tokens_seen": tokens_seen,
                "optimizers": [opt.state_dict() for opt in optimizers],
            },
            partial,
        )
        partial.replace(path)

    model.train()
    started, tokens_before, recent = time.monotonic(), tokens_seen, []
    for step in progress_steps(name, first, steps):
        length = sequence_length(step / steps)
        rng = np.random.default_rng([args.seed, *name.encode(), step])
        ids = mix.windows(rng, args.batch_tokens // length, length + 1).to(args.device)
        for group, lr in zip(groups, base_lrs, strict=False):
            group["lr"] = lr * learning_rate_scale(step, steps)
        with torch.autocast(args.device, torch.bfloat16):
            loss = loss_of(ids, step / steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        tokens_seen += ids.shape[0] * length
        recent.append(loss.item())
        if (step + 1) % args.log_every == 0:
            rate = (tokens_seen - tokens_before) / (time.monotonic() - started)
            console.print(
                f"{name} step {step + 1}/{steps} loss {np.mean(recent):.4f} "
                f"lr x{learning_rate_scale(step, steps):.2f} {rate:,.0f} tokens/s"
            )
            recent.clear()
        if (step + 1) % args.checkpoint_every == 0:
            save(step + 1)
    if first < steps:
        save(steps)
    return tokens_seen


def progress_steps(name: str, first: int, steps: int) -> Iterator[int]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=steps, completed=first)
        for step in range(first, steps):
            yield step
            progress.advance(task)


def train_target(target: LlamaForCausalLM, mix: Mix, args: argparse.Namespace) -> int:
    loss = torch.compile(next_token_loss, dynamic=False, disable=not args.compile)
    return train("target", target, mix, args.target_steps, args, lambda ids, _: loss(target, ids))


def train_draft(
    draft: LlamaForCausalLM, target: LlamaForCausalLM, mix: Mix, args: argparse.Namespace
) -> int:
    """Distil on the corpus mix and on text that the target wrote itself, as it will at run time."""
    target.requires_grad_(False).eval()
    mix = mix.plus(target_text(target, mix, args), args.target_text_share)
    logits_of = torch.compile(
        lambda ids: target(input_ids=ids, use_cache=False).logits,
        dynamic=False,
        disable=not args.compile,
    )
    loss = torch.compile(distillation_loss, dynamic=False, disable=not args.compile)

    def loss_of(ids: Tensor, progress: float) -> Tensor:
        with torch.no_grad():
            wanted = logits_of(ids)
        late = max(0.0, (progress - 0.5) / 0.5)
        return loss(draft, ids, wanted, torch.tensor(late, device=ids.device))

    return train("draft", draft, mix, args.draft_steps, args, loss_of)


def target_text(target: LlamaForCausalLM, mix: Mix, args: argparse.Namespace) -> np.ndarray:
    """Greedy continuations of corpus windows as one stream `[tokens]`, kept for later runs."""
    path = args.work / "target_text.npy"
    if not path.exists():
        rng = np.random.default_rng((args.seed, 0))
        pieces = []
        for start in progress_steps("target text", 0, math.ceil(args.target_text_rows / 128)):
            heads = mix.windows(rng, min(128, args.target_text_rows - 128 * start), 96)
            with torch.autocast(args.device, torch.bfloat16):
                pieces.append(continue_greedily(target, heads.to(args.device), 256).cpu())
        np.save(path, torch.cat(pieces).flatten().numpy().astype(np.int32))
    return np.load(path)


# --- evaluation and export ---------------------------------------------------------------------


@dataclass
class Agreement:
    """How often the target's greedy choice is among the draft's k best guesses."""

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


@torch.inference_mode()
def on_held_out(target, draft, tokenizer, args) -> tuple[dict[str, tuple[float, float]], Agreement]:
    """Loss of both models (nats per token, bits per byte) and agreement on the held-out books."""
    agreement, nats, num_tokens, num_bytes = Agreement(), {"target": 0.0, "draft": 0.0}, 0, 0
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
                for name, model in (("target", target), ("draft", draft))
            }
            for name in nats:
                nats[name] += F.cross_entropy(
                    logits[name], ids[:, 1:].flatten(), reduction="sum"
                ).item()
            agreement.add(logits["target"], logits["draft"])
    losses = {
        name: (total / num_tokens, total / math.log(2) / num_bytes) for name, total in nats.items()
    }
    return losses, agreement


@torch.inference_mode()
def on_prompts(target, draft, tokenizer, args) -> dict[str, Agreement]:
    """Agreement along the target's own greedy continuations of a sample of each prompt file."""
    found = {}
    for path in sorted(args.prompts.glob("*.jsonl")):
        agreement = found.setdefault(path.stem, Agreement())
        lines = path.read_text(encoding="utf-8").splitlines()
        for line in lines[:: max(1, len(lines) // args.prompts_per_file)][: args.prompts_per_file]:
            ids = torch.tensor([prompt_ids(json.loads(line), tokenizer)], device=args.device)
            text = continue_greedily(target, ids, args.continuation_tokens)
            ends = (text[0, ids.shape[1] :] == tokenizer.eos_token_id).nonzero()
            stop = ids.shape[1] + (int(ends[0]) + 1 if len(ends) else args.continuation_tokens)
            judged = slice(ids.shape[1] - 1, stop - 1)
            target_logits, draft_logits = (
                model(input_ids=text[:, :stop], use_cache=False).logits[0, judged]
                for model in (target, draft)
            )
            agreement.add(target_logits, draft_logits)
    return found


def prompt_ids(prompt: dict, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    text = prompt["prompt"]
    if prompt.get("benchmark") not in CODE_BENCHMARKS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def export(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> LlamaForCausalLM:
    """Write the model in bf16 and return it as a user will load it, computing in fp32."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def write_cards(target, draft, tokenizer, mix: Mix, tokens_seen: dict[str, int], args) -> None:
    losses, held_out = on_held_out(target, draft, tokenizer, args)
    by_file = on_prompts(target, draft, tokenizer, args)
    together = Agreement(
        sum(a.hits for a in by_file.values()), sum(a.count for a in by_file.values())
    )
    corpus_rows = []
    for path, stream, share in zip(
        corpus_files(args.corpus, held_out=False), mix.streams, mix.probabilities, strict=False
    ):
        _, origin, licence = CORPUS_NOTES.get(path.stem, DEFAULT_NOTE)
        corpus_rows.append(f"| {origin} | {licence} | {len(stream) / 1e6:.2f} M | {share:.0%} |")
    template = string.Template(
        Path(__file__).with_name("model_card.md.tmpl").read_text(encoding="utf-8")
    )
    for name, model in (("target", target), ("draft", draft)):
        config = model.config
        card = template.substitute(
            name=name,
            role=ROLES[name],
            num_parameters=f"{model.num_parameters() / 1e6:.2f} M",
            shape=f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, "
            f"{config.num_attention_heads} heads ({config.num_key_value_heads} for K and V), "
            f"intermediate {config.intermediate_size}, tied embeddings, vocabulary {VOCAB_SIZE}",
            multiply_adds=f"{num_multiply_adds(model) / 1e6:.2f} M",
            ratio=f"{num_multiply_adds(target) / num_multiply_adds(draft):.1f}",
            tokens_seen=f"{tokens_seen[name] / 1e6:.1f} M",
            target_loss=f"{losses['target'][0]:.3f}",
            target_bpb=f"{losses['target'][1]:.3f}",
            draft_loss=f"{losses['draft'][0]:.3f}",
            draft_bpb=f"{losses['draft'][1]:.3f}",
            corpus="\n".join(corpus_rows),
            top_ks=" | ".join(f"top-{k}" for k in TOP_KS),
            dashes="|".join(["---:"] * len(TOP_KS)),
            agreement="\n".join(
                [
                    held_out.row("held-out books (text given)"),
                    together.row("shipped prompts (target's own text)"),
                    *(a.row(f"&nbsp;&nbsp;{n}") for n, a in by_file.items()),
                ]
            ),
            continuation_tokens=args.continuation_tokens,
            prompts_per_file=args.prompts_per_file,
        )
        (args.out / name / "README.md").write_text(card, encoding="utf-8")
    console.print(card)


ROLES = {
    "target": "The large model of the pair: the one whose greedy output must be reproduced.",
    "draft": "The small model of the pair: it guesses what the target will say. It was distilled "
    "from the target and is of no use without it.",
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="folder of *.txt")
    parser.add_argument(
        "--prompts", type=Path, required=True, help='folder of *.jsonl, each line with "prompt"'
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for the tokenizer and checkpoints"
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="gets target/ and draft/")
    parser.add_argument("--target-steps", type=int, default=4000)
    parser.add_argument("--draft-steps", type=int, default=1500)
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens per optimizer step")
    parser.add_argument(
        "--target-text-rows", type=int, default=768, help="continuations written for the draft"
    )
    parser.add_argument(
        "--target-text-share", type=float, default=0.2, help="share of them in its batches"
    )
    parser.add_argument("--prompts-per-file", type=int, default=16)
    parser.add_argument("--continuation-tokens", type=int, default=128)
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    files = corpus_files(args.corpus, held_out=False)

    if not (args.work / "tokenizer").exists():
        train_tokenizer(files).save_pretrained(args.work / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.work / "tokenizer")
    weights = [CORPUS_NOTES.get(path.stem, DEFAULT_NOTE)[0] for path in files]
    mix = Mix.of([encode(tokenizer, path) for path in files], weights)

    target = new_model(TARGET_SHAPE, tokenizer.eos_token_id).to(args.device)
    draft = new_model(DRAFT_SHAPE, tokenizer.eos_token_id).to(args.device)
    ratio = num_multiply_adds(target) / num_multiply_adds(draft)
    console.print(
        f"target {target.num_parameters():,} parameters, draft {draft.num_parameters():,}, "
        f"multiply-adds per token {ratio:.2f} to 1, corpus {sum(map(len, mix.streams)):,} tokens, "
        f"mix {dict(zip((p.stem for p in files), mix.probabilities.round(3), strict=True))}"
    )
    tokens_seen = {"target": train_target(target, mix, args)}
    target = export(target, tokenizer, args.out / "target").to(args.device)
    tokens_seen["draft"] = train_draft(draft, target, mix, args)
    draft = export(draft, tokenizer, args.out / "draft").to(args.device)
    write_cards(target, draft, tokenizer, mix, tokens_seen, args)


if __name__ == "__main__":
    main()
