"""`pipespec doctor` on hosts that are processes of this machine, each at a loopback address."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipespec.cli.main import main
from pipespec.cluster.diagnostics import examine_hosts, probe
from pipespec.cluster.diagnostics.probe import Endpoint, NotReached, PeerConnection, ProbeListener
from pipespec.system.folders import resource_dir
from pipespec.system.network_interfaces import interfaces
from pipespec.system.versions import own_version
from tests.helpers import heads, models
from tools.rig import testbed

ROOT = Path(__file__).parents[2]
TOKEN = "t" * 64
HOSTS = ("alpha", "beta", "gamma")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe is found by what runs these tests, installed or not."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def hosts_file(folder: Path, some: Sequence[str] = HOSTS, **entries: dict[str, Any]) -> str:
    """Hosts on this machine: some of alpha, beta and gamma, and whatever else is named.

    `entries` are further settings of some of them, by name.
    """
    names = dict.fromkeys([*some, *entries])
    hosts_file = [
        {"name": name, "address": f"127.0.0.{index}", **entries.get(name, {})}
        for index, name in enumerate(names, 1)
    ]
    file = folder / "hosts.yaml"
    defaults = {"ssh": "local", "devices": ["cpu"]}
    file.write_text(yaml.safe_dump({"defaults": defaults, "hosts": hosts_file}))
    return str(file)


def examined(
    capsys: pytest.CaptureFixture[str], *argv: str, code: int
) -> tuple[dict[str, Any], list[str]]:
    """The report of `pipespec doctor --json`, and the lines on standard error."""
    assert main(["doctor", "--json", *argv]) == code
    out, err = capsys.readouterr()
    report: dict[str, Any] = json.loads(out)
    lines = err.splitlines()
    assert len(lines) == len(report["findings"])
    assert all(
        line.endswith(finding["sentence"])
        for line, finding in zip(lines, report["findings"], strict=True)
    )
    assert report["ok"] is (code == 0)
    return report, lines


def python(folder: Path, *lines: str) -> str:
    """A program for the `python` of a host: a shell script."""
    file = folder / f"python-{len(list(folder.iterdir()))}"
    file.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    file.chmod(0o755)
    return str(file)


RUN_PYTHON = f'exec "{sys.executable}" "$@"'


def test_three_hosts_in_good_health(tmp_path, capsys):
    report, _ = examined(capsys, hosts_file(tmp_path), code=0)
    assert report["findings"] == []
    assert list(report["hosts"]) == list(HOSTS)
    for host in report["hosts"].values():
        assert host["failure"] is None
        assert host["inventory"]["versions"]["torch"]
        assert host["inventory"]["models"].keys() == {"target", "draft"}
        assert host["listening"]["carrier"] == "lo"
    pairs = [(link["source"], link["to"]) for link in report["links"]]
    assert pairs == [(a, b) for a in HOSTS for b in HOSTS if a != b]
    for link in report["links"]:
        assert link["reach"]["problem"] is None
        assert 0 < link["measured"]["rtt_ms"] < 1000
        assert link["measured"]["gbit_per_s"] > 0


def test_a_draft_head_is_examined(tmp_path, capsys):
    target = models.shared("llama")
    head = heads.write_eagle3(tmp_path / "head", target)
    settings = [hosts_file(tmp_path, HOSTS[:2]), "proposer=head", f"model.target={target}"]
    report, _ = examined(capsys, *settings, f"model.draft={head}", code=0)
    assert report["findings"] == []
    assert main(["doctor", *settings]) == 2
    assert "holds no MTP layer, and model.draft names no head" in capsys.readouterr().err
    (head / "config.json").write_text("{}")
    assert main(["doctor", *settings, f"model.draft={head}"]) == 2
    assert "heads of one layer of llama are read" in capsys.readouterr().err


def test_the_tables(tmp_path, capsys):
    assert main(["doctor", hosts_file(tmp_path, HOSTS[:2])]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "Hosts" in out and "Links" in out
    assert all(f"│ {name} " in out for name in HOSTS[:2])
    assert out.splitlines()[-1] == "The hosts can work together; nothing is wrong."


def test_a_host_that_is_started_by_hand_is_named_and_the_others_are_checked(tmp_path, capsys):
    file = hosts_file(tmp_path, beta={"ssh": "none"})
    report, (warning,) = examined(capsys, file, code=0)
    assert warning == (
        "pipespec: warning: beta is started by hand (ssh: none) and not checked; run `pipespec "
        "doctor` there."
    )
    assert report["unchecked"] == ["beta"]
    assert list(report["hosts"]) == ["alpha", "gamma"]
    assert [(link["source"], link["to"]) for link in report["links"]] == [
        ("alpha", "gamma"),
        ("gamma", "alpha"),
    ]


def test_if_all_hosts_are_started_by_hand_none_is_called_fit(tmp_path, capsys):
    by_hand = {name: {"ssh": "none"} for name in HOSTS}
    assert main(["doctor", hosts_file(tmp_path, **by_hand)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "No host was checked, as all are started by hand."
    assert err.startswith("pipespec: warning: alpha, beta and gamma are started by hand")


def test_partition_refuses_a_host_that_is_started_by_hand(tmp_path, capsys):
    assert main(["plan", hosts_file(tmp_path, beta={"ssh": "none"})]) == 2
    err = capsys.readouterr().err
    assert err.startswith("pipespec: beta cannot be measured, as `ssh: none` means")
    assert "with `split`" in err and len(err.splitlines()) == 1


def test_a_model_that_differs_and_one_that_is_missing(tmp_path, capsys):
    other = shutil.copytree(resource_dir("demo") / "target", tmp_path / "other")
    (other / "config.json").write_text("{}")
    file = hosts_file(tmp_path, beta={"target": str(other)}, gamma={"draft": "/no/such/draft"})
    _, (error, warning) = examined(capsys, file, code=1)
    assert f"The target {other} on beta is another than on alpha and gamma: config.json" in error
    assert "warning: The draft /no/such/draft on gamma is missing" in warning


def test_probes_that_do_not_start(tmp_path, capsys):
    programs = {
        "bare": (["echo 'No module named pipespec' >&2", "exit 1"], "install pipespec there"),
        "broken": (["echo oops >&2", "exit 3"], "ended with exit code 3: oops"),
        "empty": (["exit 127"], "set `python` of the host"),
        "late": (["read line", "echo oops >&2", "exit 3"], "ended with exit code 3: oops"),
        "old": (["read line", "echo '{\"value\": 0}'", "read line"], "another version"),
    }
    entries = {name: {"python": python(tmp_path, *lines)} for name, (lines, _) in programs.items()}
    report, lines = examined(capsys, hosts_file(tmp_path, HOSTS[:2], **entries), code=1)
    assert [line.split(": ")[1] for line in lines] == list(programs)
    for line, (_, part) in zip(lines, programs.values(), strict=True):
        assert part in line
    assert {link["source"] for link in report["links"]} == set(HOSTS[:2])


def test_a_host_that_does_not_answer_is_given_up(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(examine_hosts, "HELLO_TIMEOUT_S", 2.0)
    beta = {"python": python(tmp_path, "exec sleep 600")}
    file = hosts_file(tmp_path, HOSTS[:2], beta=beta)
    _, lines = examined(capsys, file, code=1)  # another host may be as slow, on a busy machine
    assert any("beta: the probe did not answer within 2 s; check the load" in x for x in lines)


def test_an_address_that_leads_to_another_machine(tmp_path, capsys):
    """beta lives in a network namespace of its own, where 127.0.0.2 is another one."""
    apart = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    trial = [*apart, "ip", "link", "set", "lo", "up"]
    if shutil.which("unshare") is None or subprocess.run(trial, capture_output=True).returncode:
        pytest.skip("needs unshare and ip, and leave to make a network namespace")
    alone = f"exec {' '.join(apart)} sh -c 'ip link set lo up; {RUN_PYTHON}' sh \"$@\""
    file = hosts_file(tmp_path, beta={"python": python(tmp_path, alone)})
    report, lines = examined(capsys, file, code=1)
    assert {line.split(" at ")[0] for line in lines} == {
        "pipespec: beta cannot reach alpha",
        "pipespec: alpha and gamma cannot reach beta",
        "pipespec: beta cannot reach gamma",
    }
    assert all("is refused" in line and "firewall" in line for line in lines)
    open_pairs = {(k["source"], k["to"]) for k in report["links"] if k["measured"]}
    assert open_pairs == {("alpha", "gamma"), ("gamma", "alpha")}


@pytest.mark.long
def test_addresses_at_which_hosts_cannot_be_reached(tmp_path, capsys):
    file = hosts_file(
        tmp_path,
        far={"address": "203.0.113.7"},
        cardless={"interface": "none0"},
        self={"address": "localhost"},
        nameless={"address": "no-such.invalid"},
    )
    _, lines = examined(capsys, file, code=1)
    parts = (
        "No interface of far has its address 203.0.113.7",
        "cardless has no interface 'none0'",
        "On self itself its address 'localhost' means",
        "nameless cannot resolve its own address 'no-such.invalid'",
    )
    assert len(lines) == len(parts)
    assert all(part in line for part, line in zip(parts, lines, strict=True))


@pytest.fixture
def place() -> Endpoint:
    """Where a probe of a host called beta listens."""
    return ProbeListener("beta", TOKEN).open("127.0.0.1")


def test_probe_listener_accepts_only_clients_with_the_token(place):
    with closing(PeerConnection(place, "beta", TOKEN)) as peer:
        assert peer.round_trip() > 0
        assert peer.rate(0.0) > 0
    for wrong in ("x" * 64, TOKEN[:-1] + "x"):
        with pytest.raises(NotReached) as refused:
            PeerConnection(place, "beta", wrong)
        assert (refused.value.problem, refused.value.who) == ("stranger", None)


def test_probe_listener_sends_nothing_to_a_client_without_the_token(place):
    with socket.create_connection((place.address, place.port)) as stranger:
        stranger.settimeout(10)
        stranger.sendall(b"GET / HTTP/1.1\r\n".ljust(64))
        assert stranger.recv(1) == b""


def test_a_crowd_of_silent_strangers_is_not_let_grow(monkeypatch):
    monkeypatch.setattr(probe, "MAX_PEERS", 2)
    crowded = ProbeListener("beta", TOKEN).open("127.0.0.1")
    strangers = [socket.create_connection((crowded.address, crowded.port)) for _ in range(3)]
    try:
        strangers[2].settimeout(10)
        assert strangers[2].recv(1) == b""  # one too many
    finally:
        for stranger in strangers:
            stranger.close()


def test_batches_may_have_an_interface_of_their_own():
    named = [
        (known.name, address)
        for known in interfaces()
        for address in known.addresses
        if known.up and ":" not in address and not address.startswith("127.")
    ]
    if not named:
        pytest.skip("needs an interface with an IPv4 address beside the loopback")
    name, address = named[0]
    listening = probe.listen("beta", TOKEN, "127.0.0.2", name)
    assert (listening.carrier, listening.problem) == (name, None)
    assert listening.place is not None and listening.place.address == address
    PeerConnection(listening.place, "beta", TOKEN).close()


def test_another_host_at_the_address_is_named(place):
    with pytest.raises(NotReached) as refused:
        PeerConnection(place, "alpha", TOKEN)
    assert (refused.value.problem, refused.value.who) == ("stranger", "beta")


def test_port_without_a_listener_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = probe.link(TOKEN, "beta", {"address": "127.0.0.1", "port": port})
    assert found.reach == probe.Reachability("refused", Endpoint("127.0.0.1", port))
    assert found.measured is None


def test_a_probe_ends_with_its_standard_input():
    line = [sys.executable, "-m", "pipespec.cluster.diagnostics.probe"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(b'{"do": "hello"}\n')
        process.stdin.flush()
        lines = (json.loads(each) for each in process.stdout if each.strip())
        assert [next(lines), next(lines)] == [{"version": own_version()}, {"result": None}]
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.fixture(scope="module")
def bed() -> Iterator[testbed.Testbed]:
    if (lacking := testbed.missing()) is not None:
        pytest.skip(lacking)
    with testbed.Testbed(hosts=3, delay_ms=2.0, gbit=0.5) as made:
        yield made


def bed_report(bed: testbed.Testbed) -> tuple[int, dict[str, Any]]:
    """What the doctor says when it is run on the first host, through every host's sshd."""
    file = bed.hosts_file()
    hosts_file = yaml.safe_load(file.read_text())
    hosts_file["defaults"]["env"]["PYTHONPATH"] = str(ROOT)
    file.write_text(yaml.safe_dump(hosts_file))
    done = bed.run("a", [sys.executable, "-m", "pipespec", "doctor", "--json", str(file)])
    return done.returncode, json.loads(done.stdout)


@pytest.mark.long
def test_links_are_measured_as_they_are(bed):
    code, report = bed_report(bed)
    assert code == 0
    assert len(report["links"]) == 6
    for link in report["links"]:
        assert 2 * bed.delay_ms <= link["measured"]["rtt_ms"] < 10 * bed.delay_ms
        assert link["measured"]["gbit_per_s"] < 1.2 * bed.gbit


@pytest.mark.long
def test_a_cut_link_names_the_pair(bed):
    bed.cut("b", "c")
    code, report = bed_report(bed)
    assert code == 1
    errors = [finding for finding in report["findings"] if finding["error"]]
    assert [error["hosts"] for error in errors] == [["b", "c"], ["c", "b"]]
    assert all("does not answer" in error["sentence"] for error in errors)
    measured = {(link["source"], link["to"]) for link in report["links"] if link["measured"]}
    assert measured == {("a", "b"), ("b", "a"), ("a", "c"), ("c", "a")}
