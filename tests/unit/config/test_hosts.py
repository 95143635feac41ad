"""Hosts files: what they say, what is left out, and every mistake in one sentence."""

from pathlib import Path

import pytest

from pipespec.cluster.decide import decide
from pipespec.config.compose import compose
from pipespec.config.hosts import load_hosts
from pipespec.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parents[3] / "launch" / "hosts").glob("*.yaml"))

FULL = """
name: lab
defaults: {user: ubuntu, python: /opt/bin/python, port: 2222, env: {HF_HOME: /data, A: 1}}
hosts:
  - name: alpha
    address: 10.0.0.1
    ssh: alpha.lan
    user: me
    port: 22
    identity: ~/.ssh/key
    interface: eth0
    devices: [cuda:0, cuda:1]
    python: python3
    env: {A: two}
    target: /models/llama
    draft: /models/small
    memory_gib: 22
  - address: 10.0.0.2
    devices: [cpu, cpu]
draft: 10.0.0.2/1
order: [10.0.0.2, alpha]
split: [12, 20]
spares: 1
"""


def load(folder, text):
    file = folder / "lab-2.yaml"
    file.write_text(text)
    return load_hosts(file)


def refused(folder, text):
    with pytest.raises(ConfigError) as caught:
        load(folder, text)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'lab-2.yaml'}: ")
    assert "\n" not in message
    return message


def test_a_full_file_is_read(tmp_path):
    hosts_file = load(tmp_path, FULL)
    alpha, other = hosts_file.hosts
    assert hosts_file.name == "lab"
    assert (alpha.ssh, alpha.user, alpha.port, alpha.python) == ("alpha.lan", "me", 22, "python3")
    assert (alpha.identity, alpha.interface) == ("~/.ssh/key", "eth0")
    assert (alpha.target, alpha.draft, alpha.memory_gib) == ("/models/llama", "/models/small", 22.0)
    assert alpha.devices == ("cuda:0", "cuda:1")
    assert alpha.workers == ("alpha/0", "alpha/1")
    assert (hosts_file.order, hosts_file.split, hosts_file.spares) == (
        ("10.0.0.2", "alpha"),
        (12, 20),
        1,
    )
    assert hosts_file.host_of("10.0.0.2/1") is other
    assert hosts_file.device_of("alpha/1") == "cuda:1"


def test_devices_in_a_list_of_their_own_compute_together(tmp_path):
    hosts_file = load(
        tmp_path,
        "hosts:\n"
        "  - {name: a, address: 10.0.0.1, devices: [[cuda:0, cuda:1], cuda:2]}\n"
        "  - {name: b, address: 10.0.0.2, devices: [cpu, [cpu, cpu, cpu]]}\n"
        "spares: 1\n",
    )
    a, b = hosts_file.hosts
    assert a.devices == ("cuda:0", "cuda:1", "cuda:2")
    assert a.workers == ("a/0", "a/1", "a/2")
    assert a.members == {"a/0": ("a/0", "a/1"), "a/2": ("a/2",)}
    assert b.members == {"b/0": ("b/0",), "b/1": ("b/1", "b/2", "b/3")}
    assert hosts_file.workers == ("a/0", "a/2", "b/0", "b/1")
    assert hosts_file.heads == ("a/2", "b/0")
    assert hosts_file.num_stages == 2 and hosts_file.spare_workers == ("b/1",)
    assert hosts_file.members_of("b/1") == ("b/1", "b/2", "b/3")


def test_a_gpu_without_a_number_is_the_first(tmp_path):
    """torch makes no GPU the current one by a name without a number."""
    (host,) = load(tmp_path, "hosts: [{address: 10.0.0.1, devices: [cuda, cuda:1]}]").hosts
    assert host.devices == ("cuda:0", "cuda:1")


def test_defaults_fill_what_a_host_leaves_out(tmp_path):
    alpha, other = load(tmp_path, FULL).hosts
    assert alpha.env == {"HF_HOME": "/data", "A": "two"}
    assert other.env == {"HF_HOME": "/data", "A": "1"}
    assert (other.user, other.port, other.python) == ("ubuntu", 2222, "/opt/bin/python")
    assert (other.name, other.ssh, other.local, other.memory_gib) == ("10.0.0.2", None, False, None)


def test_two_lines_are_a_hosts_file(tmp_path):
    hosts_file = load(
        tmp_path, "hosts:\n  - {address: 10.0.0.1, ssh: local, devices: [cpu, cpu]}\n"
    )
    (host,) = hosts_file.hosts
    assert hosts_file.name == "lab-2"
    assert host.local
    assert (host.user, host.port, host.python, host.env) == (None, 22, "python3", {})
    assert (hosts_file.draft, hosts_file.order, hosts_file.split, hosts_file.spares) == (
        None,
        None,
        None,
        0,
    )
    assert hosts_file.num_stages == 1


def test_the_last_workers_along_the_order_are_spares_but_never_the_head(tmp_path):
    hosts_file = load(tmp_path, FULL)
    assert hosts_file.workers == ("10.0.0.2/0", "10.0.0.2/1", "alpha/0", "alpha/1")
    assert hosts_file.spare_workers == ("alpha/1",)
    assert hosts_file.num_stages == 2
    head_last = load(tmp_path, FULL.replace("10.0.0.2/1", "alpha/1"))
    assert head_last.spare_workers == ("alpha/0",)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_the_examples_are_valid(example):
    assert load_hosts(example).num_stages >= 1


TWO = (
    "hosts: [{name: alpha, address: a, devices: [cpu, cpu]}, {name: beta, address: b, "
    "devices: [cpu]}]\n"
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("host: []\n", "the file has an unknown setting 'host'; did you mean hosts?"),
        ("", "it has no hosts"),
        ("- a\n", "the file is"),
        ("hosts: [\n", "line 2"),
        ("[" * 3000 + "]" * 3000, "maximum recursion depth"),
        ("hosts: 0x" + "f" * 9000, "a number of too many digits"),
        ("name: a\nname: b\n", "found duplicate key name in"),
        ("hosts: [{address: a, devices: [cpu, cpu], adress: b}]", "unknown setting 'adress'"),
        ("hosts: [{name: a, devices: [cpu, cpu]}]", "hosts[0] has no address"),
        ("hosts: [{address: a, devices: cpu0}]", "a device is auto, cpu, cuda or cuda:N"),
        ("hosts: [{address: a, devices: [cuda, cuda:0]}]", "'cuda:0' twice"),
        ("hosts: [{address: a, devices: [auto, cpu]}]", "'auto' beside others"),
        ("hosts: [{address: a, devices: [cpu, []]}]", "a list of at least one"),
        ("hosts: [{address: a, devices: [cpu, [[cpu]]]}]", "a device is auto, cpu"),
        ("hosts: [{address: a, devices: [cpu, [cpu, cuda:0]]}]", "of one kind"),
        ("hosts: [{address: a, devices: [[cpu, cpu], [cpu, cpu]]}]", "it names no head"),
        ("hosts: [{name: a, address: a, devices: [cpu, [cpu, cpu]]}]\ndraft: a/2", "them, a/1"),
        ("hosts: [{address: a, devices: [cpu]}]", "its devices make 1 worker"),
        ("hosts: [{address: a, port: '22'}]", "hosts[0].port is '22', but must be a whole"),
        ("hosts: [{address: a, memory_gib: 0}]", "a number above 0 and at most 1000000000 (GiB)"),
        ("hosts: [{address: a, name: a/b}]", "hosts[0].name is 'a/b'"),
        ("hosts: [{address: -oProxyCommand=x}]", "must not begin with '-'"),
        ("hosts: [{address: a, user: 'b c'}]", "or hold a space"),
        ("hosts: [{address: a, env: {A-B: c}}]", "cannot be the name of a variable"),
        ("hosts: [{address: a, env: [A]}]", "must map names to texts"),
        ("defaults: {address: a}\nhosts: [{address: a}]", "defaults has an unknown setting"),
        ("hosts: [{address: a}, {address: a}]", "two hosts are called 'a'"),
        (f"{TWO}draft: alfa/0", "draft is 'alfa/0', which is no worker; did you mean alpha/0?"),
        (f"{TWO}order: [alpha, gamma]", "holds 'gamma', which is no host; choose from alpha, beta"),
        (f"{TWO}order: [alpha]", "but must name each of alpha, beta once"),
        (f"{TWO}split: [3, 0]", "must be a whole number from 1 to"),
        (f"{TWO}spares: 2", "use at most 1"),
        (f"{TWO}name: 'a b'", "name is 'a b'"),
    ],
)
def test_mistakes_are_named(tmp_path, text, said):
    assert said in refused(tmp_path, text)


def test_a_variable_that_may_be_a_secret_is_not_repeated(tmp_path):
    message = refused(tmp_path, "hosts: [{address: a, env: {TOKEN: [hunter2]}}]")
    assert "env.TOKEN" in message
    assert "hunter2" not in message
    assert "hunter2" not in refused(tmp_path, "hosts: [{address: a, env: TOKEN=hunter2}]")


def test_dollar_signs_are_left_alone(tmp_path):
    hosts_file = load(tmp_path, TWO.replace("address: b", "address: b, env: {A: '${HOME}'}"))
    assert hosts_file.host("beta").env == {"A": "${HOME}"}


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        ("", "", True),
        ("ssh: local", "ssh: local", True),
        ("ssh: x", "ssh: x", True),
        ("ssh: x", "ssh: y", False),
        ("port: 22", "port: 2222", False),
        ("user: a", "user: b", False),
        ("ssh: local", "ssh: none", False),
        ("ssh: none", "ssh: none", False),
    ],
)
def test_one_machine_listed_twice_is_named(first, second, refused, tmp_path):
    file = tmp_path / "hosts.yaml"
    hosts = "".join(
        f"  - {{name: {name}, address: 10.0.0.1, {more}}}\n".replace(", }", "}")
        for name, more in (("alpha", first), ("beta", second))
    )
    file.write_text("hosts:\n" + hosts)
    if not refused:
        assert len(load_hosts(file).hosts) == 2
        return
    with pytest.raises(ConfigError, match=r"'alpha' and 'beta' are one machine .*'10\.0\.0\.1'"):
        load_hosts(file)


GROUPS = """
hosts:
  - {name: a, address: 10.0.0.1, devices: [[cpu, cpu], cpu]}
  - {name: b, address: 10.0.0.2, devices: [cpu, cpu]}
"""


@pytest.mark.parametrize(
    ("lines", "ranks"),
    [
        ("", ("a/2", "a/0", "b/0", "b/1")),
        ("draft: b/1", ("b/1", "a/0", "a/2", "b/0")),
        ("draft: a/0\norder: [b, a]", ("a/0", "b/0", "b/1", "a/2")),
        ("spares: 1", ("a/2", "a/0", "b/0")),
        ("draft: b/1\nspares: 2", ("b/1", "a/0")),
    ],
)
def test_ranks_are_those_that_a_cluster_without_measurements_starts(tmp_path, lines, ranks):
    file = tmp_path / "hosts.yaml"
    file.write_text(GROUPS + lines)
    assert decide(compose([f"cluster={file}"])).workers == ranks


@pytest.mark.parametrize("override", ["cluster.spares=1", "cluster.devices=[cpu]"])
def test_what_a_hosts_file_has_of_its_own_is_not_set_beside_it(tmp_path, override):
    file = tmp_path / "lab.yaml"
    file.write_text(FULL)
    name = override.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{name} is .*; write it there and leave this out"):
        compose([f"cluster={file}", override])
