"""Puts changed Triton kernels in the place of ours."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pipespec.engine.attention import kernels, triton_backend
from tools.gpu_code import matrix


def plant(before: str, after: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace this text of the kernels' source, which must be there once. `folder` keeps the
    changed source, which Triton reads."""
    source = Path(kernels.__file__).read_text()
    assert source.count(before) == 1
    path = folder / "planted_kernels.py"
    path.write_text(source.replace(before, after))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    for user in (triton_backend, matrix):
        monkeypatch.setattr(user, "kernels", changed)
