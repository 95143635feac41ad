"""Training to a budget of tokens, which may be killed at any time and then continues.

A step's batch and its learning rate are functions of the budget and the step alone, and a
checkpoint holds the whole state at the end of a step. So interruptions do not change the weights.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

WARMUP_STEPS = 50
DECAY_FRACTION = 0.3
MUON_LR, ADAM_LR = 0.02, 4e-3
console = Console()


@dataclass(frozen=True)
class Mix:
    """Token streams and the probability of drawing a training window from each."""

    streams: list[np.ndarray]
    probabilities: np.ndarray

    @classmethod
    def of(cls, streams: list[np.ndarray], weights: list[float]) -> Mix:
        mass = np.array([len(s) * w for s, w in zip(streams, weights, strict=True)], float)
        return cls(streams, mass / mass.sum())

    def plus(self, stream: np.ndarray, share: float) -> Mix:
        return Mix([*self.streams, stream], np.append(self.probabilities * (1 - share), share))

    def windows(self, rng: np.random.Generator, rows: int, length: int) -> Tensor:
        """Random windows `[rows, length]`."""
        picked = rng.choice(len(self.streams), rows, p=self.probabilities)
        starts = [rng.integers(len(self.streams[i]) - length) for i in picked]
        rows_ = [self.streams[i][s : s + length] for i, s in zip(picked, starts, strict=True)]
        return torch.from_numpy(np.stack(rows_).astype(np.int64))

    def digest(self) -> int:
        """A number that another text, or another order of texts, would not have."""
        found = zlib.crc32(self.probabilities.tobytes())
        for stream in self.streams:
            found = zlib.crc32(np.ascontiguousarray(stream), found)
        return found


@dataclass(frozen=True)
class Budget:
    """How many tokens a model learns from, and in which portions.

    `batch_tokens` is what an optimizer step takes, a multiple of the sequences' `length`; the
    budget is rounded up to whole steps.
    """

    tokens: int
    batch_tokens: int
    length: int
    seed: int

    def __post_init__(self) -> None:
        if self.batch_tokens % self.length:
            raise SystemExit(
                f"{self.batch_tokens} tokens per step are not whole sequences of {self.length}; "
                "give --batch-tokens a multiple of it."
            )

    @property
    def steps(self) -> int:
        return -(-self.tokens // self.batch_tokens)

    def batch(self, name: str, mix: Mix, step: int) -> Tensor:
        """The windows of a step of model `name`, int64 `[rows, length + 1]`."""
        rng = np.random.default_rng([self.seed, *name.encode(), step])
        return mix.windows(rng, self.batch_tokens // self.length, self.length + 1)

    def began_with(self, mix: Mix) -> dict[str, Any]:
        return {**asdict(self), "text": mix.digest()}


def learning_rate_scale(step: int, steps: int) -> float:
    """Warmup, stable, then linear decay."""
    decay = (steps - step) / max(1.0, steps * DECAY_FRACTION)
    return min(1.0, (step + 1) / WARMUP_STEPS, decay)


def optimizers_for(model: nn.Module, hidden: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of a part of the model, AdamW for all else that learns."""
    matrices = [p for p in hidden.parameters() if p.ndim == 2 and p.requires_grad]
    learning = [p for p in model.parameters() if p.requires_grad]
    others = [p for p in learning if not any(p is h for h in matrices)]
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.05),
        torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def key_of(*values: object) -> str:
    """Letters for the name of a file that belongs to these values."""
    return f"{zlib.crc32(repr(values).encode()):08x}"


def written(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make a file, which appears under `path` whole or not at all."""
    unfinished = path.with_name(f".partial-{path.name}")
    write(unfinished)
    unfinished.replace(path)


def require_same(path: Path, state: Mapping[str, Any], began_with: Mapping[str, Any]) -> None:
    """End the program if a checkpoint was begun with anything else."""
    before = state.get("began_with", {})
    differing = [key for key, value in began_with.items() if before.get(key) != value]
    if differing:
        raise SystemExit(
            f"{path} was begun with other {', '.join(differing)}; "
            "give what it was begun with, or another folder for checkpoints."
        )


def train(
    name: str,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    steps: int,
    folder: Path,
    loss_of: Callable[[int], Tensor],
    *,
    began_with: Mapping[str, Any],
    checkpoint_every: int,
    log_every: int,
    on_checkpoint: Callable[[int], None] = lambda step: None,
) -> None:
    """Train for so many steps, from the checkpoint of `name` in `folder` on if there is one.

    `loss_of(step)` is the loss of a step, a function of its number alone. A checkpoint that
    `began_with` anything else ends the program. `on_checkpoint` is called with the steps made when
    one is written, and again if that was the last.
    """
    path = folder / f"{name}.pt"
    base_lrs = [group["lr"] for opt in optimizers for group in opt.param_groups]
    device = next(model.parameters()).device
    first = 0
    if path.exists():
        state = torch.load(path, map_location=device)
        require_same(path, state, began_with)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first = state["step"]
        console.print(f"{name} continues at step {first} of {steps}")
    groups = [group for opt in optimizers for group in opt.param_groups]
    if first == steps:
        model.eval()
        on_checkpoint(steps)
    model.train()
    recent: list[float] = []
    clock = time.monotonic()
    for step in track(range(first, steps), name, console=console):
        scale = learning_rate_scale(step, steps)
        for group, lr in zip(groups, base_lrs, strict=True):
            group["lr"] = lr * scale
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        recent.append(loss.item())
        if (step + 1) % log_every == 0:
            now = time.monotonic()
            console.print(
                f"{name} step {step + 1}/{steps} loss {np.mean(recent):.4f} lr x{scale:.2f} "
                f"{(now - clock) / len(recent):.2f} s a step"
            )
            recent.clear()
            clock = now
        if (step + 1) % checkpoint_every == 0 or step + 1 == steps:
            state = {
                "began_with": began_with,
                "model": model.state_dict(),
                "optimizers": [opt.state_dict() for opt in optimizers],
                "step": step + 1,
            }
            written(path, partial(torch.save, state))
            model.eval()
            on_checkpoint(step + 1)
            model.train()
