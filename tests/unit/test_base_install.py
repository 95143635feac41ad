"""What `pip install .` brings: no CUDA package of its own, and little beside torch."""

import tomllib
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE = tuple(PROJECT["dependencies"])
MB = 10**6
MOST_MB = 1500  # of an environment without a GPU, pip and Python's own files not counted
FOR_GPUS = ("cuda", "nvidia", "triton", "flashinfer", "bitsandbytes")


def closure(required: tuple[str, ...], without: frozenset[str] = frozenset()) -> set[str]:
    """The distributions that these requirements bring, as they are installed here."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in required]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found | without:
            continue
        found.add(name)
        extras = requirement.extras or {""}
        waiting += [
            each
            for each in map(Requirement, distribution(name).requires or ())
            if each.marker is None
            or any(each.marker.evaluate({"extra": extra}) for extra in extras)
        ]
    return found


@cache
def megabytes(name: str) -> float:
    files = {Path(str(file.locate())) for file in distribution(name).files or ()}
    return sum(path.stat().st_size for path in files if path.is_file()) / MB


def test_base_install_requires_no_package_for_gpus_beside_torchs_own() -> None:
    names = closure(BASE, without=frozenset({"torch"}))
    assert {"transformers", "hydra-core", "redis", "gguf"} <= names
    assert [name for name in sorted(names) if name.startswith(FOR_GPUS)] == []


def test_base_install_is_small_beside_torch() -> None:
    names = closure(BASE, without=frozenset({"torch"}))
    sizes = {name: round(megabytes(name)) for name in names}
    assert sum(sizes.values()) < 450, sorted(sizes.items(), key=lambda item: -item[1])


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch was built for CUDA")
def test_install_without_a_gpu_stays_below_its_limit() -> None:
    server = tuple(PROJECT["optional-dependencies"]["serve"])
    assert sum(map(megabytes, closure(BASE + server))) < MOST_MB


def test_addresses_of_the_project_exist() -> None:
    """They are places in the source tree until the project has a public address."""
    assert all((ROOT / place).exists() for place in PROJECT["urls"].values())
