"""Whether a draft head may feed a full pipeline: how accurate it is by the age of its features.

    python -m tools.late_features --target SmolLM2.gguf --json benchmarks/results/late_features.json

A one-layer head as EAGLE-3's (Li et al. 2025): its input is the embedding of the newest token and
the target's hidden states at three layers, one position before, joined; its own output takes their
place at later positions. It is trained with training-time test, unrolled over `--steps` positions,
on the target's greedy answers to the shipped prompts, towards the target's distribution over the
tokens that occur in them. A *distance* d counts positions from the newest true features. Measured
on held-out prompts, given the right text: A(d) over all positions; over survivors, where the d - 1
predictions before were right; and after a surprise, in the 8 positions after a token that the head
missed, whose features are the newest. The control is the same head without features.

Texts, features and heads are kept in `--folder`; a run that was killed continues there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipespec.engine.checkpoint import tokenizer
from pipespec.extras.bench import dataset
from tools.training import console, key_of, progress_steps, written

PROMPT_TOKENS = 256  # of a prompt at most
BEFORE = 32  # tokens of the prompt whose features the head sees
AT_ONCE = 16  # texts that the target decodes together
HELD_OUT = 8  # every so many a text is not learnt from
DISTANCES = 32
SURPRISE = 8  # positions after a miss
TEST_AT, CEILING = 8, 0.55  # the distance of the thresholds, and the least accuracy there
RESAMPLES = 1000
DECAY = 0.95  # of the weight of a later step in the loss
LEARNING_RATE, WARMUP = 1e-3, 30


@dataclass(frozen=True)
class Text:
    """The end of a prompt and the target's answer: `tokens` `[n]`, of which `answer` on is the
    answer, `features` of three layers `[n, 3 * hidden]` and the last, normed, `[n, hidden]`."""

    tokens: Tensor
    answer: int
    features: Tensor
    last: Tensor


# --- the target's answers -----------------------------------------------------------------------


def load(path: Path) -> PreTrainedModel:
    name = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if name else path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **name)
    return model.eval().requires_grad_(False)


def prompts(path: Path, count: int) -> list[list[int]]:
    encoder = tokenizer.load(path)
    found = []
    for sample in dataset.load(dataset.chosen(None), count):
        text = sample.prompt
        if isinstance(encoder.chat_template, str):
            message = [{"role": "user", "content": text}]
            how = {"chat_template": encoder.chat_template, "add_generation_prompt": True}
            text = encoder.apply_chat_template(message, **how)
        found.append(encoder.encode(text)[-PROMPT_TOKENS:])
    return found


@torch.inference_mode()
def answered(model: PreTrainedModel, asked: Sequence[list[int]], new: int) -> Iterator[Text]:
    """The prompts with the target's greedy answers, and its hidden states along them."""
    longest = max(map(len, asked))
    ids = torch.zeros(len(asked), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(asked):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
    ends = model.generation_config.eos_token_id
    eos = {ends} if isinstance(ends, int) else {*(ends or ())}
    for prompt, row in zip(asked, out, strict=True):
        answer = row[longest:].tolist()
        stop = next((i for i, token in enumerate(answer) if token in eos), len(answer))
        tokens = torch.tensor([*prompt, *answer[:stop]])
        if stop < 2 * SURPRISE:
            continue
        found = model.model(tokens[None], output_hidden_states=True)
        count = len(found.hidden_states) - 1
        layers = (2, count // 2, count - 2)
        first = max(0, len(prompt) - BEFORE)
        joined = torch.cat([found.hidden_states[layer][0] for layer in layers], -1)
        yield Text(
            tokens[first:],
            len(prompt) - first,
            joined[first:].half(),
            found.last_hidden_state[0, first:].half(),
        )


def texts(path: Path, model: PreTrainedModel, folder: Path, count: int, new: int) -> list[Text]:
    asked = prompts(path, count)
    found: list[Text] = []
    for piece in progress_steps("answers", 0, -(-len(asked) // AT_ONCE)):
        file = folder / f"answers_{key_of(path.name, count, new)}_{piece}.pt"
        if not file.exists():
            own = [*answered(model, asked[piece * AT_ONCE : (piece + 1) * AT_ONCE], new)]
            written(
                file, lambda partial, own=own: torch.save([vars(each) for each in own], partial)
            )
        found += [Text(**each) for each in torch.load(file)]
    return found


# --- the head -----------------------------------------------------------------------------------


class Head(nn.Module):
    """One decoder layer over the embedding of a token and what is known of the position before it:
    the target's features, or its own output."""

    def __init__(self, hidden: int, heads: int, intermediate: int, *, features: bool):
        super().__init__()
        self.heads, self.features = heads, features
        self.fuse = nn.Linear(3 * hidden, hidden, bias=False)
        self.of_token, self.of_before = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(2 * hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.of_mlp, self.of_logits = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.gate = nn.Linear(hidden, intermediate, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, features: Tensor, embedded: Tensor, steps: int) -> Iterator[Tensor]:
        """From features `[n, 3 * hidden]` and embeddings `[n + steps, hidden]`: what each step
        says of the position after the token that it reads, `[n, hidden]`. Step j at base i reads
        token i + j, attends to the inputs of step 1 up to base i, and to its own later ones."""
        n, hidden = len(features), embedded.shape[-1]
        before = self.fuse(features)
        if not self.features:
            before = torch.zeros_like(before)
        causal = torch.ones(n, n).tril().log()
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(1, steps + 1):
            token = self.of_token(embedded[step : step + n])
            joined = torch.cat((token, self.of_before(before)), -1)
            q, k, v = self.qkv(joined).view(n, 3, self.heads, -1).permute(1, 2, 0, 3)
            at = torch.arange(n) + step
            q, k = _rotated(q, at), _rotated(k, at)
            keys.append(k)
            values.append(v)
            scale = q.shape[-1] ** -0.5
            scores = [q @ keys[0].mT * scale + causal]
            scores += [(q * own).sum(-1, keepdim=True) * scale for own in keys[1:]]
            weights = torch.cat(scores, -1).softmax(-1)
            mixed = weights[..., :n] @ values[0]
            for number, own in enumerate(values[1:]):
                mixed = mixed + weights[..., n + number, None] * own
            state = before + self.out(mixed.transpose(0, 1).reshape(n, hidden))
            normed = self.of_mlp(state)
            before = state + self.down(F.silu(self.gate(normed)) * self.up(normed))
            yield self.of_logits(before)


def _rotated(of: Tensor, at: Tensor) -> Tensor:
    """Rotary embedding of positions `[n]` on `[heads, n, size]`."""
    half = of.shape[-1] // 2
    angle = at[:, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b = of[..., :half], of[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


@dataclass(frozen=True)
class Frozen:
    """What the head shares with the target: embeddings `[vocabulary, hidden]`, and the output rows
    of the tokens that it may say, `[known, hidden]`."""

    embeddings: Tensor
    rows: Tensor
    place: Tensor  # of each token of the vocabulary among the known ones; -1: not known

    @classmethod
    def of(cls, model: PreTrainedModel, learnt: Sequence[Text], most: int) -> Frozen:
        embeddings = model.get_input_embeddings().weight
        counts = torch.zeros(len(embeddings), dtype=torch.int64)
        for text in learnt:
            counts += torch.bincount(text.tokens, minlength=len(counts))
        known = counts.topk(min(most, int((counts > 0).sum()))).indices
        place = torch.full((len(counts),), -1)
        place[known] = torch.arange(len(known))
        return cls(embeddings, model.get_output_embeddings().weight[known], place)


def unrolled(head: Head, frozen: Frozen, text: Text, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each step: the logits of bases, and the positions of the tokens that these predict, of
    those in the answer."""
    n = len(text.tokens) - steps - 1
    embedded = frozen.embeddings[text.tokens]
    for step, said in enumerate(head(text.features[:n].float(), embedded, steps), 1):
        at = torch.arange(n) + step + 1
        inside = at >= text.answer
        yield said[inside] @ frozen.rows.T, at[inside]


def train(
    head: Head, frozen: Frozen, learnt: Sequence[Text], steps: int, epochs: int, file: Path
) -> None:
    """Learn the target's distribution, from the epoch on that the file has."""
    optimizer = torch.optim.AdamW(head.parameters(), LEARNING_RATE, (0.9, 0.95), weight_decay=0.05)
    begun = 0
    if file.exists():
        state = torch.load(file)
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        begun = state["epoch"]
    total = epochs * len(learnt)
    weights = [DECAY**step for step in range(steps)]
    for epoch in range(begun, epochs):
        order = np.random.default_rng(epoch).permutation(len(learnt))
        losses = []
        for number in progress_steps(file.stem, 0, len(order)):
            text = learnt[order[number]]
            done = epoch * len(order) + number
            decay = 0.5 * (1 + math.cos(math.pi * done / total))
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, (done + 1) / WARMUP) * decay
            if len(text.tokens) < steps + 2 + text.answer:
                continue
            with torch.autocast("cpu", torch.bfloat16):
                wanted = (text.last.float() @ frozen.rows.T).float().softmax(-1)
                parts = [
                    weight * F.cross_entropy(logits.float(), wanted[at - 1])
                    for weight, (logits, at) in zip(
                        weights, unrolled(head, frozen, text, steps), strict=True
                    )
                ]
            loss = torch.stack(parts).sum() / sum(weights)
            loss.backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        console.print(f"{file.stem} epoch {epoch + 1}/{epochs} loss {np.mean(losses):.3f}")
        state = {"head": head.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        written(file, lambda partial, state=state: torch.save(state, partial))


# --- what is measured ---------------------------------------------------------------------------


@torch.inference_mode()
def right(head: Head, frozen: Frozen, text: Text) -> np.ndarray:
    """Whether step d at base i says token i + d + 1, `[bases, DISTANCES]`; nan outside the
    answer."""
    n = len(text.tokens) - DISTANCES - 1
    found = np.full((n, DISTANCES), np.nan)
    for step, (logits, at) in enumerate(unrolled(head, frozen, text, DISTANCES)):
        hit = logits.argmax(-1) == frozen.place[text.tokens[at]]
        found[at.numpy() - step - 2, step] = hit.numpy()
    return found


def counts(found: np.ndarray) -> Mapping[str, np.ndarray]:
    """Hits and cases of one text, `[2, distances]`: of all positions, survivors, and after a
    surprise."""
    survives = np.cumprod(np.nan_to_num(found, nan=1.0), 1)
    before = np.column_stack((np.ones(len(found)), survives[:, :-1])) > 0
    # Step 1 at base i missed token i + 2, so base i + 1 has the newest features after it.
    missed = np.append(False, found[:-1, 0] == 0)
    chosen = {
        "all": np.ones_like(before),
        "survivors": before,
        "after a surprise": np.repeat(missed[:, None], found.shape[1], 1),
    }
    known = ~np.isnan(found)
    return {
        name: np.stack([(known & which & (found == 1)).sum(0), (known & which).sum(0)])
        for name, which in chosen.items()
    }


def measured(head: Head, frozen: Frozen, held_out: Sequence[Text]) -> dict[str, np.ndarray]:
    """Of all texts, `[texts, 2, distances]`."""
    long = [text for text in held_out if len(text.tokens) > DISTANCES + 2 + text.answer]
    each = [counts(right(head, frozen, text)) for text in long]
    return {name: np.stack([of[name] for of in each]) for name in each[0]}


def share(of: np.ndarray, distances: slice) -> float:
    hits, cases = of.sum(0)[:, distances].sum(1)
    return float(hits / max(cases, 1))


def interval(of: Mapping[str, np.ndarray], figure: Any) -> dict[str, float]:
    """A figure of counts, with the 95 % interval of resampled texts."""
    random = np.random.default_rng(0)
    size = len(next(iter(of.values())))
    drawn = []
    for _ in range(RESAMPLES):
        chosen = random.integers(size, size=size)
        drawn.append(figure({name: value[chosen] for name, value in of.items()}))
    low, high = np.percentile(drawn, (2.5, 97.5))
    return {"value": figure(of), "low": float(low), "high": float(high)}


def at(name: str, distance: int) -> Any:
    return lambda of: share(of[name], slice(distance - 1, distance))


def after_surprise(of: Mapping[str, np.ndarray]) -> float:
    return share(of["after a surprise"], slice(0, SURPRISE))


def decision(found: Mapping[str, Mapping[str, float]]) -> str:
    """By thresholds that were set before: no, yes, or between."""
    first, later = found["A(1)"]["value"], found[f"survivors({TEST_AT})"]["value"]
    surprised = found["after a surprise"]["value"]
    if found["added by features"]["value"] < 0.03:
        return "the test does not count: features add less than .03 at distance 1"
    if later < CEILING or surprised < 0.6 * first:
        return "no"
    return "yes" if later >= 0.9 * first and surprised >= 0.75 * first else "between"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="a folder or GGUF file")
    parser.add_argument("--folder", type=Path, default=Path("build/late_features"))
    parser.add_argument("--prompts", type=int, default=320, help="(320)")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer (128)")
    parser.add_argument("--steps", type=int, default=8, help="unrolled in training (8)")
    parser.add_argument("--epochs", type=int, default=4, help="(4)")
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens at most (8192)")
    parser.add_argument("--json", type=Path, help="also write what was found to this file")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    model = load(options.target)
    every = texts(options.target, model, options.folder, options.prompts, options.tokens)
    held_out = every[::HELD_OUT]
    learnt = [text for number, text in enumerate(every) if number % HELD_OUT]
    frozen = Frozen.of(model, learnt, options.vocabulary)
    config = model.config
    sizes = config.hidden_size, config.num_attention_heads, config.intermediate_size
    del model
    made_of = (options.prompts, options.tokens, options.steps, options.epochs, options.vocabulary)
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, features in (("head", True), ("control", False)):
        torch.manual_seed(0)
        head = Head(*sizes, features=features)
        file = options.folder / f"{name}_{key_of(options.target.name, *made_of)}.pt"
        train(head, frozen, learnt, options.steps, options.epochs, file)
        found[name] = measured(head.eval(), frozen, held_out)
    both = found["head"] | {f"control {name}": of for name, of in found["control"].items()}
    figures = {
        "A(1)": interval(both, at("all", 1)),
        f"survivors({TEST_AT})": interval(both, at("survivors", TEST_AT)),
        "after a surprise": interval(both, after_surprise),
        "added by features": interval(both, lambda of: at("all", 1)(of) - at("control all", 1)(of)),
    }
    rows = [
        {"head": name, "positions": kind, "distance": d, **interval(both, at(prefix + kind, d))}
        for name, prefix in (("head", ""), ("control", "control "))
        for kind in found["head"]
        for d in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    ]
    said = decision(figures)
    for row in rows:
        console.print(row)
    console.print(figures, said)
    if options.json:
        stored = {
            "date": datetime.date.today().isoformat(),
            "tokens": sum(len(text.tokens) - text.answer for text in learnt),
            "texts": [len(learnt), len(held_out)],
            "known": len(frozen.rows),
            "figures": figures,
            "decision": said,
            "rows": rows,
        }
        options.json.write_text(json.dumps(stored, indent=2) + "\n")


if __name__ == "__main__":
    main()
