"""What is run to start a module on a host, and what a user is told when it fails."""

import dataclasses
import json
import shutil
import subprocess
import sys

import pytest

from pipespec.cluster import ssh
from pipespec.config.hosts import Host
from pipespec.errors import HostFailed

HOST = Host(
    name="beta",
    address="10.0.0.2",
    ssh=None,
    user=None,
    port=22,
    identity=None,
    interface=None,
    devices=("cpu",),
    python="python3",
    env={},
    target=None,
    draft=None,
    memory_gib=None,
)
LOCAL = dataclasses.replace(HOST, ssh="local")
NASTY = ("two words", "it's", '"$HOME"', "$(id)", "`id`", "a;b&c|d>e", "*", "\\", "", "naïve", "#x")


def host(**changes: object) -> Host:
    return dataclasses.replace(HOST, **changes)


@pytest.fixture
def telling(tmp_path):
    """A python that prints its arguments and environment instead of running a module."""
    path = tmp_path / "a python"
    program = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    path.write_text(f"#!/bin/sh\nexec {sys.executable} -S -c '{program}' \"$@\"\n")
    path.chmod(0o755)
    return path


def told(line: str, **options: object) -> tuple[list[str], dict[str, str]]:
    done = subprocess.run(["sh", "-c", line], capture_output=True, check=True, **options)
    arguments, environment = json.loads(done.stdout)
    return arguments, environment


def test_arguments_and_environment_pass_through_the_remote_shell_unchanged(telling):
    env = {f"KEY_{index}": text for index, text in enumerate(NASTY)}
    remote = host(python=str(telling), env=env)

    arguments, environment = told(ssh.remote_line(remote, ["some.module", *NASTY]))

    assert arguments == ["-m", "some.module", *NASTY]
    assert env.items() <= environment.items()


def test_a_leading_tilde_is_the_home_folder_on_the_host(telling):
    remote = host(python=f"~/{telling.name}", env={"HF_HOME": "~/data of mine", "OTHER": "a~/b"})
    home = str(telling.parent)

    _, environment = told(
        ssh.remote_line(remote, ["some.module"]), env={"HOME": home, "PATH": "/usr/bin:/bin"}
    )

    assert environment["HF_HOME"] == f"{home}/data of mine"
    assert environment["OTHER"] == "a~/b"


@pytest.fixture
def config(tmp_path, monkeypatch) -> None:
    """An ssh configuration of a user, in place of ~/.ssh/config."""
    path = tmp_path / "config"
    path.write_text("Host lab\n  HostName 192.0.2.7\n  Port 2022\n  LocalForward 9000 x:9000\n")
    monkeypatch.setenv(ssh.CONFIG_VARIABLE, str(path))


def understood(remote: Host) -> dict[str, str]:
    """What OpenSSH's client understands of our command line; it does not connect."""
    if shutil.which("ssh") is None:
        pytest.skip("needs OpenSSH's client")
    first, *rest = ssh.command(remote, "some.module")
    done = subprocess.run([first, "-G", *rest], capture_output=True, text=True, check=True)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


@pytest.mark.usefixtures("config")
def test_a_host_of_the_users_configuration_keeps_its_address_and_port():
    options = understood(host(ssh="lab"))

    assert (options["hostname"], options["port"]) == ("192.0.2.7", "2022")
    assert options["clearallforwardings"] == "yes"


@pytest.mark.usefixtures("config")
def test_settings_of_the_host_override_the_users_ssh_configuration(tmp_path):
    key = tmp_path / "key"
    key.touch()

    options = understood(host(ssh="lab", user="me", port=2200, identity=str(key)))

    assert (options["user"], options["port"]) == ("me", "2200")
    assert (options["identityfile"], options["identitiesonly"]) == (str(key), "yes")


@pytest.mark.usefixtures("config")
def test_ssh_never_prompts_and_notices_a_dead_link():
    options = understood(HOST)

    assert options["hostname"] == HOST.address
    assert options["batchmode"] == "yes"
    assert options["serveraliveinterval"] == "1"
    assert options["serveralivecountmax"] == "3"
    assert options["requesttty"] == "false"


def test_a_local_host_runs_without_ssh():
    assert (
        ssh.run_module(LOCAL, "json.tool", "--compact", input=b'{"a": 1}', timeout=30)
        == b'{"a":1}\n'
    )


def test_a_local_host_has_its_environment(telling):
    local = host(ssh="local", python=str(telling), env={"HF_HOME": "/data of mine"})

    arguments, environment = json.loads(ssh.run_module(local, "some.module", "it's", timeout=30))

    assert arguments == ["-m", "some.module", "it's"]
    assert environment["HF_HOME"] == "/data of mine"


def test_popen_ends_with_its_standard_input():
    with ssh.start_module(
        LOCAL, "json.tool", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        out, _ = process.communicate(b"[]")

    assert (out, process.returncode) == (b"[]\n", 0)


@pytest.mark.parametrize(
    ("local", "module", "sentence"),
    [
        (LOCAL, "no_such_module", "No module named no_such_module; install pipespec there"),
        (host(ssh="local", python="/no/python"), "timeit", "there is no /no/python here"),
        (host(ssh="local", python="/no/python", env={"A": "b"}), "timeit", "set `python`"),
    ],
)
def test_a_local_host_that_cannot_run_the_module(local, module, sentence):
    with pytest.raises(HostFailed) as failed:
        ssh.run_module(local, module, timeout=30)

    assert str(failed.value).startswith("beta: ") and sentence in str(failed.value)


def test_failure_quotes_the_last_line_of_stderr_and_not_the_input():
    with pytest.raises(HostFailed) as failed:
        ssh.run_module(LOCAL, "json.tool", input=b"secret", timeout=30)

    assert str(failed.value).startswith("beta: json.tool ended with exit code 1: Expecting value")
    assert "secret" not in str(failed.value)


def test_a_program_that_does_not_end_is_given_up(telling):
    telling.write_text("#!/bin/sh\nexec tail -f /dev/null\n")

    with pytest.raises(HostFailed, match=r"beta: some\.module did not answer within 0\.2 s"):
        ssh.run_module(host(ssh="local", python=str(telling)), "some.module", timeout=0.2)


def test_programs_on_other_hosts_end_with_the_first_that_fails(telling):
    """And with a signal, whose exception comes in the same way."""
    telling.write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    waiting, failing = host(ssh="local", python=str(telling)), LOCAL

    def ask(run, each):
        module = "some.module" if each is waiting else "no_such_module"
        return run(each, module, timeout=600)

    with pytest.raises(HostFailed, match="No module named no_such_module"):
        ssh.ask_hosts([waiting, failing], ask)


def test_answers_of_hosts_are_in_their_order():
    def ask(run, each):
        return each, run(each, "json.tool", input=b"[]", timeout=30)

    hosts = [LOCAL, host(ssh="local", env={"A": "b"})]
    assert ssh.ask_hosts(hosts, ask) == [(each, b"[]\n") for each in hosts]
    assert ssh.ask_hosts([], ask) == []


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("me@10.0.0.2: Permission denied (publickey).", "`ssh-copy-id me@10.0.0.2`"),
        ("Host key verification failed.", "`ssh me@10.0.0.2` to accept its key"),
        ("ssh: connect to host 10.0.0.2 port 22: Connection refused", "start sshd there"),
        (
            "ssh: connect to host 10.0.0.2 port 22: Connection timed out",
            "check that the host is up",
        ),
        ("ssh: connect to host 10.0.0.2 port 22: No route to host", "on this network"),
        ("ssh: Could not resolve hostname beta: Name or service not known", "correct `address`"),
        ("Timeout, server 10.0.0.2 not responding.", "check the host and the link to it"),
        ("kex_exchange_identification: read: reset by peer", "by hand"),
    ],
)
def test_message_of_ssh_comes_with_a_remedy(said, remedy):
    stderr = f"Welcome to beta\n{said}\r\n\n".encode()

    message = str(ssh.failure(host(user="me"), "some.module", 255, stderr))

    assert message.startswith("beta: ") and message.count("\n") == 0
    assert said.rstrip(".") in message and remedy in message


def test_silent_failure_of_ssh_is_reported_as_silent():
    message = str(ssh.failure(HOST, "some.module", 255, b""))

    assert message == "beta: ssh ended without a message; try `ssh 10.0.0.2` by hand"
