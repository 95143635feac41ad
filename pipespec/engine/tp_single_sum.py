"""One sum per layer instead of two, in layers whose attention and MLP both read the layer's input.

What attention adds to the residual stream is not needed before the MLP's part is: a member adds its
parts of both, and the members sum them once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

ALWAYS = ("cohere", "cohere2", "phi")
# Where the config says so.
BY_CONFIG = ("gpt_neox",)


def has_parallel_blocks(config: Any) -> bool:
    """Whether attention and MLP of every layer read the layer's input, by the model's config."""
    chosen = config.model_type in BY_CONFIG and config.use_parallel_residual
    return config.model_type in ALWAYS or bool(chosen)


class SingleSum:
    """The sum of one layer: attention computes before the MLP.

    Args:
        total: the sum over all members of this member's part.
    """

    def __init__(self, total: Callable[[Tensor], Tensor]):
        self._total = total
        self._of_attention: Tensor | None = None

    def hold(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        """A forward hook of attention's last matrix, which adds nothing to the stream."""
        self._of_attention = output
        return output.new_zeros(1).expand_as(output)

    def add(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        """A forward hook of the MLP's last matrix, which adds what both have computed."""
        held, self._of_attention = self._of_attention, None
        assert held is not None, "attention computes first"
        return self._total(held + output)
