"""What a draft learns from: the target's distribution, on text that the target writes too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from transformers import PreTrainedModel

from tools.training import Mix, progress_steps, written


def distillation_loss(
    draft: PreTrainedModel, ids: Tensor, target_logits: Tensor, top1_weight: Tensor
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


def to_learn_from(
    target: PreTrainedModel, student: PreTrainedModel, *, compiled: bool
) -> Callable[[Tensor, float], Tensor]:
    """The loss of a student on windows `[rows, length]`, for `tools.training.train`."""
    logits_of = torch.compile(
        lambda ids: target(input_ids=ids, use_cache=False).logits,
        dynamic=False,
        disable=not compiled,
    )
    loss = torch.compile(distillation_loss, dynamic=False, disable=not compiled)

    def loss_of(ids: Tensor, progress: float) -> Tensor:
        with torch.no_grad():
            wanted = logits_of(ids)
        late = max(0.0, (progress - 0.5) / 0.5)
        return loss(student, ids, wanted, torch.tensor(late, device=ids.device))

    return loss_of


@torch.inference_mode()
def continue_greedily(model: PreTrainedModel, ids: Tensor, num_new: int) -> Tensor:
    """Greedy continuation that runs through end tokens: `[rows, n]` -> `[rows, n + num_new]`."""
    out = model(input_ids=ids, use_cache=True)
    tokens = [ids, out.logits[:, -1:].argmax(-1)]
    while len(tokens) <= num_new:
        out = model(input_ids=tokens[-1], past_key_values=out.past_key_values, use_cache=True)
        tokens.append(out.logits[:, -1:].argmax(-1))
    return torch.cat(tokens, 1)


@dataclass(frozen=True)
class OwnText:
    """What a target says behind beginnings of a corpus: `rows` times `beginning` tokens of it and
    a greedy continuation of `continuation`, so many rows at once."""

    rows: int
    beginning: int
    continuation: int
    at_once: int
    seed: int

    def pieces(self, target: PreTrainedModel, mix: Mix, folder: Path) -> list[np.ndarray]:
        """Arrays int32 `[rows, beginning + continuation]`, which are kept in `folder`."""
        found = []
        for piece in progress_steps("target text", 0, -(-self.rows // self.at_once)):
            path = folder / f"target_text_{piece}.npy"
            if not path.exists():
                rng = np.random.default_rng([self.seed, 0, piece])
                rows = min(self.at_once, self.rows - self.at_once * piece)
                heads = mix.windows(rng, rows, self.beginning).to(target.device)
                with torch.autocast(target.device.type, torch.bfloat16):
                    text = continue_greedily(target, heads, self.continuation).cpu().numpy()
                written(path, lambda partial, text=text: save_array(partial, text))
            found.append(np.load(path))
        return found


def save_array(path: Path, array: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, array.astype(np.int32))
