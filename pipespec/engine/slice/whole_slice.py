"""What a slice asks of the devices that compute it: one object, from its loading on."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipespec.engine.attention.attention_plan import AttentionPlan
from pipespec.engine.formats.stored import Units

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WholeSlice:
    """Of a slice that one device computes: every call does what it would without the object.

    Attributes:
        size: devices that compute the slice.
        no_compiler: why the slice cannot be compiled, as a clause.
    """

    size = 1
    no_compiler = ""

    def no_graphs(self) -> str:
        """Why the slice cannot be captured now, as a clause."""
        return ""

    def require_divisible(self, path: Path, config: Any, *, requantized: bool) -> None:
        """Raise ModelError if the devices cannot divide a model; `requantized`: its weights are
        quantised while they load, or by a package that reads matrices as a whole."""

    def prepare(
        self,
        units: Units,
        state: MutableMapping[str, Any] | None,
        keep: Callable[..., None],
        model: PreTrainedModel,
    ) -> None:
        """Before the weights of a model load, from this state dict; its stored matrices have these
        `units`. `keep` replaces layers, given of which parameters the model has what part."""
        keep(model, {})

    def batch(self, inputs: Tensor, plan: AttentionPlan) -> None:
        """Before a batch is computed."""

    def logits(self, hidden: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """The logits of hidden states, where `compute` returns those of this device."""
        return compute(hidden)

    def best_tokens(
        self, hidden: Tensor, compute: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The largest of the logits of each row, and its token, `[k]` each."""
        logits = compute(hidden)
        if logits.device.type == "cpu" and logits.dtype == torch.float32:
            # NumPy finds the largest of 150,000 in a tenth of PyTorch's time.
            tokens = torch.from_numpy(logits.numpy().argmax(-1))
            return logits.gather(-1, tokens[:, None]).squeeze(-1), tokens
        best = logits.max(-1)
        return best.values, best.indices

    def least(self, mine: int) -> int:
        """The least of what the devices that compute the slice say. Raises RankFailed."""
        return mine
