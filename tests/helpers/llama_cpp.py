"""llama.cpp's tokenizer, of the library in the package xllamacpp, by its C functions."""

import ctypes
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf

# Of `llama_model_params`: where the flag `vocab_only` is, and more bytes than all of it. A library
# in which it is elsewhere refuses these files, which have no tensors.
VOCAB_ONLY, MOST_BYTES = 72, 512


class _Parameters(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * MOST_BYTES)]


_Log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_silent = _Log(lambda *_: None)


@cache
def _library() -> Any:
    found = importlib.util.find_spec("xllamacpp")
    assert found is not None and found.origin is not None
    library = ctypes.CDLL(next(map(str, Path(found.origin).parent.glob("xllamacpp*.so"))))
    library.llama_model_default_params.restype = _Parameters
    library.llama_model_load_from_file.argtypes = ctypes.c_char_p, _Parameters
    for name in ("llama_model_load_from_file", "llama_model_get_vocab"):
        getattr(library, name).restype = ctypes.c_void_p
    library.llama_vocab_is_eog.restype = ctypes.c_bool
    library.llama_log_set(_silent, None)
    library.llama_backend_init()
    return library


class Vocabulary:
    """The vocabulary in a GGUF file that has nothing else."""

    def __init__(self, path: Path):
        self.library = _library()
        parameters = self.library.llama_model_default_params()
        parameters.bytes[VOCAB_ONLY] = 1
        self._model = self.library.llama_model_load_from_file(str(path).encode(), parameters)
        assert self._model, f"llama.cpp does not read {path}"
        vocab = self.library.llama_model_get_vocab(ctypes.c_void_p(self._model))
        self._vocab = ctypes.c_void_p(vocab)

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt; the text of a special token becomes that token."""
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        arguments = self._vocab, data, len(data), ids, len(ids), True, True
        count = self.library.llama_tokenize(*arguments)
        assert count >= 0
        return ids[:count]

    @property
    def ends(self) -> list[int]:
        """The tokens that end a text."""
        count = self.library.llama_vocab_n_tokens(self._vocab)
        return [n for n in range(count) if self.library.llama_vocab_is_eog(self._vocab, n)]

    def close(self) -> None:
        self.library.llama_model_free(ctypes.c_void_p(self._model))


def write(path: Path, fields: Mapping[str, Any]) -> Path:
    """A GGUF file of a vocabulary, given its metadata but for their prefix."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in fields.items():
        key = name if "." in name else f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
