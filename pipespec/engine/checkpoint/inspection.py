"""Inspects a checkpoint by its config and the headers of its files.

No weight is loaded, so that a checkpoint that cannot be used is refused before any rank starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipespec.engine.architectures import require_supported
from pipespec.engine.checkpoint.checkpoint_files import read_files
from pipespec.engine.checkpoint.formats.lazy import DTYPES
from pipespec.engine.checkpoint.formats.packed_checkpoint import KeptLayer
from pipespec.engine.checkpoint.header_checks import check_count, check_eos, require_consistent
from pipespec.engine.checkpoint.model_config import (
    FOREIGN,
    check_numbers,
    check_sizes,
    read_config,
    read_eos,
    require_fit,
)
from pipespec.engine.checkpoint.model_path import resolve
from pipespec.engine.checkpoint.quantization import (
    COMPRESSED_PACKAGE,
    GGML_FORMATS,
    PACKED_METHODS,
    QUANTIZATIONS,
    require_package,
)
from pipespec.engine.checkpoint.slice_tensors import EMBEDDING_NAME, LAYER
from pipespec.engine.draft_kind import parallel_draft, refuse_eagle_head
from pipespec.engine.precision import ITEM_BYTES, KV_PLAIN, KV_SCALE_BYTES, automatic
from pipespec.engine.recurrence.state_sizes import RecurrentSizes
from pipespec.engine.tp_divisibility import require_tp_divisible
from pipespec.engine.tp_shares import tp_shares
from pipespec.errors import ModelError
from pipespec.system.validation import shown

# The type in which weights of few bits are computed, unless another is asked for.
KEPT_DTYPE = "bfloat16"
# Bytes of an activation where ggml computes with the matrices of the file.
MAPPED_BYTES = ITEM_BYTES["float32"]


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The properties of a checkpoint that are needed before it is loaded.

    Attributes:
        path: the local folder, or GGUF file.
        vocab_size: rows of the embedding, which may be padded beyond the tokenizer's tokens.
        context: tokens of the longest sequence.
        eos: token ids that end a text.
        stored: sizes in the files; if `dequantized_from` is set, sizes as plain weights.
        tied: the embedding is the output head too.
        kv_size: numbers that K and V of one token have in one layer.
        has_kv, has_state: which layers hold K and V, and which keep a running state; empty: all
            hold K and V, none keeps a state.
        recurrent: what a layer with a running state keeps; None: there is none.
        matrix_bytes: bytes of matrices in each layer.
        quantization: the method by which the loaded weights are quantised; None: plain weights.
        dtype: the type in which such a model computes; None: plain weights.
        experts: some layers are mixtures of experts.
        height, width: the largest numbers that divide the rows and columns of every matrix
            `[out, in]` of the layers.
        dequantized_from: the method of quantised files whose weights are dequantised while they
            load; None: the files are not dequantised.
        kept_layers: what can stay in the few bits of the files, for each layer.
        kept_format: one of KEPT_FORMATS, in which it then is in memory.
        package: the package that reads such files, if pipespec does not.
        ends: bytes of the embedding and of an output head of its own that a CPU computes with as
            they are in the file; None: it does not.
        mask_token: the token that a parallel draft (PARD) has at future positions.
        parallel_tokens: tokens that a parallel draft proposes per pass.
        heads, kv_heads: query heads and KV heads of a layer.
        has_tp_plan: Transformers has a tensor-parallel plan for the architecture.
        tp_plan_splits_kv: that plan divides the KV heads."""

    path: Path
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    context: int
    eos: tuple[int, ...]
    stored: Sizes
    tied: bool
    kv_size: int
    matrix_bytes: tuple[int, ...]
    quantization: str | None = None
    dtype: str | None = None
    experts: bool = False
    height: int = 1
    width: int = 1
    dequantized_from: str | None = None
    kept_layers: tuple[KeptLayer, ...] = ()
    kept_format: str | None = None
    package: str | None = None
    ends: tuple[int, int] | None = None
    mask_token: int | None = None
    parallel_tokens: int = 1
    heads: int = 1
    kv_heads: int = 1
    has_tp_plan: bool = False
    tp_plan_splits_kv: bool = False
    has_kv: tuple[bool, ...] = ()
    has_state: tuple[bool, ...] = ()
    recurrent: RecurrentSizes | None = None

    @property
    def kind(self) -> str:
        """Architecture, size and type in words; they must be equal on all hosts."""
        weights = self.dequantized_from or "plain"
        if self.quantization is not None:
            weights = f"{self.quantization} in {self.dtype}"
        return f"{self.model_type}, {self.num_layers} layers of {self.hidden_size}, {weights}"

    @property
    def few_bits(self) -> bool:
        """Whether the files hold weights of a format of fewer bits that pipespec reads itself."""
        some = any(each.weights or each.expanded for each in self.kept_layers)
        return self.dequantized_from in PACKED_METHODS or some

    def chosen_dtype(self, setting: str, devices: Iterable[str]) -> str:
        """The type in which it computes with this value of `model.dtype`, given the devices of the
        stages: weights of few bits are computed in bfloat16 unless another type is asked for, but
        for those that ggml multiplies on CPUs, in float32."""
        if setting == "auto":
            default = automatic(devices := tuple(devices))
            by_ggml = self.kept_format in GGML_FORMATS and self.can_keep
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
        growth = item / (stored.embedding / (self.vocab_size * self.hidden_size))
        layers = stored.layers
        if quantization is not None and quantization == self.kept_format:
            one = stored.embedding / (self.vocab_size * self.hidden_size)
            layers = tuple(
                int((size - kept.weights * one) * growth) + kept.num_bytes
                for size, kept in zip(layers, self.kept_layers, strict=True)
            )
        elif self.quantization is None:
            shrink = 1.0 if quantization is None else QUANTIZATIONS[quantization].bits / 8 / item
            layers = tuple(
                int((size - matrices + matrices * shrink) * growth)
                for size, matrices in zip(layers, self.matrix_bytes, strict=True)
            )
        embedding, head = int(stored.embedding * growth), int(stored.head * growth)
        if quantization == self.kept_format and self.ends is not None and item == MAPPED_BYTES:
            own_head = 0 if self.tied else embedding
            embedding, head = self.ends[0], head - own_head + self.ends[1]
        return Sizes(layers, embedding, head)

    def loaded_part(self, sizes: Sizes, members: int, member: int, dtype: str) -> Sizes:
        """The sizes in memory of the part of one of `members` tensor-parallel devices, given the
        `sizes` of the whole: matrices, embedding and head are divided, norms are not."""
        if members == 1:
            return sizes
        shares, item = tp_shares(self.path, members), ITEM_BYTES[self.compute_dtype(dtype)]
        layers = tuple(
            common * item + int((size - common * item) * parts[member] / (divided or 1))
            for size, common, divided, parts in zip(
                sizes.layers, shares.common, shares.divided, shares.parts, strict=True
            )
        )
        rows = shares.vocabulary[member]
        # The head's norm is whole.
        norm = self.hidden_size * item if sizes.head else 0
        embedding, head = (
            whole * rows // self.vocab_size for whole in (sizes.embedding, sizes.head - norm)
        )
        return Sizes(layers, embedding, head + norm)

    def repeated(self, members: int, layers: range, dtype: str) -> tuple[int, int]:
        """What each of `members` tensor-parallel devices has of these layers though others have it
        too: bytes of weights; and how many KV heads of a layer they keep together beyond those that
        it has."""
        shares, item = tp_shares(self.path, members), ITEM_BYTES[self.compute_dtype(dtype)]
        weights = sum(shares.common[layers.start : layers.stop]) * item
        split = self.tp_plan_splits_kv
        kept = sum(shares.kv_heads) if split else members * self.kv_heads
        return weights, kept - self.kv_heads

    def kv_size_per_member(self, members: int) -> int:
        """`kv_size` on each of `members` tensor-parallel devices, at most."""
        if members == 1 or not self.tp_plan_splits_kv:
            return self.kv_size
        return self.kv_size // self.kv_heads * max(tp_shares(self.path, members).kv_heads)

    def kv_bytes(self, dtype: str, kv_dtype: str, members: int = 1) -> int:
        """Bytes of K and V of a token in one layer, on each of `members` devices at most; `dtype`
        is that of the activations, `kv_dtype` one of KV_DTYPES."""
        numbers = self.kv_size_per_member(members)
        if kv_dtype == KV_PLAIN:
            return numbers * ITEM_BYTES[dtype]
        heads = numbers * self.kv_heads // self.kv_size
        return numbers + 2 * heads * KV_SCALE_BYTES

    def kv_layers(self, layers: range) -> int:
        """How many of these layers hold K and V."""
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
        """Raise ModelError unless the layers can be divided among `members` devices."""
        whole = self.package == COMPRESSED_PACKAGE
        requantized = whole or self.quantization is not None or quantization is not None
        require_tp_divisible(
            self.path, self.model_type, self.has_tp_plan, members, requantized=requantized
        )

    def weight_format(self, quantization: str | None, keep: str, dtype: str) -> str | None:
        """The format of the weights in memory: one of QUANTIZATIONS or KEPT_FORMATS, or None (as
        stored).

        `quantization` is the value of that setting, `keep` that of `model.keep_quantized`.
        """
        return self.kept_format if keep != "no" and self.can_keep else quantization

    @property
    def can_keep(self) -> bool:
        """Whether some of its weights can stay in the few bits of the files."""
        return any(each.weights for each in self.kept_layers)

    def check_quantization(self, name: str, quantization: str | None) -> None:
        """Raise ModelError if the checkpoint cannot be quantised so; `name` is that of the
        setting."""
        already = self.quantization or self.dequantized_from
        if already is not None:
            if quantization is not None:
                raise ModelError(
                    f"{self.path} is quantised already, by {already}; leave {name} out"
                )
        elif quantization is not None:
            if self.experts:
                raise ModelError(
                    f"the experts of {self.path} cannot be quantised while they load; leave "
                    f"{name} out, or name a checkpoint that is quantised already"
                )
            how = QUANTIZATIONS[quantization]
            if self.width % how.block or self.height % how.pack:
                raise ModelError(
                    f"{quantization} needs matrices of multiples of {how.pack} by {how.block}, but "
                    f"{self.path} has others; choose another {name}"
                )

    def require_quantizer(self, name: str, quantization: str | None) -> None:
        """Raise ModelError unless this machine has the packages that this takes."""
        if self.package is not None:
            require_package(self.package, f"{self.path} ({self.dequantized_from})")
        elif self.quantization is not None:
            require_package(self.quantization, f"{self.path} ({self.quantization})")
        elif quantization is not None:
            require_package(QUANTIZATIONS[quantization].package, f"{name}={quantization}")


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


def inspect(model: str | Path) -> CheckpointInfo:
    """Read config and headers of a checkpoint: a folder, a GGUF file, or the id of a model on the
    Hugging Face Hub, which is downloaded into the hub's cache unless it is there.

    Raises ModelError, in one sentence, for anything that would prevent loading.
    """
    path = resolve(model)
    files = read_files(path)
    raw, tensors = files.config, files.tensors
    model_type = str(raw.get("model_type"))
    require_supported(model_type, path)
    check_sizes(path, raw)
    check_numbers(path, raw)
    refuse_eagle_head(path, tensors)
    require_consistent(path, raw, tensors, plain=files.plain)
    if type(rows := raw.get("vocab_size")) is int:
        check_eos(path, model_type, read_eos(path, raw.get("eos_token_id")), rows)
    try:
        config = read_config(path, raw)
    except RecursionError as error:
        raise ModelError(f"{path / 'config.json'} is nested too deeply; {FOREIGN}") from error
    if config.num_layers > len(tensors):
        raise ModelError(
            f"{path} holds {len(tensors)} tensors, but config.json counts "
            f"{shown(config.num_layers)} layers; fetch the checkpoint again"
        )
    layers = [0] * config.num_layers
    matrices = [0] * len(layers)
    height = width = 0
    embedding, head, experts = None, 0, False
    for name, tensor in tensors.items():
        layer = LAYER.search(name)
        if layer is not None and int(layer[1]) < len(layers):
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
            f"{len(layers)} layers; fetch the checkpoint again"
        )
    check_count(path, raw, tensors, len(layers))
    mask_token, parallel_tokens = parallel_draft(path, raw)
    sizes = () if embedding is None else (*embedding.shape, embedding.num_bytes)
    if embedding is None or len(embedding.shape) != 2 or 0 in sizes:
        raise ModelError(
            f"{path} holds no token embedding, or a quantised one; take another checkpoint"
        )
    if embedding.shape[1] != config.hidden_size:
        raise ModelError(
            f"the embedding of {path} has {embedding.shape[1]} columns, but hidden_size in "
            f"config.json is {shown(config.hidden_size)}; fetch the checkpoint again"
        )
    eos = read_eos(path, config.eos)
    check_eos(path, model_type, eos, embedding.shape[0])
    if files.plain:
        # Some quantisers store a bias of zeros where a model has none.
        require_fit(path, raw, tensors, strict=files.dequantized_from is None)
    return CheckpointInfo(
        path=path,
        model_type=model_type,
        num_layers=len(layers),
        hidden_size=config.hidden_size,
        vocab_size=embedding.shape[0],
        context=config.context,
        eos=tuple(token for token in eos if token < embedding.shape[0]),
        stored=Sizes(tuple(layers), embedding.num_bytes, head),
        tied=config.tied,
        kv_size=config.kv_size,
        matrix_bytes=tuple(matrices),
        quantization=files.quantization,
        dtype=None if files.quantization is None else DTYPES.get(embedding.dtype),
        experts=experts,
        height=height,
        width=width,
        dequantized_from=files.dequantized_from,
        kept_layers=_of_each(files.kept_layers, len(layers)),
        kept_format=files.kept_format,
        package=files.package,
        ends=files.ends,
        mask_token=mask_token,
        parallel_tokens=parallel_tokens,
        heads=config.heads,
        kv_heads=config.kv_heads,
        has_tp_plan=config.has_tp_plan,
        tp_plan_splits_kv=config.tp_plan_splits_kv,
        has_kv=config.has_kv,
        has_state=config.has_state,
        recurrent=config.recurrent,
    )


def _of_each(kept: tuple[KeptLayer, ...], count: int) -> tuple[KeptLayer, ...]:
    """The same for so many layers, as the files may have more or fewer; nothing for nothing."""
    return (*kept, *[KeptLayer()] * count)[:count] if kept else ()
