import types
import typing
from dataclasses import fields
from pathlib import Path

import pytest

from pipespec.config.choices import default, default_choices, groups, options, read_choice, settings
from pipespec.config.compose import compose
from pipespec.config.schema import ClusterConfig, DecodeConfig, RunConfig, SchedulingConfig, masked
from pipespec.controller.controller_settings import ControllerConfig
from pipespec.engine.model_settings import ModelConfig
from pipespec.errors import ConfigError
from pipespec.extras.emulation.link import EmulatedLink
from pipespec.extras.emulation.machine import EmulatedMachine
from pipespec.extras.emulation.synthetic_proposer import SyntheticConfig
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.level import Level
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.head.policies.root import Root
from pipespec.head.policies.static_tree import StaticTree
from pipespec.head.proposer import ProposerConfig
from pipespec.head.proposers.draft_model import DraftModelConfig
from pipespec.sampling.params import SamplingConfig
from pipespec.settings import about
from pipespec.system.folders import resource_dir
from pipespec.transport.transport_settings import TransportConfig

CHOICES = [(group, option) for group in groups() for option in options(group)]
CLASSES = list(dict.fromkeys(read_choice(group, option).cls for group, option in CHOICES))
# What an option cannot do without.
NEEDED = {
    ("model", "custom"): ["model.target=/models/target", "model.draft=/models/draft"],
    ("controller", "url"): ["controller.url=redis://localhost:6379/0"],
    ("proposer", "synthetic"): [f"proposer.truth={__file__}"],
    ("emulate", "rtx3090_14"): ["cluster.stages=14"],
    ("emulate", "mixed_21"): ["cluster.stages=21"],
}
EXPECTED: dict[str, type] = {
    "model": ModelConfig,
    "cluster": ClusterConfig,
    "sampling": SamplingConfig,
    "decode": DecodeConfig,
    "scheduler": SchedulingConfig,
    "controller": ControllerConfig,
    "transport": TransportConfig,
    "emulate": EmulatedMachine,
    "emulate_link": EmulatedLink,
    "policy": SpeculationPolicy,
    "proposer": ProposerConfig,
}


@pytest.mark.parametrize(("group", "option"), CHOICES)
def test_every_shipped_file_composes_and_all_its_settings_can_be_set(group, option):
    """To the values that they have already, which changes nothing."""
    needed = [f"{group}={option}", *NEEDED.get((group, option), [])]
    choice = read_choice(group, option)
    given = {text.partition("=")[0] for text in needed}
    values = [
        f"{group}.{entry.name}={choice.default(entry)}"
        for entry in fields(choice.cls)
        if f"{group}.{entry.name}" not in given and "<demo>" not in choice.default(entry)
    ]
    made = compose(needed)
    assert type(getattr(made, group)) is choice.cls
    assert isinstance(getattr(made, group), EXPECTED[group])
    assert compose([*needed, *values]) == made


@pytest.mark.parametrize(("group", "option"), CHOICES)
def test_a_shipped_file_holds_only_what_differs_from_the_defaults(group, option):
    choice = read_choice(group, option)
    of_class = {entry.name: default(entry) for entry in fields(choice.cls)}
    assert choice.values.keys() <= of_class.keys()
    repeated = [
        entry.name
        for entry in fields(choice.cls)
        if entry.name in choice.values and choice.default(entry) == of_class[entry.name]
    ]
    assert not repeated


@pytest.mark.parametrize("cls", [RunConfig, *CLASSES])
def test_every_setting_has_one_sentence_of_help(cls):
    for entry in fields(cls):
        sentence = about(entry).help
        assert sentence.endswith((".", ".)")) and ". " not in sentence and len(sentence) > 20


def test_the_default_choices_are_the_defaults_of_their_classes():
    made = compose()
    assert made.controller == ControllerConfig(url=None)
    assert (made.policy, made.proposer) == (BestFirst(), DraftModelConfig())
    for group in EXPECTED.keys() - {"controller", "policy", "proposer", "model"}:
        assert getattr(made, group) == EXPECTED[group]()
    assert Path(made.model.target) == resource_dir("demo") / "target"
    assert Path(made.model.draft) == resource_dir("demo") / "draft"
    assert (made.model.dtype, made.model.context, made.trace) == ("auto", None, None)


@pytest.mark.parametrize(
    ("settings", "gpus", "stages", "draft"),
    [
        ([], 0, 1, None),
        ([], 4, 4, None),
        (["cluster.tensor_parallel=2"], 4, 2, None),
        (["cluster.devices=[cpu]"], 4, 1, None),
        (["emulate=rtx3090_8"], 0, 4, None),
        (["model.draft=/d"], 0, 1, "/d"),
        (["model=demo"], 0, 1, str(resource_dir("demo") / "draft")),
    ],
)
def test_own_target_never_gets_the_demos_draft_and_stages(
    settings, gpus, stages, draft, monkeypatch
):
    monkeypatch.setattr("pipespec.config.compose.num_cuda", lambda: gpus)
    made = compose(["model.target=/t", *settings])
    assert (made.cluster.stages, made.model.draft) == (stages, draft)
    assert made.proposer.needs_draft == (draft is not None)
    assert ("proposer" in made.chosen) == (draft is None)


def test_overrides_choose_and_set_in_any_order():
    made = compose(["policy.width=3", "cluster.stages=8", "policy=level", "decode.chat=true"])
    assert made.policy == Level(width=3)
    assert made.cluster.stages == 8
    assert made.decode.chat is True


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("model.target=/a folder/with spaces, commas (and brackets) = signs", None),
        ("model.target=it's", None),
        ("model.target=C:\\models\\", None),
        ("model.target=7", None),
        ("model.target=日本", None),
        ("model.target='/a b'", "/a b"),
        ("model.target=${oc.env:MODELS}/x", "/models/x"),
        ("controller.url=rediss://user:p@ss,word@host:6380/0?ssl_cert_reqs=none&timeout=1", None),
        ("controller.tls=auto", None),
        ("model.kv_memory=8 GiB", None),
        ("proposer.corpus=FOLDER", None),
    ],
)
def test_texts_need_no_quotes(override, value, tmp_path, monkeypatch):
    """A value of None is what stands behind the name."""
    monkeypatch.setenv("MODELS", "/models")
    folder = tmp_path / "a folder, of texts"
    folder.mkdir()
    name, _, given = override.replace("FOLDER", str(folder)).partition("=")
    group, _, setting = name.partition(".")
    made = compose(["proposer=suffix", f"{name}={given}"])
    assert getattr(getattr(made, group), setting) == (value or given)


def test_lists_and_null():
    chosen = ["proposer=synthetic", f"proposer.truth={__file__}", "proposer.curve=[1:0.7,4:0.9]"]
    assert compose(chosen).proposer == SyntheticConfig(__file__, curve=["1:0.7", "4:0.9"])
    assert compose(["trace=null", "controller.url=null"]).trace is None
    assert compose(["decode.stop=['a b',\"\n\"]"]).decode.stop == ["a b", "\n"]
    assert compose(["decode.stop=END"]).decode.stop == ["END"]
    assert compose(["cluster.devices=cuda:0"]).cluster.devices == ["cuda:0"]
    assert compose(["policy=static_tree", "policy.shape=[1,2]"]).policy == StaticTree([1, 2])
    assert compose(["model.kv_memory=0.7"]).model.kv_memory == 0.7
    made = compose(["cluster.stages=2", "cluster.devices=[cpu,cuda:0,cuda:1]"])
    assert made.cluster.devices == ["cpu", "cuda:0", "cuda:1"]


def test_interpolation_is_of_the_type_of_its_setting(monkeypatch):
    monkeypatch.setenv("WIDTH", "8")
    assert compose(["policy.width=${oc.env:WIDTH}"]).policy == BestFirst(width=8)
    monkeypatch.setenv("WIDTH", "wide")
    assert "policy.width" in sentence(["policy.width=${oc.env:WIDTH}"])


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("policy=best_frist", "did you mean policy=best_first?"),
        ("model=/models/x", "choose from custom, demo"),
        ("policy.widht=3", "did you mean policy.width?"),
        ("polcy=level", "did you mean 'policy'?"),
        ("zzz=1", "choose from cluster, controller"),
        ("policy._target_=os.system", "does not exist"),
        ("policy.width.deep=1", "did you mean policy.width?"),
        ("model.dtype=flaot32", "did you mean float32?"),
        ("foo", "name=value"),
        ("+policy.x=1", "name=value"),
        ("~policy", "name=value"),
        ("cluster.devices=cpu,cuda", "cluster.devices=[a,b]"),
        ("decode.stop=(", "in quotes"),
    ],
)
def test_an_unknown_name_or_form_is_answered_with_the_nearest(override, hint):
    assert hint in sentence([override])


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("policy.width=0", ["policy.width is 0", "from 1 to 4096"]),
        ("policy.width=abc", ["policy.width is 'abc'", "a whole number"]),
        ("cluster.stages=true", ["cluster.stages is True", "a whole number"]),
        ("cluster.threads=0", ["cluster.threads is 0", "from 1 to", "or auto"]),
        ("cluster.threads=many", ["cluster.threads is 'many'"]),
        ("policy.row_cost=1", ["policy.row_cost is 1.0", "a share of a step"]),
        ("model.graph_rows=[64,0]", ["model.graph_rows is 0", "from 1 to", "or nothing: []"]),
        ("cluster.devices=tpu", ["'tpu'", "auto, cpu, cuda or cuda:N"]),
        ("cluster.devices=[cpu,cpu]", ["names 2 devices", "1 (for every rank) or 5"]),
        ("decode.chat=maybe", ["decode.chat is 'maybe'", "true or false"]),
        ("decode.stop=['']", ["empty string"]),
        ("sampling.temperature=nan", ["sampling.temperature is nan", "a finite number"]),
        (
            ["sampling.temperature=1", f"sampling.seed={2**63}"],
            [f"sampling.seed is {2**63}", "from -922"],
        ),
        ("sampling.logit_bias=['12']", ["sampling.logit_bias holds '12'"]),
        ("proposer=synthetic", ["proposer.truth has no value"]),
        (
            ["proposer=synthetic", "proposer.truth=/no/such,file"],
            ["'/no/such,file'", "must name a file"],
        ),
        ("model.draft=null", ["model.draft is null", "proposer=suffix"]),
        ("model.target=", ["model.target is empty"]),
        ("model.target=${oc.env:NO_SUCH_VARIABLE}", ["NO_SUCH_VARIABLE"]),
        ("model=custom", ["model.target has no value", "pass model.target="]),
        ("controller.namespace=a b", ["controller.namespace is 'a b'"]),
        ("controller.data=", ["controller.data is empty"]),
        (
            ["controller.url=redis://host", "controller.tls=off"],
            ["controller.tls is for the private server", "controller.url"],
        ),
        ("controller.tls=on", ["controller.tls is 'on'", "auto, off"]),
        (
            ["controller=url", "controller.url=redis://host", "controller.data=x"],
            ["controller=url"],
        ),
        ("transport.seal=always", ["transport.seal is 'always'", "auto, yes, no"]),
        ("transport=nccl", ["transport=nccl is not known", "auto, gloo"]),
        ("trace=${decode.max_new_tokens}", ["trace is 128, but must be a text or null."]),
        ("decode.stop=${model.graph_rows}", ["decode.stop is [64], but must be a list of texts"]),
        ("proposer.rounds=${model.target}", ["proposer.rounds is"]),
        ("policy.width=" + "9" * 5000, ["policy.width has too many digits"]),
        (["policy=root", "policy.width=3"], ["with policy=root, which has no settings"]),
        (
            ["policy=static_tree", "policy.shape=[4096]"],
            ["policy.shape [4096] is a tree of 4097 nodes"],
        ),
        (
            ["policy=static_tree", f"policy.shape={[99999999999] * 9}".replace(" ", "")],
            ["policy.shape"],
        ),
        ("trace=", ["must name a file"]),
        ("trace=/no/such/folder/t.json", ["/no/such/folder/t.json", "folder"]),
    ],
)
def test_a_wrong_value_is_named_with_its_limit(override, parts):
    message = sentence([override] if isinstance(override, str) else override)
    assert all(part in message for part in parts), message


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
def test_a_password_is_never_repeated(override):
    assert "secret" not in sentence([override])


def test_what_may_hold_a_password_is_not_shown():
    for url in ("redis://ann:se@ret@host:1/0", "unix:///redis.sock?password=se@ret"):
        assert "ret" not in repr(ControllerConfig(url))
        assert "se@ret" not in masked(f"controller.url={url}")
    assert masked("model.target=/models/a@b") == "model.target=/models/a@b"


def test_the_help_lists_every_group_and_value_with_its_default():
    listed = {setting.name: setting for setting in settings()}
    assert set(listed) >= {*groups(), "trace"}
    assert (listed["policy"].default, listed["policy"].note) == (
        "best_first",
        f"one of {', '.join(options('policy'))}",
    )
    assert listed["policy.width"].default == str(BestFirst().width)
    for group, name in default_choices().items():
        shown = [f for f in fields(read_choice(group, name).cls) if not about(f).experimental]
        assert set(listed) >= {f"{group}.{f.name}" for f in shown}


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("value", [-1, 99999999999, 1e300])
def test_no_number_beyond_all_measure_is_taken(cls, value):
    """Where one is harmless, it is listed here."""
    if cls is Root:  # it has no settings
        return
    harmless = {"repetition_penalty", "temperature", "top_k", "seed"}
    if value == -1:
        harmless = {"presence_penalty", "frequency_penalty", "priority"}
        harmless |= {"seed"} if cls is SamplingConfig else set()
    needed = {
        ModelConfig: {"target": "t"},
        ControllerConfig: {"url": None},
        SyntheticConfig: {"truth": __file__},
    }.get(cls, {})
    for name, hint in typing.get_type_hints(cls).items():
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if type(value) in kinds and name not in harmless:
            with pytest.raises(ConfigError, match=name):
                cls(**{**needed, name: value})


def test_the_largest_values_are_accepted():
    made = compose(["policy.width=4096", "decode.prefill_chunk=65536", "cluster.stages=1000"])
    assert made.policy.max_nodes == 128 * 4096
    assert compose(["policy=level", "policy.width=4096"]).policy.max_rows == 4096
    assert compose(["emulate_link.gbit_per_s=0"]).emulate_link == EmulatedLink()


def sentence(overrides: list[str]) -> str:
    """The one line that refuses these overrides."""
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    message = str(caught.value)
    assert message.endswith((".", "?"))
    assert "\n" not in message
    return message
