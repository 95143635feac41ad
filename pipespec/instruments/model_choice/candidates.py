"""Models that a cluster might decode, and the ways in which their weights might be held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import floor, log10

from pipespec.engine.checkpoint import tokenizer
from pipespec.engine.checkpoint.inspection import CheckpointInfo
from pipespec.engine.checkpoint.quantization import QUANTIZATIONS
from pipespec.engine.vocabulary import compare_vocabularies
from pipespec.errors import ModelError

# A draft has at most this share of the target's parameters.
DRAFT_SHARE = 0.5


@dataclass(frozen=True)
class Candidate:
    """A model that can be decoded.

    Attributes:
        name: the value of `model.target` or `model.draft`.
        info: of the checkpoint, as it is on this machine.
    """

    name: str
    info: CheckpointInfo

    @property
    def parameters(self) -> float:
        """How many numbers its weights are, if none is quantised by a package that reads its own
        files; of those, how many the bytes of their files would be."""
        return self.info.loaded("float32", None).total / 4

    @property
    def size(self) -> float:
        """The parameters to two digits: checkpoints of one model in different formats differ a
        little."""
        found = self.parameters
        return round(found, 1 - floor(log10(found)))

    @property
    def quantized(self) -> bool:
        """Whether its files hold few bits."""
        info = self.info
        return info.few_bits or bool(info.storage.quantization or info.storage.dequantized_from)


def formats(model: Candidate, *, on_cpu: bool) -> list[tuple[str, ...]]:
    """The settings with which a target's weights take fewer and fewer bytes, the plain ones first.

    `on_cpu`: some stage is on a CPU, where plain weights are float32 by default.
    """
    found: list[tuple[str, ...]] = [()]
    if model.quantized:
        return found
    if on_cpu:
        found.append(("model.dtype=bfloat16",))
    for name, method in QUANTIZATIONS.items():
        try:
            model.info.check_quantization("model.quantization", name)
        except ModelError:
            continue
        if find_spec(method.package) is not None:
            found.append((f"model.quantization={name}",))
    return found


def kept_bits(model: Candidate, how: tuple[str, ...]) -> float:
    """About how many bits a weight has with these settings, one of `formats`."""
    if how == ("model.dtype=bfloat16",):
        return 16.0
    if how:
        return QUANTIZATIONS[how[0].partition("=")[2]].bits
    if not model.quantized:
        return 32.0
    info = model.info
    held = info.weight_format(None, "auto", "bfloat16")
    return 8 * info.loaded("bfloat16", held).total / model.parameters


def drafts(target: Candidate, models: Sequence[Candidate]) -> list[Candidate]:
    """The models with a target's vocabulary that are small enough to be its draft: those of its
    architecture first, then those that propose a token at a time, then the largest."""
    small = [each for each in models if each.parameters <= DRAFT_SHARE * target.parameters]
    return sorted(
        (each for each in small if same_vocabulary(target, each)),
        key=lambda each: (
            each.info.model_type != target.info.model_type,
            each.info.mask_token is not None,
            -each.parameters,
        ),
    )


def same_vocabulary(target: Candidate, draft: Candidate) -> bool:
    """Whether both tokenizers give every token the same id."""
    try:
        compare_vocabularies(tokenizer.load(target.info.path), tokenizer.load(draft.info.path))
    except ModelError:
        return False
    return True
