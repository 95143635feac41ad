"""What is refused before any rank starts, for what the models and the machine are."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pipespec.cluster import deployment
from pipespec.config.compose import compose
from pipespec.errors import ConfigError, ModelError
from pipespec.system.resources import resource_dir

DEMO = resource_dir("demo")


def planned(*settings: str) -> deployment.Plan:
    return deployment.plan(compose(["cluster.stages=2", "cluster.devices=[cpu]", *settings]))


# --- NCCL -------------------------------------------------------------------------------------


def on(*devices: str, backend: str = "nccl") -> deployment.Plan:
    return replace(planned(f"transport.backend={backend}"), devices=devices)


@pytest.mark.parametrize("stages", [("cpu", "cpu"), ("cuda:0", "cpu"), ("cuda:0", "cuda:0")])
def test_nccl_without_a_device_for_every_stage_is_refused(stages: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"are on {', '.join(stages)}; use auto or gloo"):
        deployment.require_backend(on("cpu", *stages))
    deployment.require_backend(on("cpu", *stages, backend="gloo"))
    deployment.require_backend(on("cpu", *stages, backend="auto"))


def test_nccl_with_a_device_for_every_stage_is_not() -> None:
    deployment.require_backend(on("cpu", "cuda:0", "cuda:1"))
    deployment.require_backend(on("cuda:0", "cuda:0", "cuda:1"))


def test_the_same_index_on_two_boxes_is_two_devices() -> None:
    plan = on("cpu", "cuda", "cuda")
    members = ("a/0", "a/1", "b/0")
    apart = replace(plan, placement=replace(plan.placement, members_by_rank=members))
    deployment.require_backend(apart)
    with pytest.raises(ConfigError, match="use auto or gloo"):
        deployment.require_backend(plan)


def test_a_box_without_devices_is_told_to_name_them(tmp_path: Path) -> None:
    file = tmp_path / "hosts.yaml"
    file.write_text("hosts: [{name: a, address: 10.0.0.1}, {name: b, address: 10.0.0.2}]\n")
    with pytest.raises(ConfigError, match="Box a has the device auto; name its devices"):
        deployment.plan(compose([f"cluster={file}"]))


# --- feed -------------------------------------------------------------------------------------


def test_more_children_than_tokens_are_refused() -> None:
    tokens = planned().target.vocab_size
    assert planned(f"feed.children={tokens}").config.feed.children == tokens
    with pytest.raises(ConfigError, match=rf"feed\.children is {tokens + 1}, .*{tokens} tokens"):
        planned(f"feed.children={tokens + 1}")


# --- tokenizers -------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO / "target", tmp_path / "model"))


def refusal(model: Path) -> str:
    plan = planned(f"model.target={model}", "source=ngram")
    with pytest.raises(ModelError) as caught:
        deployment.load_tokenizers(plan)
    message = str(caught.value)
    assert str(model) in message and "\n" not in message
    return message


@pytest.mark.parametrize("keep", [(), ("tokenizer_config.json",)])
def test_a_folder_without_tokenizer_names_what_is_missing(
    model: Path, keep: tuple[str, ...]
) -> None:
    for name in {"tokenizer.json", "tokenizer_config.json"} - set(keep):
        (model / name).unlink()
    assert "holds no tokenizer: tokenizer.json, or" in refusal(model)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\x00", b"{}", b"[]", b"null", b'{"added_tokens": []}', b'{"version": "9.9"}'],
)
def test_a_tokenizer_that_is_none(model: Path, content: bytes) -> None:
    (model / "tokenizer.json").write_bytes(content)
    assert "cannot be used" in refusal(model)


def test_a_tokenizer_cut_short(model: Path) -> None:
    text = (model / "tokenizer.json").read_bytes()
    (model / "tokenizer.json").write_bytes(text[: len(text) // 2])
    assert "cannot be used" in refusal(model)


def test_a_tokenizer_without_tokens(model: Path) -> None:
    content = json.loads((model / "tokenizer.json").read_text())
    content["model"] |= {"vocab": {}, "merges": []}
    content["added_tokens"] = []
    (model / "tokenizer.json").write_text(json.dumps(content))
    assert "it has no tokens" in refusal(model)
