"""Hosts of a running cluster are replaced by another version; requests go on with the same text."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipespec.client.local_cluster import Running, running
from pipespec.cluster.deployment import decide
from pipespec.cluster.fault_stats import FaultKind
from pipespec.cluster.host_replacement import Replaced, current_hosts
from pipespec.config.compose import compose
from pipespec.config.hosts import JOINED, Host
from pipespec.controller.log_records import Accepted
from pipespec.controller.membership import Membership
from pipespec.errors import ConfigError, HostFailed
from pipespec.system.folders import resource_dir
from pipespec.system.versions import PROTOCOL, own_version
from tests.helpers import killed_streams
from tests.helpers.sandbox import Sandbox
from tests.helpers.serving import Server
from tests.helpers.waiting import until
from tools.rig import cluster, http_server

ROOT = Path(__file__).parents[2]
DEMO = resource_dir("demo")
PROMPT = "Once upon a time there was a king who had three sons and"
TOKENS = 900
# Tokens after the replacement that must be the same.
LATER = 8
# So that requests last: 0.1 s for a token.
SLOW = ("policy=root", "emulate=fixed", "emulate.stage_ms=50")
NEWER, FOREIGN = "9.9", "9.10"


def installation(folder: Path, version: str, protocol: int = PROTOCOL) -> Path:
    """A copy of the package, as another version of it."""
    for name in ("pipespec", "lua", "conf"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    metadata = folder / f"pipespec-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: pipespec\nVersion: {version}\n")
    file = folder / "pipespec" / "system" / "versions.py"
    file.write_text(
        re.sub(r"^PROTOCOL = .*$", f"PROTOCOL = {protocol}", file.read_text(), flags=re.M)
    )
    return folder


def write_hosts(file: Path, **installed: Path) -> None:
    """Two hosts of this machine; those that are named use another installation."""
    hosts = {"a": ["cpu", "cpu"], "b": ["cpu"]}
    entries = [
        {
            "name": name,
            "address": f"127.0.0.{number}",
            "ssh": "local",
            "devices": devices,
            "env": {"PYTHONPATH": str(installed[name]), "PYTHONSAFEPATH": "1"}
            if name in installed
            else {},
        }
        for number, (name, devices) in enumerate(hosts.items(), 1)
    ]
    file.write_text(json.dumps({"hosts": entries}))


@pytest.fixture
def hosts_file(tmp_path: Path) -> Path:
    write_hosts(tmp_path / "lab.yaml")
    return tmp_path / "lab.yaml"


@pytest.fixture
def started(hosts_file: Path) -> Iterator[Running]:
    settings = [f"cluster={hosts_file}", "model.context=1024", "cluster.patience_s=600", *SLOW]
    with running(decide(compose(settings))) as made:
        yield made


@pytest.mark.long
def test_host_runs_another_version_and_a_running_request_goes_on_with_the_same_text(
    started: Running, hosts_file: Path, tmp_path: Path
) -> None:
    newer = installation(tmp_path / "newer", NEWER)
    prompt = started.client.served.encode(PROMPT)
    greedy = compose([]).sampling.params(0)
    request = started.client.submit(prompt, greedy, max_new_tokens=TOKENS)
    tokens: list[int] = []
    replaced: list[Replaced] = []
    for event in started.client.events(request):
        if not isinstance(event, Accepted):
            continue
        first, tokens = not tokens, [*tokens, *event.tokens]
        if first:
            write_hosts(hosts_file, a=newer)
            started.cluster.replace_hosts(replaced.append)
            with Membership(started.cluster.url, started.cluster.namespace) as shared:
                until(shared.progress)  # the head of the new epoch has admitted it
                ((_, length),) = shared.progress()
        if replaced and len(prompt) + len(tokens) > length + LATER:
            started.client.cancel(request)
            break
    (expected,) = cluster.reference(DEMO / "target", [prompt], len(tokens))
    assert tokens == expected
    ((host, version),) = [(each.host, each.version) for each in replaced]
    assert host == "a", "a host that runs the installed version stays as it is"
    assert version.startswith(f"{NEWER}, protocol {PROTOCOL}, code ")
    assert [fault.kind for fault in started.cluster.faults] == [FaultKind.HOST_REPLACED]


@pytest.mark.long
def test_no_host_is_replaced_where_one_has_another_protocol(
    started: Running, hosts_file: Path, tmp_path: Path
) -> None:
    foreign = installation(tmp_path / "foreign", FOREIGN, PROTOCOL + 1)
    newer = installation(tmp_path / "newer", NEWER)
    replaced: list[Replaced] = []
    epoch = started.cluster.epoch
    write_hosts(hosts_file, a=newer, b=foreign)
    with pytest.raises(HostFailed, match="no host was replaced") as refused:
        started.cluster.replace_hosts(replaced.append)
    assert (replaced, started.cluster.epoch) == ([], epoch)
    assert str(refused.value).startswith(
        f"b: pipespec there is {FOREIGN}, protocol {PROTOCOL + 1}, code "
    )
    assert f"but the cluster's is {own_version()}" in str(refused.value)


def test_hosts_file_that_lacks_a_host_of_the_cluster_is_refused(hosts_file: Path) -> None:
    deployment = decide(compose([f"cluster={hosts_file}"]))
    assert [host.name for host in current_hosts(deployment)] == ["b", "a"], "the head's is last"
    joined = deployment.knowing([Host("c", "10.0.0.3", f"{JOINED}/run/socket")])
    assert current_hosts(joined) == current_hosts(deployment), "one that has joined stays as it is"
    text = hosts_file.read_text()
    hosts_file.write_text(text.replace('"name": "b"', '"name": "c"'))
    with pytest.raises(ConfigError, match="no longer has the host b; keep the hosts"):
        current_hosts(deployment)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_streams_of_a_server_go_on_while_its_hosts_are_upgraded(
    place: Sandbox, hosts_file: Path, tmp_path: Path
) -> None:
    newer = installation(tmp_path / "newer", NEWER)
    server = Server(place, f"cluster={hosts_file}", "model.context=1024", *SLOW)
    connect = http_server.ServerAddress(server.announced["url"]).connect
    bodies = killed_streams.request_bodies(streams=4, tokens=512)
    undisturbed = asyncio.run(killed_streams.read_all(connect, bodies))
    upgraded: list[dict[str, object]] = []

    def upgrade() -> None:
        write_hosts(hosts_file, a=newer, b=newer)
        code, out, err = place.run("upgrade", "--json")
        assert (code, err) == (0, "")
        upgraded.extend(json.loads(out)["hosts"])

    streams = asyncio.run(killed_streams.read_all(connect, bodies, at=4, fault=upgrade))
    assert [each.text for each in streams] == [each.text for each in undisturbed]
    assert [each["host"] for each in upgraded] == ["b", "a"], "the head's host comes last"
    assert server.metric("pipespec_resumption_seconds_count") > 0, "requests were running"
    code, out, _ = place.run("upgrade")
    assert (code, out) == (0, "All hosts of lab run the version that is installed there.\n")
    assert server.end() == 0
    until(lambda: not place.processes())
    assert place.files() == []
