"""Inspects a checkpoint by its config and the headers of its files.

No weight is loaded, so that a checkpoint that cannot be used is refused before any rank starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from pipespec.engine.checkpoint.checkpoint import open_files
from pipespec.engine.checkpoint.model_path import resolve
from pipespec.engine.formats.draft_heads import DraftHead
from pipespec.engine.formats.draft_kind import parallel_draft, refuse_eagle_head
from pipespec.engine.formats.packing import PACKED_INT8
from pipespec.engine.formats.quantization import (
    GGML_FORMATS,
    PACKED_METHODS,
    QUANTIZATIONS,
    require_package,
)
from pipespec.engine.formats.safetensors_folder import FOREIGN
from pipespec.engine.formats.safetensors_headers import Tensor
from pipespec.engine.formats.slice_tensors import EMBEDDING_NAME, LAYER
from pipespec.engine.formats.stored import DTYPES, Storage
from pipespec.engine.inspection.header_checks import (
    check_config,
    check_count,
    check_eos,
    check_floats,
    require_fit,
)
from pipespec.engine.inspection.model_config import ModelFacts, read_config
from pipespec.engine.precision import ITEM_BYTES, KV_PLAIN, KV_SCALE_BYTES, automatic
from pipespec.engine.tensor_parallel.tp_cuts import require_tp_divisible
from pipespec.engine.tensor_parallel.tp_shares import tp_shares
from pipespec.errors import ModelError
from pipespec.system.validation import shown

# The type in which weights of few bits are computed, unless another is asked for.
KEPT_DTYPE = "bfloat16"
# Bytes of an activation where ggml computes with the matrices of the file.
MAPPED_BYTES = ITEM_BYTES["float32"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of weights: of each layer, of the input embedding, and of final norm and output
    head."""

    layers: tuple[int, ...]
    embedding: int
    head: int

    @property
    def total(self) -> int:
        return sum(self.layers) + self.embedding + self.head


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices of the layers.

    Attributes:
        num_bytes: in each layer.
        height, width: the largest numbers that divide the rows and columns of every matrix
            `[out, in]`.
        experts: some layers are mixtures of experts.
    """

    num_bytes: tuple[int, ...]
    height: int
    width: int
    experts: bool


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo(ModelFacts):
    """The properties of a checkpoint that are needed before it is loaded, beside the facts of its
    config.

    Attributes:
        path: the local folder, or GGUF file.
        vocab_size: rows of the embedding, which may be padded beyond the tokenizer's tokens.
        eos: token ids that end a text.
        stored: sizes in the files; if `storage.dequantized_from` is set, sizes as plain weights.
        storage: in how many bits the files hold the weights.
        dtype: the type in which a model of quantised weights computes; None: plain weights.
        mask_token: the token that a parallel draft (PARD) has at future positions.
        parallel_tokens: tokens that a parallel draft proposes per pass.
        head: what a draft head is (`inspection/draft_heads.py`); None: it is a model.
    """

    path: Path
    model_type: str
    vocab_size: int
    eos: tuple[int, ...]
    stored: Sizes
    matrices: Matrices
    storage: Storage
    dtype: str | None
    mask_token: int | None
    parallel_tokens: int
    head: DraftHead | None = None

    @property
    def kind(self) -> str:
        """Architecture, size and type in words; they must be equal on all hosts."""
        weights = self.storage.dequantized_from or "plain"
        if self.storage.quantization is not None:
            weights = f"{self.storage.quantization} in {self.dtype}"
        return f"{self.model_type}, {self.num_layers} layers of {self.hidden_size}, {weights}"

    @property
    def few_bits(self) -> bool:
        """Whether the files hold weights of a format of fewer bits that pipespec reads itself."""
        some = any(each.weights or each.expanded for each in self.storage.kept_layers)
        return self.storage.dequantized_from in PACKED_METHODS or some

    def chosen_dtype(self, setting: str, devices: Iterable[str]) -> str:
        """The type in which it computes with this value of `model.dtype`, given the devices of the
        stages: weights of few bits are computed in bfloat16 unless another type is asked for, but
        for those that ggml multiplies on CPUs, in float32."""
        if setting == "auto":
            default = automatic(devices := tuple(devices))
            by_ggml = self.storage.kept_format in GGML_FORMATS and self.can_keep
            on_cpus = by_ggml and not any("cuda" in each for each in devices)
            setting = KEPT_DTYPE if self.few_bits and not on_cpus else default
        return self.compute_dtype(setting)

    def compute_dtype(self, dtype: str) -> str:
        """The type of hidden states and KV, if plain weights are loaded as `dtype`."""
        return self.dtype or dtype

    def loaded(self, dtype: str, quantization: str | None) -> Sizes:
        """The sizes in memory of weights of this type and quantization."""
        stored, item = self.stored, ITEM_BYTES[self.compute_dtype(dtype)]
        # All weights that are not quantised are stored in the type of the embedding.
        one = stored.embedding / (self.vocab_size * self.hidden_size)
        layers, growth = stored.layers, item / one
        if quantization is not None and quantization == self.storage.kept_format:
            layers = tuple(
                int((size - kept.weights * one) * growth) + kept.num_bytes
                for size, kept in zip(layers, self.storage.kept_layers, strict=True)
            )
        elif self.storage.quantization is None:
            shrink = 1.0 if quantization is None else QUANTIZATIONS[quantization].bits / 8 / item
            layers = tuple(
                int((size - matrices + matrices * shrink) * growth)
                for size, matrices in zip(layers, self.matrices.num_bytes, strict=True)
            )
        embedding, head = int(stored.embedding * growth), int(stored.head * growth)
        ends = self.storage.ends
        if quantization == self.storage.kept_format and ends is not None and item == MAPPED_BYTES:
            own_head = 0 if self.tied else embedding
            embedding, head = ends[0], head - own_head + ends[1]
        return Sizes(layers, embedding, head)

    def loaded_part(self, sizes: Sizes, members: int, dtype: str) -> Sizes:
        """The sizes in memory of the part of the first of `members` tensor-parallel devices, which
        has most, given the `sizes` of the whole: matrices, embedding and head are divided, norms
        are not. Raises ModelError if parts would not be equal."""
        if members == 1:
            return sizes
        shares, item = tp_shares(self.path, members), ITEM_BYTES[self.compute_dtype(dtype)]
        layers = tuple(
            common * item + int((size - common * item) * part / (divided or 1))
            for size, common, divided, part in zip(
                sizes.layers, shares.common, shares.divided, shares.part, strict=True
            )
        )
        # The head's norm is whole.
        norm = self.hidden_size * item if sizes.head else 0
        embedding, head = (
            whole * shares.vocabulary // self.vocab_size
            for whole in (sizes.embedding, sizes.head - norm)
        )
        return Sizes(layers, embedding, head + norm)

    def kv_bytes(self, dtype: str, kv_dtype: str, members: int = 1) -> int:
        """Bytes of K and V of a token in one layer, on each of `members` devices at most; `dtype`
        is that of the activations, `kv_dtype` one of KV_DTYPES."""
        numbers, heads = self.kv_size, self.kv_heads
        if members > 1 and self.tp_plan_splits_kv:
            heads = tp_shares(self.path, members).kv_heads
            numbers = self.kv_size // self.kv_heads * heads
        if kv_dtype == KV_PLAIN:
            return numbers * ITEM_BYTES[dtype]
        return numbers + 2 * heads * KV_SCALE_BYTES

    def kv_layers(self, layers: range) -> int:
        return sum(self.has_kv[layers.start : layers.stop]) if self.has_kv else len(layers)

    def recurrent_bytes(self, layers: range, dtype: str, sequences: int, nodes: int) -> int:
        """Bytes that these layers keep for the running states of so many sequences and tree
        nodes."""
        if self.recurrent is None:
            return 0
        item = ITEM_BYTES[dtype]
        of_layer = sequences * self.recurrent.state_bytes(item)
        of_layer += nodes * self.recurrent.node_bytes(item)
        return sum(self.has_state[layers.start : layers.stop]) * of_layer

    def check_tensor_parallel(self, members: int, quantization: str | None) -> None:
        requantized = self.storage.quantization is not None or quantization is not None
        require_tp_divisible(
            self.path, self.model_type, self.has_tp_plan, members, requantized=requantized
        )
        tp_shares(self.path, members)  # which raises ModelError unless their parts are equal

    def weight_format(self, quantization: str | None, keep: str, dtype: str) -> str | None:
        """The format of the weights in memory: one of QUANTIZATIONS or KEPT_FORMATS, or None (as
        stored).

        `quantization` is the value of that setting, `keep` that of `model.keep_quantized`. Integers
        of 8 bits stay where ggml multiplies them, on CPUs in float32.
        """
        kept = self.storage.kept_format
        on_a_gpu = kept == PACKED_INT8 and dtype != "float32"
        return kept if keep != "no" and self.can_keep and not on_a_gpu else quantization

    @property
    def can_keep(self) -> bool:
        return any(each.weights for each in self.storage.kept_layers)

    def check_quantization(self, name: str, quantization: str | None) -> None:
        """Raise ModelError if the checkpoint cannot be quantised so; `name` is that of the
        setting."""
        if quantization is None:
            return
        already = self.storage.quantization or self.storage.dequantized_from
        if already is not None:
            raise ModelError(f"{self.path} is quantised already, by {already}; leave {name} out")
        if self.matrices.experts:
            raise ModelError(
                f"the experts of {self.path} cannot be quantised while they load; leave {name} "
                "out, or name a checkpoint that is quantised already"
            )
        how = QUANTIZATIONS[quantization]
        if self.matrices.width % how.block or self.matrices.height % how.pack:
            raise ModelError(
                f"{quantization} needs matrices of multiples of {how.pack} by {how.block}, but "
                f"{self.path} has others; choose another {name}"
            )

    def require_fit(self) -> None:
        """Raise ModelError unless the model's own class accepts the headers of the files."""
        files = open_files(self.path)
        if not files.by_package:
            # Some quantisers store a bias of zeros where a model has none.
            require_fit(files, files.headers(), strict=self.storage.dequantized_from is None)

    def require_quantizer(self, name: str, quantization: str | None) -> None:
        """Raise ModelError unless this machine has the packages that this takes."""
        if self.storage.quantization is not None:
            require_package(self.storage.quantization, f"{self.path} ({self.storage.quantization})")
        elif quantization is not None:
            require_package(QUANTIZATIONS[quantization].package, f"{name}={quantization}")


def inspect(model: str | Path, *, fit: bool = True) -> CheckpointInfo:
    """Read config and headers of a checkpoint: a folder, a GGUF file, or the id of a model on the
    Hugging Face Hub, which is downloaded into the hub's cache unless it is there.

    Raises ModelError, in one sentence, for anything that would prevent loading; without `fit`, all
    but what `CheckpointInfo.require_fit` finds, which imports torch.
    """
    files = open_files(path := resolve(model))
    raw, tensors = files.raw, files.headers()
    plain = not files.by_package
    check_config(path, raw)
    refuse_eagle_head(path, tensors)
    if plain:
        check_floats(path, tensors)
    try:
        config = read_config(files, files.raw)
    except RecursionError as error:
        raise ModelError(f"{path / 'config.json'} is nested too deeply; {FOREIGN}") from error
    check_count(path, raw, tensors, config.num_layers)
    storage = files.storage(config.num_layers)
    embedding, stored, matrices = _measure(path, tensors, config.num_layers)
    if embedding.shape[1] != config.hidden_size:
        raise ModelError(
            f"the embedding of {path} has {embedding.shape[1]} columns, but hidden_size in "
            f"config.json is {shown(config.hidden_size)}; fetch the checkpoint again"
        )
    vocab_size, eos = embedding.shape[0], files.eos(config.eos)
    check_eos(path, eos, config.usual_eos, vocab_size)
    mask_token, parallel_tokens = parallel_draft(path, raw)
    info = CheckpointInfo(
        **{each.name: getattr(config, each.name) for each in fields(ModelFacts)},
        path=path,
        model_type=str(raw.get("model_type")),
        vocab_size=vocab_size,
        eos=tuple(token for token in eos if token < vocab_size),
        stored=stored,
        matrices=matrices,
        storage=storage,
        dtype=None if plain else DTYPES.get(embedding.dtype),
        mask_token=mask_token,
        parallel_tokens=parallel_tokens,
    )
    if fit:
        info.require_fit()
    return info


def _measure(
    path: Path, tensors: Mapping[str, Tensor], num_layers: int
) -> tuple[Tensor, Sizes, Matrices]:
    """The embedding, the sizes of all parts, and the matrices. Raises ModelError."""
    layers, matrices = [0] * num_layers, [0] * num_layers
    height = width = head = 0
    embedding, experts = None, False
    for name, tensor in tensors.items():
        layer = LAYER.search(name)
        if layer is not None and int(layer[1]) < num_layers:
            layers[int(layer[1])] += tensor.num_bytes
            if len(tensor.shape) > 1:
                matrices[int(layer[1])] += tensor.num_bytes
                height = math.gcd(height, tensor.shape[-2])
                width = math.gcd(width, tensor.shape[-1])
                # Granite's mixtures stack their experts in one tensor.
                experts = experts or len(tensor.shape) > 2 or ".experts." in name
        elif EMBEDDING_NAME.search(name):
            embedding = tensor
        else:
            head += tensor.num_bytes
    if not all(layers):
        raise ModelError(
            f"{path} holds no tensor of layer {layers.index(0)}, though config.json counts "
            f"{num_layers} layers; fetch the checkpoint again"
        )
    sizes = () if embedding is None else (*embedding.shape, embedding.num_bytes)
    if embedding is None or len(embedding.shape) != 2 or 0 in sizes:
        raise ModelError(
            f"{path} holds no token embedding, or a quantised one; take another checkpoint"
        )
    stored = Sizes(tuple(layers), embedding.num_bytes, head)
    return embedding, stored, Matrices(tuple(matrices), height, width, experts)
