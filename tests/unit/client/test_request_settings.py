import re
from dataclasses import replace

import pytest

from pipespec.cli.detach import default_name, parse_settings
from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import RunningCluster
from pipespec.client.request_settings import RequestSettings
from pipespec.engine.checkpoint.tokenizer import BackendTokenizer
from pipespec.engine.llguidance_backend import grammar_from_json_schema, grammar_from_regex
from pipespec.errors import ConfigError
from pipespec.system.folders import resource_dir
from pipespec.system.validation import Unreadable
from tests.helpers import dialects


def running(*overrides: str) -> RunningCluster:
    served = ModelInfo(str(resource_dir("demo") / "target"), 512, 64, (), BackendTokenizer("{}"))
    return replace(dialects.entry_of(served), overrides=overrides)


def test_a_request_has_the_clusters_defaults_and_its_own_settings_on_top():
    lab = running("decode.max_new_tokens=7", "sampling.temperature=0.5", "policy=root")
    config = RequestSettings.on(lab, [])
    assert config.decode.max_new_tokens == 7
    assert config.sampling.params(3).temperature == 0.5
    config = RequestSettings.on(
        lab, ["decode.max_new_tokens=9", "sampling.temperature=0.25", "decode.priority=-3"]
    )
    assert config.decode.priority == -3
    assert config.decode.max_new_tokens == 9
    assert config.sampling.params(3).temperature == 0.25
    # The cluster's temperature would not go with greedy.
    assert RequestSettings.on(lab, ["sampling.temperature=0"]).sampling.params(3).temperature == 0


@pytest.mark.parametrize(
    "setting",
    [
        "policy.width=8",
        "model.target=/x",
        "cluster.stages=2",
        "controller.url=redis://:secret@h",
        "trace=t.json",
        "decode.prefill_chunk=8",
        "policy=root",
    ],
)
def test_what_was_settled_at_the_start_is_refused_by_name(setting):
    with pytest.raises(ConfigError, match="was settled when the cluster 'lab' started") as raised:
        RequestSettings.on(running(), [setting])
    assert setting.partition("=")[0] in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_tokens=5", r"does not exist; did you mean 'decode\.max_new_tokens'"),
        ("upon", r"^'upon' is not a setting, .* needs quotes\.$"),
    ],
)
def test_what_is_no_setting_at_all_is_refused_as_in_other_commands(text, said):
    with pytest.raises(ConfigError, match=said):
        RequestSettings.on(running(), ["decode.max_new_tokens=2", text])


def test_settings_come_by_the_line_or_as_a_list():
    assert parse_settings(" policy=level\n\ndecode.stop=['a b']\n") == [
        "policy=level",
        "decode.stop=['a b']",
    ]
    assert parse_settings("[\"decode.stop=['\\n']\"]") == ["decode.stop=['\n']"]
    assert parse_settings("\n") == parse_settings("[]") == []
    for text in ("[1]", "[", '["a"', ""):  # whoever was to write it may have died
        with pytest.raises(Unreadable):
            parse_settings(text)


def test_unnamed_cluster_is_named_after_its_hosts_file(tmp_path):
    hosts_file = tmp_path / "attic.yaml"
    hosts_file.write_text("hosts: [{address: 127.0.0.1, ssh: local, devices: [cpu, cpu]}]\n")
    assert default_name(["policy=level", f"cluster={hosts_file}"]) == "attic"
    assert default_name(["cluster.stages=2", "cluster=local"]) == "default"


def test_an_answer_is_held_to_the_form_that_is_set(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"enum": ["a", "b"]}')
    held = RequestSettings.on(running(f"decode.json_schema={file}"), [])
    assert held.params(3).grammar == grammar_from_json_schema({"enum": ["a", "b"]})
    assert RequestSettings.on(running(), ["decode.regex=a+"]).params(
        3
    ).grammar == grammar_from_regex("a+")
    assert RequestSettings.on(running(), []).params(3).grammar == ""


@pytest.mark.parametrize(
    ("schema", "settings", "why"),
    [
        (None, ["decode.json_schema=FILE"], "cannot be read"),
        ("{", ["decode.json_schema=FILE"], "it is not JSON"),
        (
            '{"type": "string", "not": {}}',
            ["decode.json_schema=FILE"],
            'Unimplemented keys: ["not"]',
        ),
        (None, ["decode.regex=("], "unclosed group"),
        (None, ["decode.regex=a", "decode.json_schema=FILE"], "leave one out"),
        (None, ["decode.regex=a", "decode.ignore_eos=true"], "ends where the form does"),
    ],
)
def test_a_form_that_cannot_be_held_is_refused(tmp_path, schema, settings, why):
    file = tmp_path / "schema.json"
    if schema is not None:
        file.write_text(schema)
    with pytest.raises(ConfigError, match=re.escape(why)):
        RequestSettings.on(running(), [text.replace("FILE", str(file)) for text in settings])
