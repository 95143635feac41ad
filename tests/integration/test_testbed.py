"""The test bed itself: its links delay, are shaped, cut and mended; nothing stays behind."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tools.rig.testbed import missing

if (lacking := missing()) is not None:
    pytest.skip(lacking, allow_module_level=True)


def namespaces(pid: int | None = None) -> set[str]:
    """Those that beds of this process, or of another, have now."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = {line.split()[0] for line in listed.stdout.splitlines()}
    return {name for name in names if name.startswith(f"pipespec-{pid or os.getpid()}-")}


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
