"""Every shipped setting composes; every mistake is one clear sentence."""

from __future__ import annotations

import os
import types
import typing
from dataclasses import fields
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from pipespec.config.choices import groups, options, settings
from pipespec.config.compose import compose
from pipespec.config.model import ModelConfig
from pipespec.config.schema import (
    SECTIONS,
    ClusterConfig,
    ConfigError,
    ControllerConfig,
    DecodeConfig,
    TransportConfig,
    masked,
)
from pipespec.emulation import Link, Pace
from pipespec.head.feed.adaptive import Adaptive
from pipespec.head.feed.best_first import BestFirst
from pipespec.head.feed.level import Level
from pipespec.head.feed.root import Root
from pipespec.head.feed.static_tree import StaticTree
from pipespec.head.source.cascade import Cascade, SyntheticCascade
from pipespec.head.source.draft_model import DraftModel
from pipespec.head.source.hybrid import Hybrid
from pipespec.head.source.suffix import Suffix
from pipespec.head.source.synthetic import Synthetic
from pipespec.sampling.spec import Greedy, Relaxed, Sample, Strict
from pipespec.system.resources import resource_dir

CHOICES = [(group, option) for group in groups() for option in options(group)]
# What an option cannot do without.
NEEDED = {
    ("model", "custom"): ["model.target=/models/target", "model.draft=/models/draft"],
    ("controller", "url"): ["controller.url=redis://localhost:6379/0"],
    ("source", "synthetic"): [f"source.truth={__file__}"],
    ("source", "cascade"): ["model.mid=/models/mid"],
    ("source", "synthetic_cascade"): [f"source.truth={__file__}"],
    ("pace", "rtx3090_14"): ["cluster.stages=14"],
    ("pace", "mixed_21"): ["cluster.stages=21"],
}
CLASSES = {
    ("feed", "root"): Root,
    ("feed", "level"): Level,
    ("feed", "static_tree"): StaticTree,
    ("feed", "best_first"): BestFirst,
    ("feed", "adaptive"): Adaptive,
    ("source", "draft_model"): DraftModel,
    ("source", "suffix"): Suffix,
    ("source", "ngram"): Suffix,
    ("source", "hybrid"): Hybrid,
    ("source", "synthetic"): Synthetic,
    ("source", "cascade"): Cascade,
    ("source", "synthetic_cascade"): SyntheticCascade,
    ("verify", "greedy"): Greedy,
    ("verify", "sample"): Sample,
    ("verify", "relaxed"): Relaxed,
    ("verify", "strict"): Strict,
    **{("pace", name): Pace for name in options("pace")},
    **{("link", name): Link for name in options("link")},
}


@pytest.mark.parametrize(("group", "option"), CHOICES)
def test_every_shipped_file_composes(group: str, option: str) -> None:
    made = compose([f"{group}={option}", *NEEDED.get((group, option), [])])
    expected = SECTIONS.get(group) or CLASSES[group, option]
    assert type(getattr(made, group)) is expected


@pytest.mark.parametrize(("group", "option"), CHOICES)
def test_every_shipped_file_names_every_setting(group: str, option: str) -> None:
    """What is missing in the file could not be overridden."""
    cls = SECTIONS.get(group) or CLASSES[group, option]
    text = (resource_dir("conf") / group / f"{option}.yaml").read_text()
    named = {line.partition(":")[0] for line in text.splitlines() if line[0] not in "# "}
    fixed = {"max_rows", "children", "capacity"} if cls is Root else set()
    if (group, option) == ("controller", "url"):
        fixed = {"port", "data", "tls"}  # of the private server
    assert named - {"_target_"} == {f.name for f in fields(cls)} - fixed


def test_the_defaults_of_files_and_classes_agree() -> None:
    made = compose()
    assert made.cluster == ClusterConfig()
    assert made.decode == DecodeConfig()
    assert made.controller == ControllerConfig()
    assert made.transport == TransportConfig()
    assert (made.feed, made.source) == (BestFirst(), DraftModel())
    assert (made.verify, made.pace, made.link) == (Greedy(), Pace(), Link())
    assert Path(made.model.target) == resource_dir("demo") / "target"
    assert Path(made.model.draft) == resource_dir("demo") / "draft"
    assert (made.model.dtype, made.model.context, made.trace) == ("auto", None, None)


def test_a_source_that_needs_no_draft_needs_no_folder_of_one() -> None:
    made = compose(["model=custom", "model.target=/models/t", "source=suffix"])
    assert made.model.draft is None and not made.source.needs_draft


def test_the_points_of_an_accuracy_curve_need_no_quotes() -> None:
    chosen = ["source=synthetic", f"source.truth={__file__}", "source.curve=[1:0.7,4:0.9]"]
    assert compose(chosen).source == Synthetic(__file__, curve=["1:0.7", "4:0.9"])


def test_overrides_choose_and_set_in_any_order() -> None:
    made = compose(["feed.width=3", "cluster.stages=8", "feed=level", "decode.chat=true"])
    assert made.feed == Level(width=3)
    assert made.cluster.stages == 8
    assert made.decode.chat is True


@pytest.mark.parametrize(
    "value",
    [
        "/models/Llama-3.1-70B-Instruct",
        "/a folder/with spaces, commas (and brackets) = signs",
        "it's",
        "C:\\models\\",
        "7",
        "日本",
    ],
)
def test_a_path_needs_no_quotes(value: str) -> None:
    assert compose([f"model.target={value}"]).model.target == value


def test_a_redis_url_needs_no_quotes() -> None:
    url = "rediss://user:p@ss,word@host:6380/0?ssl_cert_reqs=none&timeout=1"
    assert compose([f"controller.url={url}"]).controller.url == url


def test_a_quoted_value_loses_its_quotes() -> None:
    assert compose(["model.target='/a b'"]).model.target == "/a b"


def test_the_environment_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELS", "/models")
    assert compose(["model.target=${oc.env:MODELS}/x"]).model.target == "/models/x"


def test_lists() -> None:
    assert compose(["decode.stop=['a b',\"\n\"]"]).decode.stop == ["a b", "\n"]
    assert compose(["decode.stop=END"]).decode.stop == ["END"]
    assert compose(["cluster.devices=cuda:0"]).cluster.devices == ["cuda:0"]
    assert compose(["feed=static_tree", "feed.shape=[1,2]"]).feed == StaticTree([1, 2])
    assert compose(["cluster.groups=2"]).cluster.group_sizes == (2, 2)
    assert compose(["cluster.groups=[1,3]"]).cluster.group_sizes == (1, 3)
    made = compose(["cluster.stages=2", "cluster.devices=[cpu,cuda:0,cuda:1]"])
    assert made.cluster.devices == ["cpu", "cuda:0", "cuda:1"]


def test_null_takes_a_value_back() -> None:
    assert compose(["trace=null", "controller.url=null"]).trace is None


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("feed=best_frist", "did you mean feed=best_first?"),
        ("transport=glo", "did you mean transport=gloo?"),
        ("model=/models/x", "choose from custom, demo"),
        ("feed={a:1}", "choose from adaptive, best_first, level, root, static_tree"),
        ("feed.widht=3", "did you mean feed.width?"),
        ("widht=3", "did you mean 'feed.width'?"),
        ("stages=3", "did you mean 'cluster.stages'?"),
        ("fed=level", "did you mean 'feed'?"),
        ("decode.zzz=1", "decode.max_new_tokens"),
        ("zzz=1", "choose from cluster, controller"),
        ("hydra.run.dir=x", "does not exist"),
        ("feed._target_=os.system", "does not exist"),
        ("feed.width.deep=1", "did you mean feed.width?"),
        ("model.dtype=flaot32", "did you mean float32?"),
        ("transport.backend=mpi", "auto, gloo, nccl"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(override: str, hint: str) -> None:
    assert hint in sentence([override])


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("feed.width=0", ["feed.width is 0", "from 1 to 4096"]),
        ("feed.width=-3", ["feed.width is -3"]),
        ("feed.width=abc", ["feed.width is 'abc'", "a whole number"]),
        ("feed.width=2.5", ["feed.width is 2.5", "a whole number"]),
        ("feed.width=[1,2]", ["feed.width is [1, 2]"]),
        ("feed.width=", ["feed.width is ''"]),
        ("cluster.stages=0", ["cluster.stages is 0", "from 1 to 1000"]),
        ("cluster.stages=true", ["cluster.stages is True", "a whole number"]),
        ("feed.row_cost=1", ["feed.row_cost is 1.0", "a share of a step"]),
        ("cluster.groups=3", ["cluster.groups is 3", "cluster.stages=4"]),
        ("cluster.groups=0", ["cluster.groups is 0", "cluster.stages=4"]),
        ("cluster.groups=[2,1]", ["cluster.groups is [2, 1]", "cluster.stages=4"]),
        ("cluster.groups=[5,-1]", ["cluster.groups is [5, -1]"]),
        ("cluster.groups=[]", ["cluster.groups is []"]),
        ("cluster.groups=[a]", ["cluster.groups is ['a']", "a list of whole numbers"]),
        ("cluster.devices=tpu", ["'tpu'", "auto, cpu, cuda or cuda:N"]),
        ("cluster.devices=[cpu,cpu]", ["names 2 devices", "1 (for every rank) or 5"]),
        ("cluster.devices=[]", ["names 0 devices"]),
        ("decode.max_new_tokens=0", ["decode.max_new_tokens is 0", "from 1 to"]),
        ("decode.priority=-1000001", ["decode.priority is -1000001", "from -1000000 to 1000000"]),
        ("decode.priority=high", ["decode.priority is 'high'", "a whole number"]),
        ("decode.prefill_chunk=-1", ["decode.prefill_chunk is -1"]),
        ("decode.chat=maybe", ["decode.chat is 'maybe'", "true or false"]),
        ("decode.stop=[1]", ["decode.stop is [1]", "a list of texts"]),
        ("decode.stop=['']", ["empty string"]),
        ("source.rounds=0", ["source.rounds is 0"]),
        ("verify.temperature=-1", ["verify.temperature is -1.0"]),
        ("verify.temperature=0.7", ["verify.temperature is 0.7", "verify=greedy"]),
        ("verify.temperature=nan", ["verify.temperature is nan", "a finite number"]),
        (["verify=sample", "verify.top_p=0"], ["verify.top_p is 0.0", "at most 1"]),
        (["verify=sample", "verify.seed=-1"], ["verify.seed is -1", "from 0"]),
        (["verify=sample", "verify.seed=0.5"], ["verify.seed is 0.5", "a whole number or null"]),
        ("verify.logprobs=21", ["verify.logprobs is 21", "from 0 to 20"]),
        ("verify.logit_bias=[12]", ["verify.logit_bias is [12]", "a list of texts"]),
        ("verify.logit_bias=['12']", ["verify.logit_bias holds '12'"]),
        (
            ["source=hybrid", "source.sources=[ngam]"],
            ["source.sources holds 'ngam'", "draft_model"],
        ),
        ("source=synthetic", ["source.truth has no value"]),
        (
            ["source=synthetic", "source.truth=/no/such,file"],
            ["'/no/such,file'", "must name a file"],
        ),
        ("model.draft=null", ["model.draft is null", "source=suffix"]),
        ("pace.stage_ms=-1", ["pace.stage_ms", "from 0 to"]),
        ("model.context=1", ["model.context is 1", "from 2 to"]),
        ("model.target=", ["model.target is empty"]),
        ("model.target=null", ["model.target is None", "a text"]),
        ("model.target=${oc.env:NO_SUCH_VARIABLE}", ["NO_SUCH_VARIABLE"]),
        ("model=custom", ["model.target has no value", "pass model.target="]),
        ("controller=url", ["controller.url has no value"]),
        ("controller.namespace=a b", ["controller.namespace is 'a b'"]),
        ("controller.port=65536", ["controller.port is 65536", "65535"]),
        ("controller.data=", ["controller.data is empty"]),
        (
            ["controller.url=redis://host", "controller.tls=/certificates"],
            ["controller.tls is for the private server", "controller.url"],
        ),
        (
            ["controller=url", "controller.url=redis://host", "controller.data=x"],
            ["controller=url"],
        ),
        ("transport.port=65536", ["transport.port is 65536", "65535"]),
        ("transport.port=-1", ["transport.port is -1"]),
        ("trace=/no/such/folder/t.json", ["/no/such/folder/t.json", "folder"]),
        ("trace=/", ["must name a file"]),
        ("trace=", ["must name a file"]),
    ],
)
def test_a_wrong_value_is_named_with_its_limit(override: str | list[str], parts: list[str]) -> None:
    message = sentence([override] if isinstance(override, str) else override)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("foo", "name=value"),
        ("+feed.x=1", "name=value"),
        ("~feed", "name=value"),
        ("cluster.devices=cpu,cuda", "cluster.devices=[a,b]"),
        ("decode.stop=(", "in quotes"),
    ],
)
def test_what_is_no_override_is_answered_with_the_form(override: str, remedy: str) -> None:
    assert remedy in sentence([override])


def test_a_policy_without_settings_says_so() -> None:
    assert "with feed=root, which has no settings" in sentence(["feed=root", "feed.width=3"])


@pytest.mark.parametrize(
    "override",
    [
        "controller.url=http://user:secret@host",
        "controller.ulr=redis://:secret@host",
        "+controller.url=redis://:secret@host",
        "redis://:secret@host",
        "unix:///redis.sock?password=secret",
    ],
)
def test_a_password_is_never_repeated(override: str) -> None:
    assert "secret" not in sentence([override])


def test_what_may_hold_a_password_is_not_shown() -> None:
    for url in ("redis://ann:se@ret@host:1/0", "unix:///redis.sock?password=se@ret"):
        assert "ret" not in repr(ControllerConfig(url))
        assert "se@ret" not in masked(f"controller.url={url}")
    assert masked("model.target=/models/a@b") == "model.target=/models/a@b"


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compose(["feed=level"])
    sentence(["feed.width=0"])
    assert os.listdir(tmp_path) == []
    assert not GlobalHydra().is_initialized()


def test_the_help_lists_every_group_and_value_with_its_default() -> None:
    listed = {setting.name: setting for setting in settings()}
    assert set(listed) >= {*groups(), "trace"}
    assert (listed["feed"].default, listed["feed"].note) == (
        "best_first",
        "one of adaptive, best_first, level, root, static_tree",
    )
    assert listed["feed.width"].default == str(BestFirst().width)
    for section, cls in SECTIONS.items():
        assert set(listed) >= {f"{section}.{f.name}" for f in fields(cls)}


@pytest.mark.parametrize("cls", dict.fromkeys([*SECTIONS.values(), *CLASSES.values()]))
@pytest.mark.parametrize("value", [-1, 99999999999, 1e300])
def test_no_number_beyond_all_measure_is_taken(cls: type, value: float) -> None:
    """Where one is harmless, it is listed here."""
    if cls is Root:  # it has no settings
        return
    harmless = {"repetition_penalty", "temperature", "top_k", "seed"}
    if value == -1:
        harmless = {"presence_penalty", "frequency_penalty", "priority"}
    truth = {"truth": __file__}
    needed = {ModelConfig: {"target": "t"}, Synthetic: truth, SyntheticCascade: truth}.get(cls, {})
    for name, hint in typing.get_type_hints(cls).items():
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if type(value) in kinds and name not in harmless:
            with pytest.raises(ConfigError, match=name):
                cls(**{**needed, name: value})


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    assert "feed.width has too many digits" in sentence(["feed.width=" + "9" * 5000])


@pytest.mark.parametrize(
    ("least", "settings"),
    [
        ("feed.shape [4096] is a tree of 4097 nodes", ["feed=static_tree", "feed.shape=[4096]"]),
        ("feed.shape", ["feed=static_tree", f"feed.shape={[99999999999] * 9}".replace(" ", "")]),
        ("levels_per_step is 5", ["feed=level", "feed.width=1000", "feed.levels_per_step=5"]),
        ("link.row_bytes is 0", ["link=10gbe", "link.row_bytes=0"]),
        ("link.gbit_per_s is 1e-06", ["link=10gbe", "link.gbit_per_s=0.000001"]),
    ],
)
def test_what_settings_come_to_together_is_limited(least: str, settings: list[str]) -> None:
    assert least in sentence(settings)


def test_the_largest_values_are_accepted() -> None:
    made = compose(["feed.width=4096", "decode.prefill_chunk=65536", "cluster.stages=1000"])
    assert made.feed.capacity == 64 * 4096
    assert compose(["feed=level", "feed.width=4096"]).feed.max_rows == 4096
    assert compose(["link.gbit_per_s=0"]).link == Link()


def sentence(overrides: list[str]) -> str:
    """The one line that refuses these overrides."""
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    message = str(caught.value)
    assert message.endswith((".", "?"))
    assert "\n" not in message
    return message
