"""Train a draft head for a target, from the target's own answers.

    python -m tools.train_head --target SmolLM2.gguf --out drafts/head

The head is one layer, as EAGLE-3's (`tools/draft_head.py`), and learns the target's distribution
with training-time test: unrolled over `--steps` positions, of which later ones count less. It
learns from greedy answers to the shipped prompts, of which every eighth is held out, and to those
of `--prompts`. After each epoch the head is written to `--out` and measured on the answers that are
held out. A run that was killed continues in `--folder`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel

from pipespec.engine.checkpoint import tokenizer
from pipespec.extras.bench import dataset
from tools.distilling import load_target
from tools.draft_head import DraftHead, feature_layers
from tools.training import console, key_of, train, written

PROMPT_TOKENS = 256  # of a prompt at most
SHORTEST = 16  # tokens of an answer
AT_ONCE = 40  # texts that the target decodes together
HELD_OUT = 8  # every so many a text is not learnt from
LEARNING_RATE = 1e-3
DECAY = 0.8  # of the weight of a later step in the loss
LIKELY, OTHERS = 16, 2048  # tokens of the target's best, and at random, in a text's loss
DISTANCES = 4  # draft tokens in a row that are measured


@dataclass(frozen=True)
class Text:
    """A prompt and the target's answer: `tokens` `[n]`, of which `answer` on is the answer,
    `features` of three layers `[n, 3 * hidden]` and the last, normed, `[n, hidden]`."""

    tokens: Tensor
    answer: int
    features: Tensor
    last: Tensor

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self.tokens[: self.answer].tolist())


@torch.inference_mode()
def answered(model: PreTrainedModel, asked: Sequence[list[int]], new: int) -> Iterator[Text]:
    """The prompts with the target's greedy answers of up to `new` tokens, except for short ones,
    and its hidden states along them."""
    longest = max(map(len, asked))
    before = [(longest - len(prompt), 0) for prompt in asked]
    pairs = [*zip(asked, before, strict=True)]
    ids = torch.stack([F.pad(torch.tensor(prompt), pad) for prompt, pad in pairs])
    mask = torch.stack([F.pad(torch.ones(len(p), dtype=torch.int64), pad) for p, pad in pairs])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
    ends = model.generation_config.eos_token_id
    eos = {ends} if isinstance(ends, int) else {*(ends or ())}
    layers = feature_layers(model.config.num_hidden_layers)
    for prompt, row in zip(asked, out, strict=True):
        answer = [*takewhile(lambda token: token not in eos, row[longest:].tolist())]
        if len(answer) < SHORTEST:
            continue
        tokens = torch.tensor([*prompt, *answer])
        found = model.model(tokens[None], output_hidden_states=True)
        joined = torch.cat([found.hidden_states[layer][0] for layer in layers], -1)
        yield Text(tokens, len(prompt), joined, found.last_hidden_state[0])


def texts(model: PreTrainedModel, path: Path | None, options: argparse.Namespace) -> list[Text]:
    """`answered` of the prompts of a data set, in the target's chat template; kept in the folder
    of the options."""
    encoder = tokenizer.load(options.target)
    asked = []
    for sample in dataset.load(dataset.chosen(path), options.count):
        text = sample.prompt
        if isinstance(encoder.chat_template, str):
            message = [{"role": "user", "content": text}]
            how = {"chat_template": encoder.chat_template, "add_generation_prompt": True}
            text = encoder.apply_chat_template(message, **how)
        asked.append(encoder.encode(text)[-PROMPT_TOKENS:])
    found: list[Text] = []
    for piece in track(range(-(-len(asked) // AT_ONCE)), "answers", console=console):
        own = asked[piece * AT_ONCE : (piece + 1) * AT_ONCE]
        key = key_of(options.target.name, own, options.tokens)
        file = options.folder / f"answers_{key}.pt"
        if not file.exists():
            made = [vars(text) for text in answered(model, own, options.tokens)]
            written(file, partial(torch.save, made))
        found += [Text(**each) for each in torch.load(file, mmap=True)]
    return found


# --- what the head says -------------------------------------------------------------------------


def unrolled(
    head: DraftHead, embeddings: Tensor, text: Text, steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each step: what the head puts out, `[bases, hidden]`, and the positions of the tokens
    that this says, `[bases]`, at all bases whose first such token is in the answer."""
    n = len(text.tokens) - steps - 1
    first = max(0, text.answer - 2)
    embedded = embeddings[text.tokens]
    outputs = head(text.features[:n].float(), embedded, steps, first)
    for step, output in enumerate(outputs, 1):
        yield output, torch.arange(first, n) + step + 1


def loss_of(
    head: DraftHead, embeddings: Tensor, text: Text, steps: int, random: np.random.Generator
) -> Tensor:
    """Cross entropy to the target's distribution over some of the head's tokens: those of the
    text, the target's best at each of its positions, and others at random."""
    places, rows = head.places(), head.lm_head.weight
    own = places[text.tokens]
    said = text.last[text.answer - 1 :].float() @ rows.T
    others = torch.from_numpy(random.integers(len(rows), size=OTHERS))
    some = torch.cat((own[own >= 0], said.topk(LIKELY).indices.flatten(), others)).unique()
    wanted = said[:, some].float().softmax(-1)
    losses = [
        F.cross_entropy((head.norm(output) @ rows[some].T).float(), wanted[at - text.answer])
        for output, at in unrolled(head, embeddings, text, steps)
    ]
    weights = torch.tensor([DECAY**step for step in range(steps)])
    return (torch.stack(losses) * weights).sum() / weights.sum()


# --- what is measured ---------------------------------------------------------------------------


@torch.inference_mode()
def right(head: DraftHead, embeddings: Tensor, text: Text, distances: int) -> np.ndarray:
    """Whether step d at a base says the text's token, `[bases, distances]`."""
    wanted = head.places()[text.tokens]
    found = [
        (head.logits(output).argmax(-1) == wanted[at]).numpy()
        for output, at in unrolled(head, embeddings, text, distances)
    ]
    return np.column_stack(found)


def counts(found: np.ndarray) -> Mapping[str, np.ndarray]:
    """Hits and cases of one text, `[2, distances]`, of whether step d at each base was right: of
    all positions, survivors, and after a surprise."""
    survives = np.cumprod(found, 1)
    before = np.column_stack((np.ones(len(found)), survives[:, :-1])) > 0
    # Step 1 at base i missed token i + 2, so base i + 1 has the newest features after it.
    missed = np.append(False, found[:-1, 0] == 0)
    chosen = {
        "all": np.ones_like(before),
        "survivors": before,
        "after a surprise": np.repeat(missed[:, None], found.shape[1], 1),
    }
    return {
        name: np.stack([(which & (found == 1)).sum(0), which.sum(0)])
        for name, which in chosen.items()
    }


def figures(head: DraftHead, embeddings: Tensor, held_out: Sequence[Text]) -> dict[str, Any]:
    """Accuracy by the distance from the newest true features, of all positions and along right
    drafts; and the tokens that a pass of the target decodes with so many draft tokens in a row."""
    long = [text for text in held_out if len(text.tokens) > DISTANCES + 2 + text.answer]
    random = np.random.default_rng(0)
    with torch.inference_mode():
        losses = [loss_of(head, embeddings, text, DISTANCES, random).item() for text in long]
    found = [right(head, embeddings, text, DISTANCES) for text in long]
    tokens = passes = 0
    for accepted in (np.cumprod(each, 1).sum(1) for each in found):
        base = 1  # the first token of an answer is the prompt's pass
        while base < len(accepted):
            passes += 1
            base += 1 + int(accepted[base])
        tokens += base - 1
    hits, cases = np.sum([[*counts(each).values()] for each in found], 0).swapaxes(0, 1)
    shares = (hits / cases.clip(1)).tolist()
    return {
        "loss": float(np.mean(losses)),
        "accuracy": shares[0],
        "accuracy along right drafts": shares[1],
        "tokens a pass": tokens / passes,
    }


# --- training -----------------------------------------------------------------------------------


def prepared(options: argparse.Namespace) -> tuple[DraftHead, Tensor, list[Text], list[Text]]:
    """A head before training, the target's embeddings `[vocabulary, hidden]`, the texts to learn
    from, and those held out.

    The head says the tokens of texts, the most frequent ones first, then the first of the
    vocabulary, which its tokenizer learnt first.
    """
    options.folder.mkdir(parents=True, exist_ok=True)
    model = load_target(options.target, torch.bfloat16)
    every = texts(model, None, options)
    held_out = every[::HELD_OUT]
    unseen = {text.prompt for text in held_out}
    if options.prompts:
        every += texts(model, options.prompts, options)
    learnt = [text for text in every if text.prompt not in unseen]
    embeddings = model.get_input_embeddings().weight.float()
    seen = torch.cat([text.tokens for text in learnt]).bincount(minlength=len(embeddings))
    said = seen.argsort(descending=True, stable=True)[: options.vocabulary]
    return DraftHead.before_training(model, said), embeddings, learnt, held_out


def trained(
    head: DraftHead,
    embeddings: Tensor,
    learnt: Sequence[Text],
    options: argparse.Namespace,
    name: str,
    on_epoch: Any,
) -> None:
    """Train a head in `options.folder`, one text a step."""
    long = [text for text in learnt if len(text.tokens) > options.steps + 2 + text.answer]
    head.lm_head.requires_grad_(False)
    learning = [each for each in head.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(
        learning, LEARNING_RATE, (0.9, 0.95), weight_decay=0.05, fused=True
    )

    def loss(step: int) -> Tensor:
        epoch, number = divmod(step, len(long))
        random = np.random.default_rng([options.seed, epoch])
        text = long[random.permutation(len(long))[number]]
        return loss_of(head, embeddings, text, options.steps, np.random.default_rng(step))

    began_with = {each: getattr(options, each) for each in ("epochs", "steps", "seed")}
    train(
        name,
        head,
        [optimizer],
        options.epochs * len(long),
        options.folder,
        loss,
        began_with=began_with | {"texts": len(long), "tokens": sum(len(t.tokens) for t in long)},
        checkpoint_every=len(long),
        log_every=100,
        on_checkpoint=lambda step: on_epoch(step // len(long)),
    )


def parser(what: str | None) -> argparse.ArgumentParser:
    """The options that a head's training has."""
    found = argparse.ArgumentParser(
        description=what, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--target", type=Path, required=True, help="a folder or GGUF file")
    found.add_argument("--prompts", type=Path, help="a data set to learn from too")
    found.add_argument("--count", type=int, default=1000, help="prompts of each data set (1000)")
    found.add_argument("--tokens", type=int, default=128, help="of an answer (128)")
    found.add_argument("--steps", type=int, default=4, help="unrolled in training (4)")
    found.add_argument("--epochs", type=int, default=6, help="(6)")
    found.add_argument("--vocabulary", type=int, default=12288, help="tokens at most (12288)")
    found.add_argument("--seed", type=int, default=1)
    return found


def main(argv: list[str] | None = None) -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--out", type=Path, required=True, help="folder of the head")
    options_of.add_argument("--folder", type=Path, help="for checkpoints (.training/NAME of --out)")
    options = options_of.parse_args(argv)
    options.folder = options.folder or Path(".training") / options.out.name
    head, embeddings, learnt, held_out = prepared(options)

    def measure(epoch: int) -> None:
        found = {"epoch": epoch, **figures(head, embeddings, held_out)}
        console.print(found)
        head.save(options.out, torch.bfloat16)
        (options.out / "accuracy.json").write_text(json.dumps(found, indent=2) + "\n")

    trained(head, embeddings, learnt, options, "head", measure)
    console.print(f"The head is in {options.out}.", soft_wrap=True)


if __name__ == "__main__":
    main()
