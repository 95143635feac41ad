"""How the arguments of LLM become settings, and what is refused before anything starts."""

import pytest

from pipespec import LLM, AsyncLLM
from pipespec.api.own_cluster import overrides_of
from pipespec.config.compose import compose
from pipespec.errors import ConfigError
from pipespec.head.policies.root import Root


def test_arguments_are_settings_and_none_are_the_defaults():
    assert overrides_of(None, None, None, None, {}) == []
    settings = ["model.target=m", "model.draft=d", "cluster.stages=2"]
    assert overrides_of("m", "d", 2, None, {}) == settings
    assert overrides_of("m", None, None, "h.yaml", {}) == ["model.target=m", "cluster=h.yaml"]


def test_every_kind_of_value_arrives_as_it_was(tmp_path):
    folder = tmp_path / "a folder, with [brackets]"
    settings = {
        "policy": "level",
        "policy.width": 4,
        "policy.shared": True,
        "model.context": None,
        "model.target": str(folder),
        "cluster.devices": ["cpu", "cpu", "cpu"],
        "decode.stop": ['a "b", c', "it's", "a\\nb", "d\\"],
        "cluster.patience_s": 2.5,
    }
    config = compose(overrides_of(None, None, 2, None, settings))
    assert (config.policy.width, config.policy.shared) == (4, True)
    assert config.model.context is None
    assert config.model.target == str(folder)
    assert config.cluster.stages == 2
    assert config.cluster.devices == ["cpu", "cpu", "cpu"]
    assert config.decode.stop == settings["decode.stop"]
    assert config.cluster.patience_s == 2.5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"stages": 2, "hosts": "h.yaml"}, "hosts=h.yaml and stages=2 are both given"),
        ({"draft": "d"}, "draft=d is given without a model"),
        ({"settings": {"trace": "t.json"}}, "An LLM has no setting 'trace'"),
        ({"policy": "root"}, "policy is 'root', but must be a SpeculationPolicy"),
        (
            {"policy": Root(), "settings": {"policy.width": 3}},
            "policy and the setting 'policy.width' are both given",
        ),
        ({"settings": {"polcy.width": 3}}, "The setting 'polcy.width' does not exist"),
        ({"stages": 0}, "cluster.stages is 0, but must be"),
        ({"model": "/nowhere"}, "/nowhere"),
        ({"hosts": "/nowhere/hosts.yaml"}, "/nowhere/hosts.yaml"),
    ],
)
def test_wrong_settings_are_refused_before_a_process_starts(arguments, said):
    with pytest.raises(ConfigError, match=said) as refused:
        LLM(**arguments)
    assert str(refused.value).count("\n") == 0


def test_a_policy_of_the_main_module_is_refused_with_the_remedy(monkeypatch):
    class Own(Root):
        pass

    monkeypatch.setattr(Own, "__module__", "__main__")
    with pytest.raises(ConfigError, match=r"Own is defined in __main__.*into a module of its own"):
        AsyncLLM(policy=Own())
