"""A toy model whose layer keeps a running state, checked row by row against its own path."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from pipespec.engine.attention.attention_plan import AttentionPlan
from pipespec.engine.recurrence.recurrent_layers import RecurrentLayers
from tests.helpers.models import CONFIGS
from tests.helpers.toy_pipeline import ToyModel

MODULES: dict[str, Callable[[Any, int], nn.Module]] = {
    "qwen3_next": Qwen3NextGatedDeltaNet,
    "kimi_linear": KimiLinearDeltaAttention,
    "bamba": BambaMixer,
    "lfm2": Lfm2ShortConv,
}
WIDTH = 12
NUM_INPUTS = 97
# Batches of one sequence and no more rows use a plan of fixed size.
FIXED_ROWS = 12
# Of the largest value of a row.
TOLERANCE = 1e-5


@cache
def module(model_type: str) -> nn.Module:
    """A layer's module of this architecture, with random weights, as Transformers computes it."""
    config = AutoConfig.for_model(
        model_type, hidden_size=WIDTH, num_hidden_layers=4, **{**CONFIGS[model_type], **_SMALL}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = MODULES[model_type](config, 0)
        for parameter in made.parameters():
            noise = torch.randn_like(parameter)
            with torch.no_grad():
                parameter.copy_(
                    noise * (0.5 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5)
                )
    return made.eval()


_SMALL: dict[str, Any] = {"mamba_d_head": 6, "num_attention_heads": 4}


@cache
def inputs() -> Tensor:
    return torch.randn(NUM_INPUTS, WIDTH, generator=torch.Generator().manual_seed(1))


@cache
def expected(model_type: str, path: tuple[int, ...]) -> Tensor:
    """What leaves the last row of a text, computed alone, `[WIDTH]`."""
    with torch.inference_mode():
        found: Tensor = module(model_type)(inputs()[list(path)][None])[0, -1]
    return found


def recurrent_toy(model_type: str) -> Callable[[int], ToyModel]:
    """A factory of such models, of so many slots."""

    class RecurrentToy(ToyModel):
        reads_in_place = False

        def __init__(self, num_slots: int):
            super().__init__(num_slots)
            self.layer = deepcopy(module(model_type))
            self.recurrent = RecurrentLayers([self.layer], num_slots)
            self._device = torch.device("cpu")
            self._fixed = self.recurrent.reserve(FIXED_ROWS, self._device)

        def forward(self, inputs_: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
            found = super().forward(inputs_, positions, plan)
            own = torch.from_numpy(self.stored[plan.write] % NUM_INPUTS)
            self._use(plan)
            if self._used_fixed:  # as CUDA graphs do, which compute rows of padding too
                own = torch.cat((own, own.new_full((FIXED_ROWS - len(own),), 3)))
            with torch.inference_mode():
                out = self.layer(inputs()[own][None])[0]
            for row, slots in self.paths(plan):
                right = expected(model_type, tuple((self.stored[slots] % NUM_INPUTS).tolist()))
                error = (out[row] - right).abs().max()
                assert error <= TOLERANCE * right.abs().max().clamp(min=1), "a row is wrong"
            return found

        def _use(self, plan: AttentionPlan) -> None:
            states = self.recurrent.plan(plan)
            assert states is not None and self._fixed is not None
            self._used_fixed = self._fixed.holds(states) and self.recurrent.fits(states)
            if self._used_fixed:
                self._fixed.fill(states)
                self.recurrent.use_fixed(self._fixed)
            else:
                self.recurrent.use(states, self._device)

    return RecurrentToy
