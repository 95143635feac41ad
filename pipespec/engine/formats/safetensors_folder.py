"""Folders of config.json and safetensors files, whose matrices may be packed. Above 350 lines, as a
format has one implementation of the protocol of stored files."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.engine.formats import sentencepiece_file
from pipespec.engine.formats.architectures import (
    WRAPPERS,
    require_supported,
    text_config,
    text_names,
    text_type,
)
from pipespec.engine.formats.draft_kind import refuse_draft_head
from pipespec.engine.formats.matrix_packing import MatrixPacking, usual_dtype
from pipespec.engine.formats.quantization import (
    PACKED_METHODS,
    stored_method,
    stored_packing,
)
from pipespec.engine.formats.safetensors_headers import (
    CONFIG,
    WEIGHTS,
    Tensor,
    read_json,
    read_tensors,
    stored_index,
    tensor_ranges,
)
from pipespec.engine.formats.slice_tensors import LAYER, UNUSED, needed, part_of
from pipespec.engine.formats.stored import (
    KeptLayer,
    KeptMatrix,
    LazyTensor,
    Storage,
    Units,
)
from pipespec.errors import ModelError
from pipespec.system.result_cache import digest
from pipespec.system.validation import Unreadable, parse_json, read_text, reason, shown, typed

if TYPE_CHECKING:  # headers are read without it
    import torch

# Files with a tokenizer: the first one, or one of the others.
TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "tekken.json", "*.tiktoken")
# Those that need no other. Transformers takes them before a SentencePiece model.
MADE_FILES = ("tokenizer.json", "tekken.json")
# Other files that the resulting tokenizer depends on.
SETTINGS_FILES = (
    CONFIG,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template*.j*",
    "additional_chat_templates/*.jinja",
)
# The models of the package `tokenizers`, which guesses where a file names none.
TOKENIZER_KINDS = ("BPE", "Unigram", "WordLevel", "WordPiece")
FOREIGN = "correct it, or fetch the checkpoint again"


class SafetensorsFolder:
    """A folder. Nothing is read before it is asked for, and each method raises ModelError.

    Attributes:
        whole: config.json.
        raw: that of the text part.
        method: by which the files are quantised; None: they are not.
        packing: how pipespec reads their matrices; None: they are plain, or a package reads them.
        present: the headers of all tensors.
    """

    def __init__(self, path: Path):
        self.path = path
        self._opened: dict[Path | None, Any] = {}

    # --- headers ------------------------------------------------------------------------------

    @cached_property
    def whole(self) -> dict[str, Any]:
        whole = read_json(
            self.path / CONFIG, "a model folder holds config.json and safetensors files"
        )
        refuse_draft_head(self.path, whole)
        return whole

    @cached_property
    def raw(self) -> Mapping[str, Any]:
        raw = text_config(self.whole)
        # First, as an unsupported architecture is the more useful error message.
        require_supported(str(raw.get("model_type")), self.path, text_type(self.whole))
        return raw

    @cached_property
    def method(self) -> str | None:
        try:
            return stored_method(self.path, self.raw.get("quantization_config"))
        except RecursionError as error:
            raise ModelError(f"{self.path / CONFIG} is nested too deeply; {FOREIGN}") from error

    @cached_property
    def packing(self) -> MatrixPacking | None:
        if self.method not in PACKED_METHODS:
            return None
        return stored_packing(self.path, self.raw["quantization_config"])

    @property
    def kept_format(self) -> str | None:
        return None if self.packing is None else self.packing.format

    @property
    def by_package(self) -> bool:
        """Whether matrices are read by a package of Transformers, as a whole."""
        return self.method is not None and self.packing is None

    @property
    def dtype(self) -> str:
        """The type of the plain numbers, as safetensors names it."""
        return usual_dtype(self.present.values()) or "F16"

    @cached_property
    def present(self) -> dict[str, Tensor]:
        found = read_tensors(self.path)
        return {name: each for name, each in found.items() if part_of(name) != UNUSED}

    def headers(self, parts: Collection[str] | None = None) -> dict[str, Tensor]:
        """The tensors by name, as those of plain weights where these can be made: of these parts
        (`slice_tensors`), or of all."""
        tensors = self.present
        if parts is not None:
            tensors = {name: tensors[name] for name in needed(tensors, parts)}
        if self.raw is not self.whole and self.by_package:
            raise ModelError(
                f"{self.path} is multimodal and quantised by {self.method}, which is read of "
                "models of text alone; take plain weights, AWQ, GPTQ, or compressed-tensors"
            )
        return tensors if self.packing is None else self.packing.as_plain(tensors)

    def storage(self, num_layers: int) -> Storage:
        if self.packing is None:
            return Storage(quantization=self.method)
        found = [KeptLayer()] * num_layers
        for name in self.packing.matrices(self.present):
            layer = LAYER.search(name)
            if layer is not None and int(layer[1]) < num_layers:
                found[int(layer[1])] += self.packing.kept_layer(name, self.present)
        return Storage(
            dequantized_from=self.method,
            kept_layers=tuple(found),
            kept_format=self.packing.format,
        )

    def units(self) -> Units:
        return Units() if self.packing is None else self.packing.units

    def weight_files(self) -> tuple[Path, ...]:
        """All that hold tensors, whether they are here or not."""
        shard_of, names = stored_index(self.path), {WEIGHTS}
        if shard_of is not None:
            names = {shard_of[in_file] for in_file in text_names(shard_of)}
        return tuple(self.path / name for name in sorted(names))

    def names_by_file(self, parts: Collection[str]) -> dict[Path, dict[str, str]]:
        """The tensors of these parts in each file: the names in the file by those that Transformers
        has."""
        file_of = stored_index(self.path)
        if file_of is None:
            file_of = dict.fromkeys(tensor_ranges(self.path / WEIGHTS), WEIGHTS)
        stored_as = {name: in_file for in_file, name in text_names(file_of).items()}
        found: dict[Path, dict[str, str]] = {}
        for name in needed(stored_as, parts):
            of_file = found.setdefault(self.path / file_of[stored_as[name]], {})
            of_file[name] = stored_as[name]
        return found

    # --- config and tokenizer -----------------------------------------------------------------

    def config(self) -> Any:
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(self.path, local_files_only=True)
        except Exception as error:  # model code may raise anything for invalid values
            why = f"{self.path / CONFIG} is not valid: {reason(error)}"
            raise ModelError(f"{why}; {FOREIGN}") from error
        config = _text_config(config)
        _require_layers(self.path, config)
        return config

    def eos(self, default: Any) -> tuple[int, ...]:
        """The token ids that end a text, given the `eos_token_id` of the config."""
        generation = self.path / "generation_config.json"
        eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
        eos = default if eos is None else eos
        if eos is None:
            return ()
        try:
            return typed("eos_token_id", eos if isinstance(eos, list) else [eos], tuple[int, ...])
        except Unreadable as error:
            raise ModelError(f"{self.path}: {error}; {FOREIGN}") from error

    def tokenizer_state(self) -> Any:
        """What the tokenizer depends on, for `cached_call`. Raises Unreadable."""
        names = (*TOKENIZER_FILES, *SETTINGS_FILES)
        return digest({each for name in names for each in self.path.glob(name) if each.is_file()})

    def tokenizer(self) -> Any:
        """The tokenizer, with `backend_tokenizer`, `chat_template`, `special_tokens_map`. Raises
        anything."""
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(
            self.path, local_files_only=True, mistral_format=False
        )
        template = self.path / "chat_template.json"  # that of a multimodal model's processor
        if found.chat_template is None and template.is_file():
            found.chat_template = read_json(template).get("chat_template")
        # By its usual name if there are several.
        files = sorted(self.path.glob("*.model"), key=lambda file: file.name != "tokenizer.model")
        made = any((self.path / name).is_file() for name in MADE_FILES)
        model = sentencepiece_file.read(files[0]) if files and not made else None
        if model is None:
            return found
        return sentencepiece_file.with_settings(model, found, self.path)

    @property
    def has_tokenizer(self) -> bool:
        """Whether some file may hold one."""
        return any(any(self.path.glob(pattern)) for pattern in TOKENIZER_FILES)

    def require_tokenizer(self) -> None:
        """Raise ModelError if no file may hold a tokenizer, or tokenizer.json holds none."""
        if not self.has_tokenizer:
            raise self.tokenizer_refused("")
        made = self.path / TOKENIZER_FILES[0]
        if made.is_file():
            try:
                found = parse_json(read_text(made))
            except Unreadable as error:
                raise self.tokenizer_refused(str(error)) from None
            if not isinstance(found, dict) or not isinstance(found.get("model"), dict):
                raise self.tokenizer_refused("it states no model")
            if (kind := found["model"].get("type")) not in (None, *TOKENIZER_KINDS):
                raise self.tokenizer_refused(f"its type {shown(kind)} is not known")

    def least_bytes(self) -> int:
        """As of `GgufFiles`; plain weights may be mapped."""
        _ = self.raw  # which refuses an architecture that is not supported
        self.require_tokenizer()
        return 0

    def tokenizer_refused(self, reason: str) -> ModelError:
        if not self.has_tokenizer:
            return ModelError(
                f"{self.path} holds no tokenizer: tokenizer.json, or what it is made from "
                f"({', '.join(TOKENIZER_FILES[1:])}), is missing; fetch the checkpoint again"
            )
        return ModelError(f"the tokenizer in {self.path} cannot be used ({reason}); fetch it again")

    # --- tensors ------------------------------------------------------------------------------

    def tensor(self, name: str, dtype: torch.dtype) -> Any:
        """A tensor of plain numbers for a model of this type, like a slice of a safetensors file:
        `[rows, columns]` reads a part of it."""
        if name in self.present and name not in self._packed:
            return self._slice(name)
        assert self.packing is not None, "the headers name it"
        matrix = name.removesuffix(self.packing.dense_suffix)
        label = self.packing.dense_dtype or self.dtype
        shape = self.packing.shape(matrix, self.present)
        return LazyTensor(shape, label, partial(self.packing.dense, matrix, self))

    def kept(
        self, parts: Collection[str], *, with_ggml: bool, divided: bool
    ) -> dict[str, KeptMatrix]:
        """The matrices of these parts that stay in few bits: `with_ggml` all that ggml multiplies,
        unless members divide them."""
        found: dict[str, KeptMatrix] = {}
        if self.packing is not None:
            for name in needed(self._packed.values(), parts):
                readers = self.packing.readers(name, self.packing.shape(name, self.present), self)
                found |= {each: KeptMatrix(self.packing.kind, r) for each, r in readers.items()}
        return found

    def read(self, name: str, *index: slice) -> Any:
        """A tensor as it is stored, or a part of it; None: there is none."""
        if name not in self.present:
            return None
        whole = self._slice(name)
        return whole[index if any(each != slice(None) for each in index) else ...]

    @cached_property
    def _packed(self) -> dict[str, str]:
        """The packed matrices, by the name of each once it is plain."""
        if self.packing is None:
            return {}
        found = self.packing.matrices(self.present)
        return {name + self.packing.dense_suffix: name for name in found}

    def _slice(self, name: str) -> Any:
        """Files stay open for as long as this is referred to: a load that fails leaves threads of
        Transformers that still read."""
        from safetensors import safe_open

        found = self.present[name]
        if found.file not in self._opened:
            self._opened[found.file] = safe_open(found.file, framework="pt")
        return self._opened[found.file].get_slice(found.stored_as)


def is_whole(folder: Path) -> bool:
    """Whether a folder holds all weight files of its checkpoint."""
    try:
        return all(os.path.isfile(file) for file in SafetensorsFolder(folder).weight_files())
    except ModelError:
        return False


# --- the config of Transformers ---------------------------------------------------------------


def _text_config(whole: Any) -> Any:
    """The config of the text part of a multimodal model; that of another model is itself."""
    if whole.model_type not in WRAPPERS:
        return whole
    config = whole.text_config
    config.tie_word_embeddings = whole.tie_word_embeddings
    config.name_or_path = whole.name_or_path
    for name in ("dtype", "eos_token_id", "quantization_config"):
        if getattr(config, name, None) is None and getattr(whole, name, None) is not None:
            setattr(config, name, getattr(whole, name))
    return config


def _require_layers(path: Path, config: Any) -> None:
    """Raise ModelError if layers of a supported architecture are of a kind that is not."""
    wrong = None
    if getattr(config, "hidden_size_per_layer_input", None):
        wrong = "reads embeddings of the tokens in every layer (hidden_size_per_layer_input)"
    elif getattr(config, "num_kv_shared_layers", None):
        wrong = "has layers that attend to K and V of other layers (num_kv_shared_layers)"
    elif getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        wrong = "attends to later tokens (use_bidirectional_attention)"
    if wrong is not None:
        raise ModelError(
            f"{path} {wrong}, which a pipeline of slices cannot compute; take a checkpoint of "
            f"{config.model_type} without it"
        )
