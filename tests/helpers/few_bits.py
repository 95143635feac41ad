"""Checkpoints of few bits, by the names of their forms: kinds of packed integers, FP8 and FP4, and
types of GGUF files."""

from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Type

from tests.helpers import fp4_files, fp8_files
from tests.helpers.models import build
from tools.rig import gguf_files, packing

FP8S, FP4S = tuple(fp8_files.KINDS), tuple(fp4_files.FORMS)
FORMS = (*packing.KINDS, *FP8S, *FP4S)


def make(folder: Path, form: str, model_type: str, skip: str = "\0", **sizes: Any) -> Path:
    """A model of random weights in this form; `folder / "plain"` is what it is in plain weights.
    Matrices whose name holds `skip` are left as they are."""
    source = build(model_type, folder / "source", **sizes)
    path, plain = folder / "packed", folder / "plain"
    if form in FP8S:
        fp8_files.write(source, path, plain, fp8_files.KINDS[form], skip=skip)
    elif form in FP4S:
        fp4_files.pack(source, path, plain, form)
    elif form in packing.KINDS:
        packing.pack(source, path, plain, packing.KINDS[form], skip=skip)
    else:
        type_of = lambda name: Type.F16 if "embed" in name else Type[form]  # noqa: E731
        return gguf_files.write(source, folder / "it.gguf", model_type, type_of)
    return path
