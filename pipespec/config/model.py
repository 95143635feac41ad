"""Which models a run decodes with, and how they are held in memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pipespec.engine.attention.choose import ATTENTIONS, AUTO
from pipespec.engine.precision import ITEM_BYTES
from pipespec.engine.quantization import QUANTIZATIONS
from pipespec.errors import ConfigError
from pipespec.limits import MAX_COUNT, MAX_ROWS, check_choice, check_whole

DTYPES = ("auto", *ITEM_BYTES)
KEEP = ("auto", "yes", "no")
# The share of what a device has free that KV may take, by the kind of device: a GPU is there for
# nothing else.
KV_SHARE = {"cpu": 0.5, "cuda": 0.9}
AMOUNT = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT])iB")


def kv_amount(setting: float | str | None) -> tuple[float | None, int | None]:
    """What `model.kv_memory` says: a share, or an amount in bytes; neither. Raises ConfigError."""
    if setting is None:
        return None, None
    if isinstance(setting, str) and (found := AMOUNT.fullmatch(setting)):
        return None, int(float(found[1]) * 1024 ** (1 + "KMGT".index(found[2])))
    if isinstance(setting, float | int) and 0 < setting <= 1:
        return float(setting), None
    raise ConfigError(
        f"model.kv_memory is {setting}, but must be a share of the free memory, above 0 and up to "
        "1, or an amount such as 8GiB."
    )


@dataclass(frozen=True)
class ModelConfig:
    """Folders of the two checkpoints; `context` is the longest sequence in tokens.

    `draft` may be None where the source needs no draft model, `mid` where it is no cascade.
    `quantization` keeps the weights of the target's layers in fewer bits than `dtype`,
    `draft_quantization` and `mid_quantization` those of the others'.
    `keep_quantized`: may weights that are packed in four bits already stay so; auto: where the
    model computes in bfloat16.
    `kv_memory` is what a rank may take for KV: a share of what its device has free, or an amount
    ("8GiB"); None: KV_SHARE of it. `attention` is the backend of every rank's attention. On a GPU
    batches of up to so many rows as `graph_rows` names are computed by replaying a graph. `compile`
    has torch.compile fuse what lies between the products.
    """

    target: str
    draft: str | None = None
    mid: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    draft_quantization: str | None = None
    mid_quantization: str | None = None
    keep_quantized: str = "auto"
    context: int | None = None
    kv_memory: float | str | None = None
    attention: str = AUTO
    graph_rows: list[int] = field(default_factory=lambda: [64])
    compile: bool = False

    def __post_init__(self) -> None:
        kv_amount(self.kv_memory)
        for name in ("target", "draft", "mid"):
            if getattr(self, name) == "":
                raise ConfigError(f"model.{name} is empty, but must name a model folder.")
        check_choice("model.dtype", self.dtype, DTYPES)
        check_choice("model.attention", self.attention, ATTENTIONS)
        for rows in self.graph_rows:
            check_whole("model.graph_rows", rows, 1, MAX_ROWS, hint=", or nothing: []")
        for name in ("quantization", "draft_quantization", "mid_quantization"):
            if getattr(self, name) is not None:
                check_choice(f"model.{name}", getattr(self, name), QUANTIZATIONS)
        check_choice("model.keep_quantized", self.keep_quantized, KEEP)
        if self.context is not None:
            check_whole("model.context", self.context, 2, MAX_COUNT)
