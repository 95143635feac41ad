"""A policy that somebody adds is found by the commands and by what enumerates policies."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pipespec
import pipespec.config.compose as composing
from pipespec.config import choices
from pipespec.config.choices import Choice
from pipespec.config.compose import (
    compose,
    default_policy,
    policies_to_compare,
    policy_class,
    sized_policy,
)
from pipespec.errors import ConfigError
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.level import Level
from pipespec.head.policies.root import Root
from pipespec.head.policies.static_tree import StaticTree
from pipespec.system.folders import resource_dir

PACKAGE = Path(pipespec.__file__).parent
MODULE = '''
from dataclasses import dataclass

from pipespec.head.policies.best_first import BestFirst
from pipespec.settings import setting


@dataclass(frozen=True)
class Narrow(BestFirst):
    """At most two rows, whatever the width."""

    most: int = setting(2, "Most rows of a step.", "rows", limits=(1, 2))

    @property
    def max_rows(self) -> int:
        return min(self.most, super().max_rows)
'''


@pytest.fixture
def own_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `conf/` that commands read, with files of one's own."""
    shutil.copytree(resource_dir("conf"), tmp_path / "conf")
    for module in (choices, composing):
        monkeypatch.setattr(
            module,
            "resource_dir",
            lambda name: tmp_path / name if name == "conf" else resource_dir(name),
        )
    return tmp_path / "conf"


def test_a_name_without_a_file_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="The policy 'nothing' is not known; choose from"):
        policy_class("nothing")


@pytest.mark.parametrize(
    ("group", "base", "said"),
    [
        ("policy", "pipespec.head.policies.beam.Beam", "cannot be imported (No module named"),
        ("policy", "pipespec.head.policies.level.Beam", "cannot be imported (module 'pipespec."),
        ("policy", "pipespec.head.policies.level.AFTER", "is no dataclass; correct"),
        ("policy", "pipespec.config.schema.ClusterConfig", "is no SpeculationPolicy; correct"),
        ("proposer", "pipespec.head.proposer.ProposerConfig", "does not define"),
        ("proposer", "pipespec.head.policies.level.Level", "is no ProposerConfig; correct"),
    ],
)
def test_a_file_that_names_a_wrong_class_is_refused(group: str, base: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _ = Choice(group, "mine", base, {}).cls
    assert str(refused.value).startswith(f"conf/{group}/mine.yaml names the class {base}, which")
    assert said in str(refused.value)


def test_sizes_are_taken_by_the_policies_that_have_them() -> None:
    assert sized_policy(Level(9, 9), 4, 2) == Level(4, 2)
    assert sized_policy(BestFirst(), 4, 2) == BestFirst(4, 2)
    assert sized_policy(BestFirst(), 4, 2).max_nodes < BestFirst().max_nodes
    assert sized_policy(Root(), 4, 2).max_rows == 1
    assert sized_policy(StaticTree(), 4, 2) == StaticTree(), "its shape is its size"
    assert default_policy("static_tree") == StaticTree()


def test_policies_of_fixed_size_are_compared_first() -> None:
    assert policies_to_compare() == ["root", "static_tree", "best_first", "level"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "conf/policy/mine.yaml holds no settings; start with `defaults: [CLASS]`."),
        ("defaults: []", "conf/policy/mine.yaml has the defaults []"),
        ("defaults: [a", "conf/policy/mine.yaml cannot be read: while parsing a flow sequence"),
        (
            "defaults: [pipespec.head.policies.level.Level]\nwidht: 3\n",
            "conf/policy/mine.yaml sets 'widht', which pipespec.head.policies.level.Level has not;",
        ),
    ],
)
def test_a_mistake_in_a_file_of_ones_own_is_named(own_conf: Path, text: str, said: str) -> None:
    (own_conf / "policy" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        default_policy("mine")
    assert str(refused.value).startswith(said)


def test_a_file_may_name_another_setting_as_a_value(own_conf: Path) -> None:
    text = "defaults: [pipespec.head.policies.level.Level]\nwidth: ${scheduler.max_num_seqs}\n"
    (own_conf / "policy" / "mine.yaml").write_text(text)
    assert default_policy("mine") == compose(["policy=mine"]).policy
    assert isinstance(sized_policy(default_policy("mine"), 4, 2), Level)


@pytest.mark.slow
def test_an_added_policy_is_planned_and_composed(tmp_path: Path) -> None:
    """In a folder with the package and a `conf` of its own, as a checkout has."""
    (tmp_path / "pipespec").symlink_to(PACKAGE)
    shutil.copytree(resource_dir("conf"), tmp_path / "conf")
    (tmp_path / "demo").symlink_to(resource_dir("demo"))
    (tmp_path / "conf" / "policy" / "narrow.yaml").write_text("defaults: [my_policies.Narrow]\n")
    (tmp_path / "my_policies.py").write_text(MODULE)

    def run(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    small = ["stages=2", "policy.width=4", "proposer.rounds=1", "--tokens", "30", "--json"]
    named = json.loads(run("-m", "pipespec", "plan", "policy=narrow", *small))
    assert [(p["policy"], p["width"]) for p in named["predictions"]] == [("narrow", 2)]
    assert "best_first, level, narrow" in run("-m", "pipespec", "generate", "--help")
    code = "from pipespec.config.compose import compose; print(compose(['policy=narrow']).policy)"
    assert run("-c", code).startswith("Narrow(")
