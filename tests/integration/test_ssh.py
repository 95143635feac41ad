"""Modules started on hosts through an SSH server, and what is said when that fails."""

import dataclasses
import getpass
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from pipespec.cluster.host_link import connection, programs
from pipespec.cluster.host_link.loop import NO_CONNECTION
from pipespec.config.hosts import Host
from pipespec.errors import HostFailed
from pipespec.system.network_interfaces import LOOPBACK
from tests.helpers.processes import PATIENCE_S, run_module
from tests.helpers.waiting import until
from tools.rig import sshd

PROGRAM = "import os, sys; print(os.environ['HF_HOME'], os.environ['SSH_CONNECTION'], input())"


class Server:
    """An SSH server of this machine, for the block's user, with a configuration that knows it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        sshd.make_keys(folder, [f"[{LOOPBACK}]:*", LOOPBACK])
        self.config = folder / sshd.CLIENT_CONFIG
        self.process, self.port = sshd.start(subprocess.Popen, folder, LOOPBACK, port=0)

    def host(self, **changes: object) -> Host:
        host = Host(
            "beta",
            LOOPBACK,
            port=self.port,
            identity=str(self.folder / "key"),
            python=sys.executable,
            env={"PYTHONPATH": str(sshd.ROOT)},
        )
        return dataclasses.replace(host, **changes)


@pytest.fixture
def server(tmp_path, monkeypatch):
    server = Server(tmp_path)
    monkeypatch.setenv(connection.CONFIG_VARIABLE, str(server.config))
    yield server
    server.process.kill()
    server.process.wait()
    server.process.stdout.close()


def run(host: Host, *words: str, given: bytes = b"") -> str:
    return run_module(host, *words, given=given).decode()


def test_a_module_runs_on_the_host_with_its_input_and_environment(server):
    host = server.host(env={"HF_HOME": 'it\'s "here" $HOME'})

    answer = run(host, "timeit", "-n", "1", "-r", "1", PROGRAM, given=b"hello, world\n")

    assert answer.startswith(f'it\'s "here" $HOME {LOOPBACK} ')
    assert f"{LOOPBACK} {server.port} hello, world" in answer


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"port": 1}, "Connection refused; start sshd there, or set `port` of the host"),
        ({"user": "nobody"}, "; let this user's key in with `ssh-copy-id nobody@127.0.0.1`"),
        ({"address": "no.such.host.invalid"}, "; correct `address` or `ssh` of the host"),
        ({"identity": "/no/key"}, "/no/key No such file or directory; try `ssh"),
        ({"python": "/no/python"}, "/no/python"),
        ({"python": "/bin/false"}, "json.tool ended with exit code 1"),
    ],
    ids=["port", "user", "address", "identity", "python", "exit code"],
)
def test_what_is_wrong_is_said_with_a_remedy(server, changes, sentence):
    began = time.monotonic()

    with pytest.raises(HostFailed) as failed:
        run(server.host(**changes), "json.tool", given=b"{}")

    assert str(failed.value).startswith("beta: ") and sentence in str(failed.value)
    assert str(failed.value).count("\n") == 0
    assert time.monotonic() - began < connection.LOGIN_TIMEOUT


@pytest.mark.parametrize("config", ["", "UserKnownHostsFile none\n", "StrictHostKeyChecking no\n"])
def test_a_key_of_the_host_that_is_not_known_is_refused(server, monkeypatch, config):
    monkeypatch.setenv("HOME", str(server.folder / "nobody"))
    server.config.write_text(config)

    with pytest.raises(HostFailed, match=r"is not trusted .*; connect once by hand with `ssh 127"):
        run(server.host(), "json.tool", given=b"{}")


def test_the_users_configuration_says_how_a_host_is_reached(server):
    """An alias with address, port and key, and a file of other known hosts; a key that is missing
    is passed over, as OpenSSH does."""
    server.config.write_text(
        f"Host lab\n  HostName {LOOPBACK}\n  Port {server.port}\n"
        f"  IdentityFile {server.folder}/missing\n  IdentityFile {server.folder}/key\n"
        f"  UserKnownHostsFile {server.folder}/missing {server.folder}/known_hosts\n"
        "  RemoteCommand false\n  RequestTTY yes\n  LocalForward 9000 localhost:9000\n"
    )

    assert run(server.host(ssh="lab", port=22, identity=None), "json.tool", given=b"[]") == "[]\n"


def test_the_users_own_files_count(server, monkeypatch):
    """`~/.ssh`, where no other configuration is named."""
    folder = server.folder / ".ssh"
    folder.mkdir()
    (folder / "config").write_text(f"Host lab\n  HostName {LOOPBACK}\n  Port {server.port}\n")
    for name, own in (("known_hosts", "known_hosts"), ("key", "id_ed25519")):
        (server.folder / name).rename(folder / own)
    monkeypatch.setenv("HOME", str(server.folder))
    monkeypatch.delenv(connection.CONFIG_VARIABLE)
    user = getpass.getuser()

    lab = server.host(ssh=f"{user}@lab", port=22, identity=None)

    assert run(lab, "json.tool", given=b"[]") == "[]\n"


def test_a_host_is_reached_through_a_jump_host(server):
    """Whose key must be known, too."""
    with server.config.open("a") as config:
        config.write(
            f"Host jump\n  HostName {LOOPBACK}\n  Port {server.port}\n"
            f"  IdentityFile {server.folder}/key\n"
            f"Host far\n  HostName {LOOPBACK}\n  ProxyJump jump\n"
        )
    far = server.host(ssh="far")

    # The server is at both ends: it sees its own address.
    assert f"{server.port} x" in run(
        dataclasses.replace(far, env={"HF_HOME": "h"}),
        "timeit",
        "-n1",
        "-r1",
        PROGRAM,
        given=b"x\n",
    )
    known = server.folder / "known_hosts"
    known.write_text(known.read_text().replace(LOOPBACK, "10.0.0.1"))
    with pytest.raises(HostFailed, match="is not trusted"):
        run(far, "json.tool", given=b"[]")


def test_a_key_of_the_agent_lets_in(server, monkeypatch):
    path = server.folder / "agent"
    agent = subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(path.exists)
        environment = {**os.environ, "SSH_AUTH_SOCK": str(path)}
        subprocess.run(["ssh-add", "-q", str(server.folder / "key")], env=environment, check=True)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        server.config.write_text(server.config.read_text().replace("IdentityAgent none\n", ""))
        monkeypatch.setenv("HOME", str(server.folder))
        assert run(server.host(identity=None), "json.tool", given=b"[]") == "[]\n"
    finally:
        agent.kill()
        agent.wait()


def test_a_key_that_is_encrypted_is_asked_of_nobody(server):
    path = str(server.folder / "secret")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "word", "-f", path], check=True)

    with pytest.raises(HostFailed, match="let this user's key in"):
        run(server.host(identity=path), "json.tool", given=b"{}")


def test_a_host_that_says_nothing_is_given_up(server, monkeypatch):
    monkeypatch.setattr(connection, "LOGIN_TIMEOUT", 1)
    with socket.create_server((LOOPBACK, 0)) as silent:
        host = server.host(port=silent.getsockname()[1])
        with pytest.raises(HostFailed, match="timed out; check that the host is up"):
            run(host, "json.tool", given=b"{}")


@pytest.fixture
def program(server):
    """A program on a host that has answered, and its errors."""
    words = "timeit", "-n1", "-r1", "print('runs', flush=True); input()"
    with tempfile.TemporaryFile() as errors:
        program = programs.start_module(server.host(), *words, stderr=errors)
        with program.stdin, program.stdout:
            assert program.stdout.readline() == b"runs\n"
            yield program, errors
            program.kill()


def test_a_silent_host_is_noticed(server, program):
    """Its server is stopped, as if its link were cut."""
    far, errors = program
    stop = threading.Timer(0, server.process.send_signal, [19])
    stop.start()
    began = time.monotonic()

    assert far.wait(PATIENCE_S) == NO_CONNECTION

    assert time.monotonic() - began < programs.NOTICED_AFTER + 3
    errors.seek(0)
    message = str(programs.failure(server.host(), "timeit", 255, errors.read()))
    assert message == "beta: Server not responding to keepalive; check the host and the link to it"
    server.process.send_signal(18)


def test_a_server_that_ends_ends_its_programs(server, program):
    far, errors = program
    server.process.kill()

    assert far.wait(PATIENCE_S) == NO_CONNECTION
    assert far.stdout.read() == b""
    errors.seek(0)
    assert b"; try `ssh 127.0.0.1` by hand" in errors.read()


def test_a_program_ends_with_the_launcher(server):
    """Which is killed."""
    code = (
        "import sys\n"
        "from pipespec.cluster.host_link import programs\n"
        "from pipespec.config.hosts import Host\n"
        f"host = {server.host()!r}\n"
        "far = programs.start_module(host, 'timeit', '-n1', '-r1', \n"
        "    'import os; print(os.getpid(), flush=True); input()', stderr=sys.stderr.buffer)\n"
        "print(far.stdout.readline().decode(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
    ) as launcher:
        far = int(launcher.stdout.readline())
        assert Path(f"/proc/{far}").exists()
        launcher.kill()
    until(lambda: not Path(f"/proc/{far}").exists(), PATIENCE_S)


def test_no_command_line_shows_what_goes_through_standard_input(server):
    secret = secrets.token_hex()
    look = "import os; os.system('cat /proc/[0-9]*/cmdline 2> /dev/null')"

    answer = run(server.host(), "timeit", "-n1", "-r1", look, given=secret.encode())

    assert look in answer and secret not in answer
