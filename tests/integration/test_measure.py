"""Measuring the devices of a host in a process of its own, and planning from what was measured."""

import json
from dataclasses import asdict, replace

import pytest

from pipespec.cli.main import main
from pipespec.cluster.diagnostics import measure_hosts as measure_hosts_module
from pipespec.cluster.diagnostics.examine_hosts import Examination
from pipespec.cluster.diagnostics.measure_devices import measure
from pipespec.cluster.diagnostics.measure_hosts import MeasureRequest, measure_hosts
from pipespec.config.compose import compose
from pipespec.config.hosts import Host, HostsFile, load_hosts
from pipespec.engine.inspection.inspection import inspect
from pipespec.errors import HostFailed
from pipespec.placement.measurements import problem
from pipespec.placement.slices import plan_slices
from pipespec.system.folders import resource_dir
from tests.helpers import models

DEMO = resource_dir("demo")
NUM_LAYERS = 16
WISH = MeasureRequest(
    target=str(DEMO / "target"),
    draft=str(DEMO / "draft"),
    devices=("cpu", "cpu"),
    roles=(("draft",), ("stage",)),
    rows=8,
    length=64,
    children=4,
    dtype="float32",
)
HOSTS = """
hosts:
  - {name: alpha, address: 127.0.0.1, ssh: local, devices: [cpu, cpu]}
  - {name: beta, address: 127.0.0.2, ssh: local, devices: [cpu, cpu]}
"""
SETTINGS = ["policy.width=8", "model.context=256"]


def wish(**changes):
    return replace(WISH, **changes)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache folder of this module's own."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def hosts_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("hosts") / "pair.yaml"
    file.write_text(HOSTS)
    return file


@pytest.fixture(scope="module")
def figures(hosts_file):
    """Both hosts, measured."""
    return measure_hosts(load_hosts(hosts_file), compose(["cluster.stages=3", *SETTINGS]))


@pytest.fixture
def host():
    """A host whose probe runs."""
    with Examination(HostsFile("lab", (Host("a", "127.0.0.1", "local"),))) as examination:
        examination.start("a")
        yield examination


def test_layers_that_keep_a_state_instead_of_k_and_v_are_told_apart(tmp_path):
    path = models.build("qwen3_next", tmp_path / "model")
    found, info = measure(wish(target=str(path), draft=str(path))), inspect(path)
    sizes = found["target"]
    assert sizes["has_kv"] == [False, True, False, True]
    assert sizes["state_bytes"] == [info.recurrent.state_bytes(4), 0] * 2
    assert sizes["node_bytes"] == [info.recurrent.node_bytes(4), 0] * 2
    stage = found["devices"][1]["stage"]
    assert stage["kv_slot_bytes"] == 4 * info.kv_size
    assert sizes["kinds"] == [0, 1, 0, 1]
    assert stage["layer_ms"] == pytest.approx(sum(stage["kind_ms"]) / 2)
    assert measure(wish(target=str(path), draft=str(path)))["devices"][1]["stage"] == stage


@pytest.mark.parametrize(
    ("model_type", "kinds"), [("nemotron_h", [0, 1, 2, 3]), ("kimi_linear", [0, 1, 2, 1])]
)
def test_layers_of_several_kinds_are_timed_by_kind(tmp_path, model_type, kinds):
    """State, experts, attention and MLP; state beside an MLP, attention, state beside experts."""
    path = models.build(model_type, tmp_path / "model")
    found = measure(wish(target=str(path), draft=None, devices=("cpu",), roles=(("stage",),)))
    assert found["target"]["kinds"] == kinds
    (device,) = found["devices"]
    assert len(device["stage"]["kind_ms"]) == max(kinds) + 1
    assert min(device["stage"]["kind_ms"]) > 0


def test_what_was_measured_is_kept_and_belongs_to_its_rows(cache):
    first, again = measure(wish()), measure(wish())
    assert [found["stage"] for found in first["devices"][1:]] == [again["devices"][1]["stage"]]
    assert first["devices"][0]["draft"] == again["devices"][0]["draft"]
    files = set(cache.rglob("*.json"))
    other = measure(wish(rows=4, roles=(("stage",), ("stage",))))
    assert other["devices"][0]["stage"] == other["devices"][1]["stage"]
    assert len(set(cache.rglob("*.json")) - files) == 1


def test_a_spoilt_cache_is_measured_anew(cache):
    measure(wish())
    for file in cache.rglob("*.json"):
        file.write_text('{"layer_ms": "a text"')
    assert measure(wish())["devices"][1]["stage"]["layer_ms"] > 0


def test_what_cannot_be_measured_is_one_sentence(host):
    with pytest.raises(HostFailed, match=r"^a: .*no model folder /nowhere .* up HOSTS"):
        host.measure_devices("a", asdict(wish(target="/nowhere")))


@pytest.mark.long
def test_figures_become_a_placement_of_all_layers(figures, hosts_file):
    config = compose(["cluster.stages=3", *SETTINGS])
    asked = problem(load_hosts(hosts_file), figures, config)
    placement = plan_slices(asked)
    assert sum(map(len, placement.layers)) == NUM_LAYERS
    assert sorted(placement.workers_by_rank) == ["alpha/0", "alpha/1", "beta/0", "beta/1"]
    assert {(link["source"], link["to"]) for link in figures.links} == {
        ("alpha", "beta"),
        ("beta", "alpha"),
    }
    # The ends hold the (tied) embedding too.
    needs = asked.needs
    assert placement.bytes_by_rank[1] > needs.stage_bytes(range(1, 1 + len(placement.layers[0])))
    stored = inspect(DEMO / "target").stored
    assert needs.layer_bytes == tuple(2 * size for size in stored.layers)


@pytest.fixture
def measured(figures, monkeypatch):
    """The command finds these figures."""
    monkeypatch.setattr(measure_hosts_module, "measure_hosts", lambda *_, **__: figures)


@pytest.mark.long
@pytest.mark.usefixtures("measured")
def test_printed_settings_make_the_same_placement(hosts_file, tmp_path, capsys):
    spare = tmp_path / "spare.yaml"
    spare.write_text(f"{hosts_file.read_text()}spares: 1\n")
    assert main(["plan", str(spare), *SETTINGS]) == 0
    printed = capsys.readouterr().out
    for word in ("alpha/0", "beta/1", "sets the pace", "draft: ", "order: [", "split: ["):
        assert word in printed
    main(["plan", "--json", str(spare), *SETTINGS])
    first = json.loads(capsys.readouterr().out)
    assert first["step_ms"] == max(row["compute_ms"] + row["link_ms"] for row in first["ranks"])
    assert sum(first["hosts"]["split"]) == NUM_LAYERS
    lines = "".join(f"{name}: {json.dumps(value)}\n" for name, value in first["hosts"].items())
    fixed = tmp_path / "fixed.yaml"
    fixed.write_text(spare.read_text() + lines)
    main(["plan", "--json", str(fixed), *SETTINGS])
    again = json.loads(capsys.readouterr().out)
    assert [row["member"] for row in again["ranks"]] == [row["member"] for row in first["ranks"]]
    assert again["spares"] == first["spares"]
    assert again["hosts"] == first["hosts"]


def test_a_link_to_an_address_that_the_host_does_not_have_is_refused():
    hosts = (Host("a", "127.0.0.1", "local"), Host("b", "192.0.2.9", "local"))
    with Examination(HostsFile("lab", hosts)) as examination:
        for host in hosts:
            examination.start(host.name)
        with pytest.raises(HostFailed, match=r"no interface of b has its address 192\.0\.2\.9"):
            examination.links_of("b")
