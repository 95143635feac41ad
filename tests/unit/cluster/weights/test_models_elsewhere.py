"""Checkpoints as another host describes them."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pipespec.cluster.weights.distribution import described
from pipespec.cluster.weights.server import WeightServer, tls_context, url_of
from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint.partial_checkpoint import open_repository, repository_of
from pipespec.engine.checkpoint.parts.folder import entries
from pipespec.engine.checkpoint.parts.parts_file import PartsFile
from pipespec.engine.checkpoint.parts.sources import RangeSource
from pipespec.errors import ModelError
from pipespec.system.folders import resource_dir

TARGET = resource_dir("demo") / "target"


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return asdict(repository_of(TARGET, as_folder=True))


def test_a_described_checkpoint_is_opened_in_the_parts_cache(told, tmp_path):
    repository = described(told, "beta")
    made = Certificate.make()
    server = WeightServer("127.0.0.1", made, lambda file: PartsFile(TARGET / file))
    urls = {file: url_of(server.url, file) for file in repository.files}
    context = tls_context(made, server=False)
    path = open_repository(RangeSource("beta", urls, context), repository)
    assert path == repository.folder
    assert path.is_relative_to(tmp_path / "pipespec" / "weights" / "folders--target")
    assert (path / "config.json").read_bytes() == (TARGET / "config.json").read_bytes()
    assert repository.path == str(TARGET.absolute())
    (entry,) = entries()
    assert (entry.folder, entry.model, entry.current) == (path, "target", True)


@pytest.mark.parametrize(
    "change",
    [
        {"commit": "../" * 13 + "x"},
        {"repo": "org/target"},
        {"repo": "../../elsewhere"},
        {"path": None},  # a commit of the hub
        *({"files": {name: {"size": 1}}} for name in ("../../x/m.gguf", "/tmp/m", "..", ".parts")),
        {"files": {"m.safetensors": {"size": -1}}},
    ],
    ids=str,
)
def test_a_description_that_leads_out_of_its_folder_is_refused(change, told):
    with pytest.raises(ModelError, match="what it says about its checkpoint is of no use"):
        described(told | change, "beta")


@pytest.mark.parametrize("told", [None, [], {}, {"files": 3}])
def test_what_is_no_description_is_one_sentence(told):
    with pytest.raises(ModelError, match="what it says about its checkpoint is of no use"):
        described(told, "beta")
