"""What is run to start a module on a host, and what a user is told when it fails."""

import dataclasses
import json
import socket
import subprocess
import sys

import asyncssh
import pytest

from pipespec.cluster.host_link import connection, programs, remote_program
from pipespec.cluster.host_link.loop import NO_CONNECTION
from pipespec.config.hosts import Host
from pipespec.errors import HostFailed
from tests.helpers.processes import run_module

HOST = Host("beta", "10.0.0.2")
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

    arguments, environment = told(remote_program.remote_line(remote, ["some.module", *NASTY]))

    assert arguments == ["-m", "some.module", *NASTY]
    assert env.items() <= environment.items()


def test_a_leading_tilde_is_the_home_folder_on_the_host(telling):
    remote = host(python=f"~/{telling.name}", env={"HF_HOME": "~/data of mine", "OTHER": "a~/b"})
    home = str(telling.parent)

    _, environment = told(
        remote_program.remote_line(remote, ["some.module"]),
        env={"HOME": home, "PATH": "/usr/bin:/bin"},
    )

    assert environment["HF_HOME"] == f"{home}/data of mine"
    assert environment["OTHER"] == "a~/b"


def test_a_local_host_runs_without_ssh():
    assert run_module(LOCAL, "json.tool", "--compact", given=b'{"a": 1}') == b'{"a":1}\n'


def test_a_local_host_has_its_environment(telling):
    local = host(ssh="local", python=str(telling), env={"HF_HOME": "/data of mine"})

    arguments, environment = json.loads(run_module(local, "some.module", "it's"))

    assert arguments == ["-m", "some.module", "it's"]
    assert environment["HF_HOME"] == "/data of mine"


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
        run_module(local, module)

    assert str(failed.value).startswith("beta: ") and sentence in str(failed.value)


def test_failure_quotes_the_last_line_of_stderr_and_not_the_input():
    with pytest.raises(HostFailed) as failed:
        run_module(LOCAL, "json.tool", given=b"secret")

    assert str(failed.value).startswith("beta: json.tool ended with exit code 1: Expecting value")
    assert "secret" not in str(failed.value)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            asyncssh.PermissionDenied("Permission denied for user me"),
            "Permission denied for user me; let this user's key in with ",
        ),
        (
            asyncssh.HostKeyNotVerifiable("Host key is not trusted for host beta"),
            "Host key is not trusted for host beta; connect once by hand with `ssh me@10.0.0.2`",
        ),
        (OSError(111, "Connect call failed ('10.0.0.2', 22)"), "Connection refused; start sshd"),
        (OSError(113, "Connect call failed"), "No route to host; check `address`"),
        (OSError("Multiple exceptions: [Errno 111] a, [Errno 111] b"), "Connection refused; start"),
        (TimeoutError(), "timed out; check that the host is up"),
        (socket.gaierror(-2, "Name or service not known"), "; correct `address` or `ssh`"),
        (asyncssh.ConnectionLost("Server not responding to keepalive"), "; check the host and the"),
        (
            FileNotFoundError(2, "No such file or directory", "k"),
            "k No such file or directory; try",
        ),
        (
            ValueError("config line 1:\n  bad port"),
            "config line 1: bad port; try `ssh me@10.0.0.2`",
        ),
        (None, "the connection was lost; try `ssh me@10.0.0.2` by hand"),
    ],
)
def test_an_error_of_a_connection_is_a_clause_with_a_remedy(error, said):
    assert said in connection.reason(host(user="me"), error)


def test_jump_hosts_are_read_as_openssh_reads_them():
    assert connection._parts("jump") == ("jump", (), ())
    assert connection._parts("me@jump:2022") == ("jump", "me", 2022)
    assert connection._parts("[fd00::7]") == connection._parts("fd00::7") == ("fd00::7", (), ())
    assert connection._parts("fd00::7", with_port=False) == ("fd00::7", (), ())
    assert connection._parts("ssh://me@[fd00::7]:2022") == ("fd00::7", "me", 2022)


def test_what_a_program_wrote_before_its_connection_broke_is_not_the_reason():
    error = programs.failure(HOST, "m", NO_CONNECTION, b"a warning\n\ntimed out; check\n")
    assert str(error) == "beta: timed out; check"
