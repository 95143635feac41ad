import time
from contextlib import suppress
from pathlib import Path

import pytest

from pipespec.cluster.diagnostics.examine_hosts import STOP_TIMEOUT_S, Examination
from pipespec.config.hosts import Host, HostsFile
from pipespec.errors import HostFailed
from pipespec.system.versions import own_version
from tests.helpers.processes import is_alive

NAMES = ("a", "b", "c")


@pytest.fixture
def hosts(tmp_path: Path) -> HostsFile:
    """Hosts whose probes work on, whatever becomes of their input; each tells its pid."""
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\nread hello\necho $$ >> {tmp_path}/pids\n"
        f'echo \'{{"version": "{own_version()}"}}\'\n'
        "echo '{\"result\": null}'\nexec sleep 60\n"
    )
    python.chmod(0o755)
    each = {"ssh": "local", "python": str(python)}
    return HostsFile("lab", tuple(Host(name, "127.0.0.1", **each) for name in NAMES))


def pids(hosts: HostsFile) -> list[int]:
    return list(map(int, Path(hosts.hosts[0].python).with_name("pids").read_text().split()))


def test_hosts_are_waited_for_no_more_once_one_fails(hosts: HostsFile) -> None:
    """And with a signal, whose exception comes in the same way."""
    with suppress(HostFailed), Examination(hosts) as examination:
        for name in NAMES:
            examination.start(name)
        began = time.monotonic()
        raise HostFailed("b fails")
    assert time.monotonic() - began < STOP_TIMEOUT_S
    assert not any(map(is_alive, pids(hosts)))


def test_no_probe_starts_once_the_others_have_ended(hosts: HostsFile) -> None:
    with Examination(hosts) as examination:
        pass
    with pytest.raises(HostFailed, match="a: the examination has ended"):
        examination.start("a")


def test_a_probe_that_is_not_needed_any_more_holds_no_memory(hosts: HostsFile) -> None:
    with Examination(hosts) as examination:
        examination.start("a")
        examination.end("a")
        (pid,) = pids(hosts)
        assert not is_alive(pid)
