"""Which models a run decodes with, and how they are held in memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipespec.engine.attention.select import ATTENTIONS, AUTO, SDPA
from pipespec.engine.formats.quantization import QUANTIZATIONS
from pipespec.engine.precision import ITEM_BYTES, KV_DTYPES, KV_PLAIN
from pipespec.errors import ConfigError
from pipespec.limits import MAX_COUNT, MAX_ROWS
from pipespec.settings import REQUIRED, check_settings, setting

DTYPES = ("auto", *ITEM_BYTES)
KEEP = ("auto", "no")
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
    """Which checkpoints are used, and how they are held in memory."""

    target: str = setting(
        REQUIRED,
        "Folder or hub id of the target model, in Hugging Face format, or a GGUF file: its path "
        "or, on the hub, ORG/NAME/FILE.gguf.",
    )
    draft: str | None = setting(
        None,
        "Draft model, best with the target's vocabulary, or with proposer=head an EAGLE-3 head; "
        "null for proposers that need none, and for MTP layers of the target's checkpoint.",
    )
    dtype: str = setting(
        "auto",
        "Data type of weights and activations; auto is bfloat16 if every stage has a GPU, or the "
        "checkpoint holds weights of few bits (FP8, NVFP4; with a GPU also AWQ, GPTQ, "
        "compressed-tensors and GGUF), else float32.",
        choices=DTYPES,
    )
    quantization: str | None = setting(
        None,
        "int8 or nf4 quantises the weights of the target's layers at loading; null does not.",
        choices=QUANTIZATIONS,
    )
    draft_quantization: str | None = setting(
        None,
        "The same as model.quantization, for the draft model.",
        choices=QUANTIZATIONS,
        experimental=True,
    )
    keep_quantized: str = setting(
        "auto",
        "Whether weights of AWQ, GPTQ, compressed-tensors, FP8, MXFP4 and GGUF checkpoints stay in "
        "their few bits in memory; auto does so, no makes them plain, which takes two to eight "
        "times the memory.",
        choices=KEEP,
        experimental=True,
    )
    context: int | None = setting(
        None,
        "Longest sequence, prompt included; null is the target's own limit.",
        "tokens",
        limits=(2, MAX_COUNT),
    )
    kv_memory: float | str | None = setting(
        None,
        "Memory for the KV cache of each rank: a share of the device's free memory, or an amount "
        "such as 8GiB; null is 0.9 of a GPU's and 0.5 of a CPU's.",
    )
    attention: str = setting(
        AUTO,
        "Attention backend: sdpa is PyTorch's, static is plain torch for reference, triton and "
        "flashinfer are for GPUs; auto is the fastest that passes its self-test on the device.",
        choices=ATTENTIONS,
    )
    kv_dtype: str = setting(
        KV_PLAIN,
        "How K and V are held: auto is the type of the activations; int8 and fp8 take half the "
        "memory of 16 bits, with a scale for each head of a token, and attention=sdpa.",
        choices=KV_DTYPES,
    )
    graph_rows: list[int] = setting(
        [64],
        "Batches of up to so many rows replay a CUDA graph, on GPUs with another attention backend "
        "than sdpa and flashinfer; [] uses no CUDA graphs.",
        "rows",
        limits=(1, MAX_ROWS),
        hint=", or nothing: []",
        experimental=True,
    )
    compile: bool = setting(
        False,
        "Uses torch.compile for what is between the matrix products; the start takes a minute or "
        "more longer.",
        experimental=True,
    )

    def __post_init__(self) -> None:
        check_settings("model", self)
        kv_amount(self.kv_memory)
        if self.kv_dtype != KV_PLAIN and self.attention not in (AUTO, SDPA):
            raise ConfigError(
                f"model.kv_dtype is {self.kv_dtype}, which model.attention={self.attention} does "
                f"not read; set model.attention={SDPA}."
            )
        for name in ("target", "draft"):
            if getattr(self, name) == "":
                raise ConfigError(f"model.{name} is empty, but must name a folder or hub id.")


def model_name(target: str) -> str:
    """The name of a model for users: its folder's, or that on the hub."""
    return target.rstrip("/").rpartition("/")[2] if target.startswith("/") else target
