"""What is refused before any rank starts, for what the models and the machine are."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from pipespec.cluster import session
from pipespec.cluster.decide import decide
from pipespec.cluster.deployment.checks import chosen, scaled, shared_gpu, without_ggml
from pipespec.cluster.deployment.deployment import Deployment, fit_context, own_address
from pipespec.cluster.redis_setup import kept_model
from pipespec.config.compose import compose
from pipespec.config.hosts import Host, own_name
from pipespec.engine.inspection.inspection import CheckpointInfo
from pipespec.errors import ConfigError, ModelError
from pipespec.system.folders import resource_dir
from tests.helpers.models import build

DEMO = resource_dir("demo")
HERE = own_name()


def planned(*settings: str) -> Deployment:
    return decide(compose(["cluster.stages=2", "cluster.devices=[cpu]", *settings]))


@pytest.mark.parametrize(
    ("few_bits", "device", "why", "said"),
    [
        (True, "cpu", "ggml is not installed.", "ggml is not installed."),
        (True, "cpu", "", None),
        (True, "cuda:0", "ggml is not installed.", None),
        (False, "cpu", "ggml is not installed.", None),
    ],
)
def test_a_start_without_ggml_says_so_where_it_counts(few_bits, device, why, said, monkeypatch):
    monkeypatch.setattr("pipespec.engine.ggml.library.why_not", lambda: why)
    monkeypatch.setattr(CheckpointInfo, "can_keep", few_bits)
    monkeypatch.setattr(Deployment, "device_of", lambda self, worker: device)
    assert without_ggml(planned()) == said


def test_a_start_says_that_positions_are_scaled_for_the_context(tmp_path):
    """Requests that are kept are of a model with these positions."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    build("llama", tmp_path / "target", rope_parameters=rope)
    of_it = (f"model.target={tmp_path / 'target'}", "proposer=suffix")
    short, long = (planned(*of_it, f"model.context={tokens}") for tokens in (256, 300))
    assert scaled(short) is None and "scaled" not in kept_model(short).target
    assert scaled(fit_context(long, 10, 1)) == (
        "The target's rotary embedding is scaled for 300 tokens, in short texts too; with "
        "model.context=256 or less it is the original."
    )
    assert "positions scaled for 300 tokens" in kept_model(fit_context(long, 10, 1)).target
    assert kept_model(planned(*of_it)).context == 1024


@pytest.mark.parametrize(
    ("num_gpus", "stages", "members", "said"),
    [
        (1, 2, 1, "2 stages share cuda:0 of "),
        (3, 2, 1, None),
        (1, 1, 2, "2 members of stages share cuda:0 of "),
        (3, 2, 2, "2 members of stages share cuda:0 of "),
        (5, 2, 2, None),
    ],
)
def test_stages_and_members_that_share_a_gpu_are_named(
    num_gpus, stages, members, said, monkeypatch
):
    monkeypatch.setattr("pipespec.system.devices.num_cuda", lambda: num_gpus)
    settings = (f"cluster.stages={stages}", f"cluster.tensor_parallel={members}")
    line = shared_gpu(planned("cluster.devices=[cuda]", *settings))
    assert line is None if said is None else line is not None and line.startswith(said)


def test_host_without_devices_is_refused_with_the_remedy(tmp_path):
    file = tmp_path / "hosts.yaml"
    file.write_text("hosts: [{name: a, address: 10.0.0.1}, {name: b, address: 10.0.0.2}]\n")
    with pytest.raises(ConfigError, match="Host a has the device auto; name its devices"):
        decide(compose([f"cluster={file}"]))


def test_workers_that_are_started_by_hand_need_a_cluster_that_stays(tmp_path):
    file = tmp_path / "hosts.yaml"
    file.write_text(
        "hosts:\n"
        "  - {name: a, address: 127.0.0.1, devices: [cpu]}\n"
        "  - {name: b, address: 127.0.0.2, devices: [cpu], ssh: none}\n"
    )
    deployment = decide(compose([f"cluster={file}"]))
    with (
        pytest.raises(ConfigError, match="The workers of b are started by hand"),
        session.start_agents(deployment),
    ):
        pass


def test_more_children_than_tokens_are_refused():
    tokens = planned().target.vocab_size
    assert planned(f"policy.children={tokens}").config.policy.children == tokens
    with pytest.raises(ConfigError, match=rf"policy\.children is {tokens + 1}, .*{tokens} tokens"):
        planned(f"policy.children={tokens + 1}")


@pytest.mark.parametrize(
    ("model_type", "settings", "sentence"),
    [
        ("gpt_oss", ("cluster.tensor_parallel=2",), "Transformers has no tensor-parallel plan"),
        ("llama", ("cluster.tensor_parallel=3",), r"3 devices cannot share .*: 4 heads"),
        (
            "llama",
            ("cluster.tensor_parallel=2", "model.quantization=int8"),
            r"2 devices cannot compute .* quantised as a whole",
        ),
    ],
)
def test_model_that_cannot_be_divided_is_refused(tmp_path, model_type, settings, sentence):
    model = build(model_type, tmp_path / "model")
    common = (f"model.target={model}", "proposer=suffix", "cluster.devices=[cpu]")
    with pytest.raises(ModelError, match=sentence):
        decide(compose([*common, "cluster.stages=2", *settings]))


def test_chosen_stages_are_at_most_one_for_each_layer(monkeypatch):
    monkeypatch.setattr("pipespec.config.compose.num_cuda", lambda: 99)
    found = decide(compose([f"model.target={DEMO / 'target'}"]))
    assert len(found.layers) == found.config.cluster.stages == found.target.num_layers
    assert "proposer=suffix" in (chosen(found) or "")
    assert "Chosen for target: " in (chosen(found) or "")
    elsewhere = replace(found, target=replace(found.target, path=Path("/cache/0123abcd")))
    assert chosen(elsewhere) == chosen(found), "the name is that of the settings"


def test_devices_name_those_of_a_stage_one_after_another():
    settings = ["cluster.stages=2", "cluster.tensor_parallel=2"]
    deployment = decide(compose([*settings, "cluster.spares=1", "cluster.devices=[cpu]"]))
    assert deployment.workers == (f"{HERE}/0", f"{HERE}/1", f"{HERE}/3")
    assert deployment.spares == (f"{HERE}/5",)
    found = [deployment.followers_of(f"{HERE}/{number}") for number in (0, 1, 3, 5)]
    assert found == [(), (f"{HERE}/2",), (f"{HERE}/4",), (f"{HERE}/6",)]
    with pytest.raises(
        ConfigError, match=r"or 5 \(the head, then 2 stages, of 1 and 2 devices each\)"
    ):
        compose([*settings, "cluster.devices=[cpu,cpu,cpu]"])
    with pytest.raises(ConfigError, match="a hosts file says itself"):
        compose([*settings, "cluster.hosts=hosts.yaml"])


def test_a_hosts_file_says_which_devices_compute_together(tmp_path):
    file = tmp_path / "box.yaml"
    file.write_text(
        "hosts: [{name: box, address: 127.0.0.1, ssh: local, devices: [[cpu, cpu], cpu, cpu]}]"
    )
    deployment = decide(compose([f"cluster={file}"]))
    assert deployment.workers == ("box/2", "box/0", "box/3")
    assert deployment.sizes == (1, 2, 1)
    found = deployment.assignment(deployment.without({"box/3"}))
    assert found.workers == ("box/2", "box/0") and found.followers == ((), ("box/1",))


def test_a_draft_is_computed_by_several_devices_if_there_is_one():
    settings = ["cluster.stages=1", "cluster.draft_tensor_parallel=2", "cluster.devices=[cpu]"]
    deployment = decide(compose(settings))
    assert deployment.workers == (f"{HERE}/0", f"{HERE}/2")
    assert deployment.sizes == (2, 1)
    assert deployment.followers_of(f"{HERE}/0") == (f"{HERE}/1",)
    with pytest.raises(ConfigError, match="its proposer has no draft model"):
        decide(compose([*settings, "proposer=suffix"]))


@pytest.mark.parametrize("lost", [f"{HERE}/3", f"{HERE}/4"])
def test_losing_one_member_replaces_its_whole_tensor_parallel_group(lost):
    settings = ["cluster.stages=2", "cluster.tensor_parallel=2", "cluster.spares=1"]
    deployment = decide(compose([*settings, "cluster.devices=[cpu]"]))
    found = deployment.assignment(deployment.without({lost}))
    assert found.workers == (f"{HERE}/0", f"{HERE}/1", f"{HERE}/5")
    assert found.followers == ((), (f"{HERE}/2",), (f"{HERE}/6",))


def test_hosts_with_addresses_of_ipv6_alone_are_reached_over_it(monkeypatch):
    def source_address(address: str, family: int = socket.AF_UNSPEC) -> str:
        if family == socket.AF_INET or address == "fd00::3":
            raise OSError(-9, "Address family for hostname not supported")
        return "fd00::1"

    monkeypatch.setattr("pipespec.cluster.deployment.deployment.source_address", source_address)
    assert own_address([Host("b", "fd00::2")]) == "fd00::1"
    with pytest.raises(ConfigError, match="no route to fd00::3"):
        own_address([Host("b", "fd00::3")])


def test_ipv4_comes_first_and_a_lone_machine_has_none():
    assert own_address([Host("b", "127.0.0.2")]) == "127.0.0.1"
    assert own_address([]) is None
