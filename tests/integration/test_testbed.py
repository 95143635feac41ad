"""The test bed itself: its links delay, are shaped, cut and mended; nothing stays behind."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools.rig.testbed import Testbed, missing

DELAY_MS = 5.0
GBIT = 0.2

if (lacking := missing()) is not None:
    pytest.skip(lacking, allow_module_level=True)


@pytest.fixture(scope="module")
def bed():
    with Testbed(hosts=3, delay_ms=DELAY_MS, gbit=GBIT) as bed:
        yield bed


def namespaces(pid: int | None = None) -> set[str]:
    """Those that beds of this process, or of another, have now."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = {line.split()[0] for line in listed.stdout.splitlines()}
    return {name for name in names if name.startswith(f"pipespec-{pid or os.getpid()}-")}


def test_a_packet_takes_the_delay_each_way(bed):
    rtt = bed.measured_rtt_ms("a", "b")

    assert 2 * DELAY_MS <= rtt < 4 * DELAY_MS


def test_a_cut_link_loses_everything_and_the_others_carry_on(bed):
    bed.cut("a", "b")
    try:
        for ends in (("a", "b"), ("b", "a")):
            with pytest.raises(TimeoutError):
                bed.measured_rtt_ms(*ends)
        assert bed.measured_rtt_ms("a", "c") >= 2 * DELAY_MS
        assert bed.measured_rtt_ms("c", "b") >= 2 * DELAY_MS
    finally:
        bed.mend("b", "a")

    assert bed.measured_rtt_ms("a", "b") >= 2 * DELAY_MS


def test_a_connection_outlives_a_cut_that_is_mended(bed):
    with bed.socket("a") as listener, bed.socket("b") as client:
        listener.bind((bed.address("a"), 0))
        listener.listen()
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        with server:
            bed.cut("a", "b")
            client.sendall(b"in the dark")
            server.settimeout(10 * DELAY_MS / 1e3)
            with pytest.raises(TimeoutError):
                server.recv(100)
            bed.mend("a", "b")
            server.settimeout(30)
            assert server.recv(100) == b"in the dark"


def test_a_failed_start_leaves_nothing_behind(monkeypatch):
    before = namespaces()
    monkeypatch.setattr("tools.rig.sshd.MODULE", "no_such_module")
    bed = Testbed(hosts=2)

    with pytest.raises(RuntimeError, match=r"the SSH server at 10\.77\.0\.\d ended with 1"):
        bed.__enter__()

    assert namespaces() == before
    assert not bed.folder.exists()


def test_an_exception_leaves_nothing_behind():
    class Broken(Exception):
        pass

    before = namespaces()
    with contextlib.suppress(Broken), Testbed(hosts=2) as bed:
        waiting = bed.popen("b", ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        waiting.stdin.write(b"\n")
        assert waiting.stdout.read(1) == b"\n"
        running = bed.processes("a") + bed.processes("b")
        assert len(running) == 3 and waiting.pid in running
        raise Broken

    with waiting:
        assert waiting.wait() == -signal.SIGKILL
    assert namespaces() == before
    assert not bed.folder.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in running)


def test_a_bed_whose_owner_was_killed_removes_itself():
    program = (
        "import signal; from tools.rig.testbed import Testbed\n"
        "with Testbed(hosts=2) as bed:\n"
        "    print(bed.folder, bed.relay_pid, flush=True)\n"
        "    signal.pause()\n"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, text=True
    ) as owner:
        folder, relay_pid = owner.stdout.readline().split()
        relay = os.pidfd_open(int(relay_pid))  # no child of ours, so we cannot wait for it
        assert len(namespaces(owner.pid)) == 2
        owner.kill()

    ended, _, _ = select.select([relay], [], [], 30)
    os.close(relay)
    assert ended
    assert not namespaces(owner.pid)
    assert not Path(folder).exists()
