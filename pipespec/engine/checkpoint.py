"""What a checkpoint is, read from its config and the headers of its safetensors files.

No weight is loaded here, so that a folder that cannot work is refused before any rank starts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipespec.engine.architectures import require_supported
from pipespec.engine.folder import resolve
from pipespec.engine.headers import Tensor, read_json, read_tensors
from pipespec.engine.heads import parallel, require_model, require_own_embedding
from pipespec.engine.model_config import FOREIGN, check_sizes, read_config, read_eos
from pipespec.engine.precision import ITEM_BYTES
from pipespec.engine.quantization import (
    COMPRESSED_PACKAGE,
    KEPT,
    MXFP4,
    PACKED_METHODS,
    QUANTIZATIONS,
    dequantised,
    require_package,
    stored_method,
    stored_packing,
)
from pipespec.engine.shares import own_heads, require_shareable
from pipespec.engine.stored import folder, gguf
from pipespec.engine.stored.folder import LAYER, KeptLayer
from pipespec.engine.stored.lazy import DTYPES
from pipespec.errors import ModelError
from pipespec.system.reading import shown

# In what the products of four bits compute.
KEPT_DTYPE = "bfloat16"
_EMBEDDING = re.compile(r"\.(embed_tokens|embed_in)\.weight$")


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What the rest of pipespec needs to know of a checkpoint before it is loaded.

    `path` is the local folder, or GGUF file. `vocab_size` counts the rows of the embedding, which
    may be padded beyond the tokenizer's tokens. `context` is the longest sequence in tokens. `eos`
    are the token ids that end a text. `stored` are the sizes in the files. `tied`: the embedding is
    the output head too. `kv_size`: how many numbers K and V of one token in one layer are.
    `matrix_bytes`: what of each layer's bytes are matrices. `quantization`: by what
    method the files are quantised already, and `dtype` the type that such a model computes in;
    both None for plain weights. `experts`: some layers are mixtures. `height` and `width`: the
    largest numbers that divide both sides of every matrix `[out, in]` of the layers. `unpacked`:
    the method of quantised files whose weights become plain ones while they load; `stored` is then
    what they would take as plain ones, and `kept` what of each layer can stay in four bits.
    `package`: what reads such files, if not pipespec itself. `mask_token`: of a parallel
    draft (PARD), what stands for tokens to come, of which it guesses `parallel_tokens` per pass.
    `heads` attend, to `kv_heads`. `shareable`: Transformers has a tensor-parallel plan for it, and
    `cuts_kv` says whether that divides KV.
    """

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
    unpacked: str | None = None
    kept: tuple[KeptLayer, ...] = ()
    package: str | None = None
    mask_token: int | None = None
    parallel_tokens: int = 1
    heads: int = 1
    kv_heads: int = 1
    shareable: bool = False
    cuts_kv: bool = False

    @property
    def kind(self) -> str:
        """What all hosts must have in common, in words."""
        weights = self.unpacked or "plain"
        if self.quantization is not None:
            weights = f"{self.quantization} in {self.dtype}"
        return f"{self.model_type}, {self.num_layers} layers of {self.hidden_size}, {weights}"

    def computes_in(self, dtype: str) -> str:
        """The type of hidden states and KV, where a plain checkpoint would have `dtype`."""
        return self.dtype or dtype

    def loaded(self, dtype: str, quantization: str | None) -> Sizes:
        """The sizes in memory of weights of that type, quantised so."""
        stored, item = self.stored, ITEM_BYTES[self.computes_in(dtype)]
        # Numbers of the embedding are stored in as many bytes as all that is not quantised.
        growth = item / (stored.embedding / (self.vocab_size * self.hidden_size))
        layers = stored.layers
        if quantization == KEPT:
            one = stored.embedding / (self.vocab_size * self.hidden_size)
            layers = tuple(
                int((size - kept.weights * one) * growth) + kept.num_bytes
                for size, kept in zip(layers, self.kept, strict=True)
            )
        elif self.quantization is None:
            shrink = 1.0 if quantization is None else QUANTIZATIONS[quantization].bits / 8 / item
            layers = tuple(
                int((size - matrices + matrices * shrink) * growth)
                for size, matrices in zip(layers, self.matrix_bytes, strict=True)
            )
        return Sizes(layers, int(stored.embedding * growth), int(stored.head * growth))

    def layer_bytes(self, sizes: Sizes, members: int) -> tuple[int, ...]:
        """What each layer takes at least on each of so many devices that share it, where the whole
        takes `sizes`: matrices are divided, norms are not."""
        parts = zip(sizes.layers, self.stored.layers, self.matrix_bytes, strict=True)
        return tuple(
            int(size * (1 - matrices / stored * (1 - 1 / members)))
            for size, stored, matrices in parts
        )

    def kv_of(self, members: int) -> int:
        """How many numbers K and V of a token in a layer are on each of so many devices that share
        it, at most."""
        if not self.cuts_kv:
            return self.kv_size
        one = self.kv_size // self.kv_heads
        return one * max(
            len(own_heads(self.heads, self.kv_heads, member, members)) for member in range(members)
        )

    def check_shared(self, members: int, quantization: str | None) -> None:
        """Raise ModelError unless so many devices can share its layers."""
        quantized = bool(self.quantization or self.unpacked or quantization)
        require_shareable(
            self.path, self.model_type, self.shareable, self.heads, members, quantized=quantized
        )

    def held(self, quantization: str | None, keep: str, dtype: str) -> str | None:
        """How its weights are held in memory: one of QUANTIZATIONS, or KEPT, or None, as they are.

        `quantization` is the setting, `keep` that of `model.keep_quantized`.
        """
        if keep != "no" and dtype == KEPT_DTYPE and any(each.weights for each in self.kept):
            return KEPT
        return quantization

    def check_quantization(self, name: str, quantization: str | None) -> None:
        """Raise ModelError unless it can be loaded so; `name` is that of the setting."""
        already = self.quantization or self.unpacked
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
        """Raise ModelError unless this machine has the package that loads it so."""
        if self.package is not None:
            require_package(self.package, f"{self.path} ({self.unpacked})")
        elif self.quantization is not None:
            require_package(self.quantization, f"{self.path} ({self.quantization})")
        elif quantization is not None:
            require_package(QUANTIZATIONS[quantization].package, f"{name}={quantization}")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of weights: of each layer, of the input embedding, of final norm and output head."""

    layers: tuple[int, ...]
    embedding: int
    head: int

    @property
    def total(self) -> int:
        return sum(self.layers) + self.embedding + self.head


def inspect(model: str | Path) -> CheckpointInfo:
    """Read a checkpoint's config and headers: of a folder, a GGUF file, or the id of a Hugging Face
    Hub model.

    A hub model is downloaded into the hub's own cache unless it is there. Raises `ModelError`,
    in one sentence, for whatever would keep the checkpoint from being loaded.
    """
    path = resolve(model)
    files = _of_file(path) if gguf.is_gguf(path) else _of_folder(path)
    raw, tensors = files.config, files.tensors
    model_type = str(raw.get("model_type"))
    require_supported(model_type, path)
    check_sizes(path, raw)
    try:
        config = read_config(path, raw)
    except RecursionError as error:
        raise ModelError(f"{path / 'config.json'} is nested too deeply; {FOREIGN}") from error
    require_own_embedding(path, tensors)
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
                # Granite's mixtures stack theirs in one tensor.
                experts = experts or len(tensor.shape) > 2 or ".experts." in name
        elif _EMBEDDING.search(name):
            embedding = tensor
        else:
            head += tensor.num_bytes
    if not all(layers):
        raise ModelError(
            f"{path} holds no tensor of layer {layers.index(0)}, though config.json counts "
            f"{len(layers)} layers; fetch the checkpoint again"
        )
    mask_token, parallel_tokens = parallel(path, raw)
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
    return CheckpointInfo(
        path=path,
        model_type=model_type,
        num_layers=len(layers),
        hidden_size=config.hidden_size,
        vocab_size=embedding.shape[0],
        context=config.context,
        eos=read_eos(path, config),
        stored=Sizes(tuple(layers), embedding.num_bytes, head),
        tied=config.tied,
        kv_size=config.kv_size,
        matrix_bytes=tuple(matrices),
        quantization=files.quantization,
        dtype=None if files.quantization is None else DTYPES.get(embedding.dtype),
        experts=experts,
        height=height,
        width=width,
        unpacked=files.unpacked,
        kept=(*files.kept, *[KeptLayer()] * len(layers))[: len(layers)] if files.kept else (),
        package=files.package,
        mask_token=mask_token,
        parallel_tokens=parallel_tokens,
        heads=config.heads,
        kv_heads=config.kv_heads,
        shareable=config.shareable,
        cuts_kv=config.cuts_kv,
    )


@dataclass(frozen=True, slots=True)
class _Files:
    """What the files of a checkpoint say; see `CheckpointInfo`. `tensors` are those of plain
    weights, unless `quantization` says otherwise."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    quantization: str | None = None
    unpacked: str | None = None
    kept: tuple[KeptLayer, ...] = ()
    package: str | None = None


def _of_file(path: Path) -> _Files:
    header = gguf.header(path)
    return _Files(header.settings, header.plain, unpacked=gguf.GGUF, package=gguf.PACKAGE)


def _of_folder(path: Path) -> _Files:
    raw = read_json(path / "config.json", "a model folder holds config.json and safetensors files")
    require_model(path, raw)
    stored = raw.get("quantization_config")
    # An architecture that is not supported is a better answer than how it is quantised.
    require_supported(str(raw.get("model_type")), path)
    try:
        method = stored_method(path, stored)
    except RecursionError as error:
        raise ModelError(f"{path / 'config.json'} is nested too deeply; {FOREIGN}") from error
    tensors = read_tensors(path)
    if method == MXFP4:
        return _Files(raw, dequantised(tensors))
    if method not in PACKED_METHODS:
        return _Files(raw, tensors, quantization=method)
    packing = stored_packing(path, stored)
    plain = folder.as_plain(path, tensors, packing)
    if packing is None:
        return _Files(raw, plain, unpacked=method, package=COMPRESSED_PACKAGE)
    return _Files(raw, plain, unpacked=method, kept=folder.kept_layers(tensors, packing))
