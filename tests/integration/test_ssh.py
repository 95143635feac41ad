"""Modules started on hosts through a real sshd, and what is said when that fails."""

import dataclasses
import json
import secrets
import subprocess
import sys

import pytest

from pipespec.cluster import ssh
from pipespec.config.hosts import Host, load_hosts
from tools.rig.testbed import Testbed, missing

if (lacking := missing()) is not None:
    pytest.skip(lacking, allow_module_level=True)

# Runs in host a: one call of `ssh.run` or `ssh.popen` as standard input describes it.
CALLER = """
import json, subprocess, sys, time
from pipespec import errors
from pipespec.cluster import ssh
from pipespec.config import hosts
call = json.load(sys.stdin)
host = hosts.Host(**call["host"])
start = time.monotonic()
try:
    answer = ssh.run_module(host, *call["words"], input=call["input"].encode(), timeout=30).decode()
except errors.HostFailed as failed:
    answer = f"HostFailed: {failed}"
print(json.dumps([answer, time.monotonic() - start]))
"""

# Runs in host a: a program that waits on another host. Says when it runs, and how it ended.
WAITER = """
import json, subprocess, sys, time
from pipespec.cluster import ssh
from pipespec.config import hosts
host = hosts.Host(**json.loads(sys.stdin.readline()))
pipe = subprocess.PIPE
words = "timeit", "-n1", "-r1", "print('runs', flush=True); input()"
with ssh.start_module(host, *words, stdin=pipe, stdout=pipe, stderr=pipe) as far:
    print(far.stdout.readline().decode(), end="", flush=True)
    sys.stdin.readline()
    start = time.monotonic()
    said = far.stderr.read()
    message = str(ssh.failure(host, "timeit", far.wait(), said))
    print(json.dumps([message, time.monotonic() - start]))
"""


@pytest.fixture(scope="module")
def bed():
    with Testbed(hosts=3) as bed:
        yield bed


@pytest.fixture(scope="module")
def beta(bed) -> Host:
    return load_hosts(bed.hosts_file()).host("b")


def described(host: Host) -> dict:
    return dataclasses.asdict(host)


def called(bed: Testbed, host: Host, *words: str, given: str = "") -> tuple[str, float]:
    """What `ssh.run` in host a returned or raised, and how many seconds it took."""
    call = {"host": described(host), "words": words, "input": given}
    done = bed.run("a", [sys.executable, "-c", CALLER], given=json.dumps(call))
    assert done.returncode == 0, done.stderr
    answer, seconds = json.loads(done.stdout)
    return answer, seconds


def test_a_module_runs_on_the_host_with_its_input_and_environment(bed, beta):
    host = dataclasses.replace(beta, env={"HF_HOME": 'it\'s "here" $HOME'})
    program = "import os, sys; print(os.environ['HF_HOME'], os.environ['SSH_CONNECTION'], input())"

    answer, _ = called(bed, host, "timeit", "-n", "1", "-r", "1", program, given="hello, world\n")

    connection = f"{bed.address('a')} "
    assert answer.startswith(f'it\'s "here" $HOME {connection}')
    assert f"{bed.address('b')} 22 hello, world" in answer


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"port": 2222}, "Connection refused; start sshd there, or set `port` of the host"),
        ({"user": "nobody"}, "Permission denied (publickey); let this user's key in with"),
        ({"address": "no.such.host.invalid"}, "correct `address` or `ssh` of the host"),
        ({"python": "/no/python"}, "/no/python"),
    ],
    ids=["port", "user", "address", "python"],
)
def test_what_is_wrong_is_said_with_a_remedy(bed, beta, changes, sentence):
    answer, _ = called(bed, dataclasses.replace(beta, **changes), "json.tool", given="{}")

    assert answer.startswith("HostFailed: b: ") and sentence in answer


def test_a_key_of_the_host_that_is_not_known_is_refused(bed, beta):
    known = bed.folder / "known_hosts"
    kept = known.read_text()
    try:
        known.write_text("")
        answer, _ = called(bed, beta, "json.tool", given="{}")
    finally:
        known.write_text(kept)

    assert "Host key verification failed; connect once by hand with `ssh root@10.77.0.2`" in answer


def test_a_host_behind_a_cut_link_is_given_up(bed, beta):
    bed.cut("a", "b")
    try:
        answer, seconds = called(bed, beta, "json.tool", given="{}")
    finally:
        bed.mend("a", "b")

    assert answer.startswith("HostFailed: b: ") and "timed out; check that the host is up" in answer
    assert seconds < ssh.CONNECT_TIMEOUT + 5


def test_a_link_that_is_cut_under_a_program_is_noticed(bed, beta):
    pipe = subprocess.PIPE
    waiter = bed.popen("a", [sys.executable, "-c", WAITER], stdin=pipe, stdout=pipe, text=True)
    with waiter:
        try:
            waiter.stdin.write(json.dumps(described(beta)) + "\n")
            waiter.stdin.flush()
            assert waiter.stdout.readline() == "runs\n"
            bed.cut("a", "b")
            said, seconds = json.loads(waiter.communicate("\n")[0])
        finally:
            waiter.kill()
            bed.mend("a", "b")

    assert said.startswith("b: Timeout, server 10.77.0.2 not responding; check the host")
    assert seconds < ssh.NOTICED_AFTER + 3


def test_no_command_line_shows_what_goes_through_standard_input(bed, beta):
    secret = secrets.token_hex()
    program = "import os; os.system('cat /proc/[0-9]*/cmdline 2> /dev/null')"

    answer, _ = called(bed, beta, "timeit", "-n1", "-r1", program, given=secret)

    assert program in answer and secret not in answer
