"""Where a model lies, and how a name that leads nowhere is refused."""

from pathlib import Path

import huggingface_hub.constants
import pytest

from pipespec.engine.checkpoint.model_path import resolve, resolve_config
from pipespec.errors import ModelError


def _refusal(model: Path | str) -> str:
    with pytest.raises(ModelError) as caught:
        resolve(model)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_is_itself(tmp_path):
    assert resolve(tmp_path) == resolve(str(tmp_path)) == tmp_path


def test_what_is_no_folder_is_refused(tmp_path):
    (file := tmp_path / "config.json").touch()
    assert "is a file" in _refusal(file)
    for name in (tmp_path / "nowhere.gguf", "/" + "x" * 5000, "~no-such-user-at-all/model/here"):
        message = _refusal(name)
        assert "there is no model " in message and "a GGUF file" in message


def test_a_name_that_no_hub_provides(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    message = _refusal("nobody/no-such-model")
    assert "'nobody/no-such-model'" in message
    assert "hub" in message


def test_a_config_on_a_hub_that_cannot_be_asked_is_refused_after_two_tries(monkeypatch, tmp_path):
    endpoint = "http://127.0.0.1:9"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    refusal = f"the hub could not be asked .*{endpoint} .*, though asked 2 times"
    with pytest.raises(ModelError, match=refusal):
        resolve_config("org/model")
    root, commit = tmp_path / "models--org--model", "0" * 40
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    (config := root / "snapshots" / commit / "config.json").parent.mkdir(parents=True)
    config.touch()
    assert resolve_config("org/model") == config  # the copy is used


@pytest.mark.parametrize("names", [["m.gguf"], [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]])
def test_gguf_files_in_the_cache_of_the_hub_keep_their_names(monkeypatch, tmp_path, names):
    """They are links there, to files that are named by hashes."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    root, commit = tmp_path / "models--org--model", "0" * 40
    for folder in ("blobs", "refs", snapshot := f"snapshots/{commit}"):
        (root / folder).mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    for name in names:
        (root / "blobs" / f"hash of {name}").touch()
        (root / snapshot / name).symlink_to(root / "blobs" / f"hash of {name}")
    for name in names:
        assert resolve(f"org/model/{name}") == root / snapshot / names[0]
    (root / snapshot / names[-1]).unlink()
    assert "the hub could not be asked" in _refusal(f"org/model/{names[0]}")
