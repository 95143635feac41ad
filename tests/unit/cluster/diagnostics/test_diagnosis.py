"""What `pipespec doctor` concludes from what the hosts said: who is named, and how badly."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipespec.cluster.diagnostics.diagnosis import (
    Finding,
    HostReport,
    LinkReport,
    diagnose,
    required_models,
)
from pipespec.cluster.diagnostics.examine_hosts import rounds
from pipespec.cluster.diagnostics.inventory import Inventory
from pipespec.cluster.diagnostics.probe import Endpoint, LinkSpeed, Listening, Reachability
from pipespec.config.hosts import HostsFile, load_hosts
from pipespec.engine.checkpoint.fingerprint import Fingerprint
from pipespec.system.network_interfaces import Interface

NAMES = ("alpha", "beta", "gamma")
VERSIONS = {
    "python": "3.12.3",
    "pipespec": "0.1.0",
    "code": "5a5a5a5a",
    "torch": "2.9.0+cu128",
    "transformers": "5.0.0",
    "torchao": "0.18.0",
    "bitsandbytes": None,
    "gguf": None,
    "driver": "570.86",
}
MODEL = Fingerprint("/models/m", None, "c0", "i0", {"m-1": 100, "m-2": 100})


def address(name: str) -> str:
    return f"10.0.0.{NAMES.index(name) + 1}"


@pytest.fixture
def hosts_file(tmp_path: Path) -> HostsFile:
    return make_hosts(tmp_path)


def make_hosts(
    folder: Path, *, of_alpha: dict[str, Any] | None = None, **settings: Any
) -> HostsFile:
    entries = [{"name": name, "address": address(name), "devices": ["cuda:0"]} for name in NAMES]
    entries[0] |= of_alpha or {}
    file = folder / "hosts.yaml"
    file.write_text(yaml.safe_dump({"hosts": entries, **settings}))
    return load_hosts(file)


def healthy() -> dict[str, HostReport]:
    """Three hosts that have the same and listen on eth0."""
    return {
        name: HostReport(
            Inventory(dict(VERSIONS), ["L40"], None, {"target": MODEL, "draft": MODEL}),
            listening(name),
        )
        for name in NAMES
    }


def listening(name: str) -> Listening:
    number = address(name)
    found = (
        Interface("lo", ("127.0.0.1",), True, 0, 65536),
        Interface("eth0", (number,), True, 10_000, 1500),
        Interface("eth1", (f"192.168.0.{number[-1]}",), True, 1000, 1500),
    )
    return Listening(number, Endpoint(number, 4000), "eth0", found, None)


def link(source: str, to: str, **reach: Any) -> LinkReport:
    if "problem" in reach:
        found = Reachability(place=Endpoint(address(to), 4000), **reach)
        return LinkReport(found, None, source, to)
    return LinkReport(Reachability(), LinkSpeed(0.2, 9.4), source, to)


ALL_LINKS = [link(a, b) for a in NAMES for b in NAMES if a != b]


def with_links(*changed: LinkReport) -> list[LinkReport]:
    other = {(each.source, each.to): each for each in changed}
    return [other.get((each.source, each.to), each) for each in ALL_LINKS]


def only(found: Sequence[Finding]) -> Finding:
    assert len(found) == 1, found
    assert found[0].sentence.endswith(".")
    return found[0]


@pytest.mark.parametrize(
    ("problem", "who", "parts"),
    [
        ("refused", None, ["port 4000 is refused", "firewall of beta"]),
        ("silent", None, ["port 4000 does not answer", "firewalls"]),
        ("no route", None, ["no route", "one network"]),
        ("stranger", None, ["another program's", "correct `address`"]),
        ("stranger", "gamma", ["gamma answers there", "two hosts have this address"]),
    ],
)
def test_a_closed_way_names_the_pair_and_the_remedy(problem, who, parts, hosts_file):
    closed = link("alpha", "beta", problem=problem, who=who)
    found = only(diagnose(hosts_file, healthy(), with_links(closed)))
    assert (found.error, found.hosts) == (True, ("alpha", "beta"))
    assert found.sentence.startswith("alpha cannot reach beta at 10.0.0.2: ")
    assert all(part in found.sentence for part in parts)


def test_unreachable_host_is_one_finding(hosts_file):
    closed = [link(source, "beta", problem="silent") for source in ("alpha", "gamma")]
    found = only(diagnose(hosts_file, healthy(), with_links(*closed)))
    assert found.sentence.startswith("alpha and gamma cannot reach beta")


def test_each_link_slower_than_its_interfaces_is_a_finding(hosts_file):
    slow = [replace(link("alpha", to), measured=LinkSpeed(0.2, 0.94)) for to in ("beta", "gamma")]
    found = diagnose(hosts_file, healthy(), with_links(*slow))
    assert found == [
        Finding(
            False,
            ("alpha", to),
            f"The link from alpha to {to} carries 0.94 Gbit/s, though the interfaces state 10; "
            "check cable, switch port and other traffic.",
        )
        for to in ("beta", "gamma")
    ]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"problem": "unknown", "number": None, "place": None}, "cannot resolve its own address"),
        ({"problem": "absent", "place": None}, "192.168.0.1 on eth1"),
        ({"problem": "no interface", "place": None}, "one that it has (lo, eth0 and eth1)"),
        ({"number": "127.0.1.1"}, "On alpha itself"),
    ],
)
def test_a_host_that_cannot_listen_at_its_address(changes, part, hosts_file):
    hosts = healthy()
    hosts["alpha"].listening = replace(listening("alpha"), carrier=None, **changes)
    links = [each for each in ALL_LINKS if each.to != "alpha"]
    found = only(diagnose(hosts_file, hosts, links))
    assert (found.error, found.hosts) == (True, ("alpha",))
    assert part in found.sentence


def with_inventory(name: str, **changes: Any) -> dict[str, HostReport]:
    hosts = healthy()
    before = hosts[name].inventory
    assert before is not None
    hosts[name].inventory = replace(before, **changes)
    return hosts


@pytest.mark.parametrize(
    ("versions", "error", "part"),
    [
        # Another pipespec is not also another code.
        ({"pipespec": "0.2.0", "code": "a5a5a5a5"}, True, "0.1.0 on alpha and beta and 0.2.0 on"),
        ({"code": "a5a5a5a5"}, True, "5a5a5a5a on alpha and beta and a5a5a5a5 on gamma"),
        ({"torch": "2.9.1+cu128"}, True, "2.9.0 on alpha and beta and 2.9.1 on gamma"),
        ({"transformers": "5.1.0"}, True, "5.0.0 on alpha and beta and 5.1.0 on gamma"),
        ({"transformers": None}, True, "transformers is not installed on gamma"),
        ({"torchao": "0.17.0"}, False, "0.18.0 on alpha and beta and 0.17.0 on gamma"),
        ({"python": "3.11.7"}, False, "3.12.3 on alpha and beta and 3.11.7 on gamma"),
        ({"driver": "550.10"}, False, "570.86 on alpha and beta and 550.10 on gamma"),
        # A host with a CPU beside hosts with GPUs.
        ({"torch": "2.9.0+cpu"}, None, ""),
        ({"driver": None}, None, ""),
    ],
    ids=str,
)
def test_versions_that_differ(versions, error, part, hosts_file):
    hosts = with_inventory("gamma", versions=VERSIONS | versions)
    found = diagnose(hosts_file, hosts, ALL_LINKS)
    if error is None:
        assert found == []
    else:
        assert (only(found).error, part in only(found).sentence) == (error, True)


def with_model(name: str, part: str, model: Fingerprint) -> dict[str, HostReport]:
    return with_inventory(name, models={"target": MODEL, "draft": MODEL, part: model})


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"config": "c1"}, "config.json differ"),
        ({"index": None}, "model.safetensors.index.json differ"),
        ({"shards": {"m-1": 100, "m-2": 101}}, "the sizes of its weight files differ"),
    ],
)
def test_a_target_unlike_the_others(changes, part, hosts_file):
    hosts = with_model("alpha", "target", replace(MODEL, **changes))
    found = only(diagnose(hosts_file, hosts, ALL_LINKS))
    assert found.error
    assert "on alpha is another than on beta and gamma: " in found.sentence
    assert part in found.sentence


def test_a_model_that_comes_at_the_start_is_a_warning(tmp_path):
    gone = Fingerprint("org/m", "is missing")
    hosts = with_model("gamma", "target", gone)
    own = make_hosts(tmp_path, draft="alpha/0")
    found = only(diagnose(own, hosts, ALL_LINKS, ["target"]))
    assert not found.error
    assert found.sentence == (
        "The target org/m on gamma is missing; the host gets what it computes when the cluster "
        "starts, or by `pipespec cache fetch`."
    )
    # Not where the hosts file says that it is there.
    hosts = with_model("alpha", "target", replace(gone, folder="/models/m"))
    hosts_file = make_hosts(tmp_path, draft="gamma/0", of_alpha={"target": "/models/m"})
    assert only(diagnose(hosts_file, hosts, ALL_LINKS, ["target"])).error


def test_a_missing_target_says_where_and_how_to_get_it(hosts_file):
    hosts = with_model("beta", "target", Fingerprint("meta/m", "is missing"))
    found = only(diagnose(hosts_file, hosts, ALL_LINKS))
    assert (found.error, found.hosts) == (True, ("beta",))
    assert "meta/m on beta is missing; run `hf download meta/m` there" in found.sentence
    hosts = with_model("beta", "target", Fingerprint("/m", "holds no config.json"))
    assert (
        "/m on beta holds no config.json; copy it"
        in only(diagnose(hosts_file, hosts, ALL_LINKS)).sentence
    )


def test_a_draft_that_no_checked_host_has_is_no_error_if_an_unchecked_one_may_have_it(tmp_path):
    gone = Fingerprint("/models/m", "is missing")
    hosts = {name: with_model(name, "draft", gone)[name] for name in ("beta", "gamma")}
    links = [each for each in ALL_LINKS if "alpha" not in (each.source, each.to)]
    by_hand = make_hosts(tmp_path, of_alpha={"ssh": "none"})
    found = diagnose(by_hand, hosts, links)
    assert [finding.error for finding in found] == [False] * 3
    assert found[0].hosts == ("alpha",)


def test_the_draft_is_needed_where_the_head_is(tmp_path):
    gone = Fingerprint("/d", "is missing")
    anywhere, on_beta = make_hosts(tmp_path), make_hosts(tmp_path, draft="beta/0")
    assert [required_models(anywhere, host) for host in anywhere.hosts] == [("target", "draft")] * 3
    assert [required_models(on_beta, host) for host in on_beta.hosts] == [
        ("target",),
        ("draft",),
        ("target",),
    ]
    hosts = with_model("beta", "draft", gone)
    assert only(diagnose(anywhere, hosts, ALL_LINKS)).error is False
    assert only(diagnose(on_beta, hosts, ALL_LINKS)).error is True
    for seen in hosts.values():
        seen.inventory.models["draft"] = gone
    assert [each.error for each in diagnose(anywhere, hosts, ALL_LINKS)] == [True] * 3


def test_a_device_that_torch_does_not_have(tmp_path):
    hosts_file = make_hosts(tmp_path, of_alpha={"devices": ["cuda:0", "cuda:2"]})
    found = only(diagnose(hosts_file, with_inventory("alpha", cuda=["L40", "L40"]), ALL_LINKS))
    assert found.error
    assert "the device cuda:2, but its CUDA devices end with cuda:1" in found.sentence


@pytest.mark.parametrize(("device", "error"), [("cuda", True), ("auto", False)])
def test_a_torch_without_cuda(device, error, tmp_path):
    hosts_file = make_hosts(tmp_path, of_alpha={"devices": [device]})
    hosts = with_inventory("alpha", cuda=[], cuda_problem="torch 2.9.0+cpu is built without CUDA")
    found = only(diagnose(hosts_file, hosts, ALL_LINKS))
    assert found.error is error
    assert "but torch 2.9.0+cpu is built without CUDA" in found.sentence


@pytest.mark.parametrize("count", range(1, 9))
def test_rounds_hold_every_pair_once_and_no_host_twice(count):
    names = [str(number) for number in range(count)]
    every = [frozenset(pair) for pairs in rounds(names) for pair in pairs]
    assert len(every) == len(set(every)) == count * (count - 1) // 2
    assert len(rounds(names)) == count - 1 + count % 2
    for pairs in rounds(names):
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy))
