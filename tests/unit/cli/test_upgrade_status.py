"""What a launcher does about an upgrade that it cannot read or report."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from pipespec.cli.upgrade import carry_out_if_asked
from pipespec.client import upgrade_status
from pipespec.client.upgrade_status import HostUpgrade, UpgradePhase, UpgradeStatus
from pipespec.cluster.host_replacement import Replaced

REPLACED = Replaced("alpha", "2.0", 1.5)


class Cluster:
    """One whose only host has another version."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None):
        self.asked = 0
        self._meanwhile = meanwhile

    def replace_hosts(self, on_replaced: Callable[[Replaced], None]) -> None:
        self.asked += 1
        self._meanwhile()
        on_replaced(REPLACED)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    upgrade_status.write("lab", UpgradeStatus())


def begin(cluster: Cluster) -> None:
    carry_out_if_asked("lab", cluster)  # type: ignore[arg-type]


def test_a_launcher_does_what_a_newer_command_asks_for() -> None:
    file = upgrade_status.file_of("lab")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hosts": ["alpha"]}))
    cluster = Cluster()
    begin(cluster)
    done = (HostUpgrade("alpha", "2.0", 1.5),)
    assert upgrade_status.read("lab") == UpgradeStatus(UpgradePhase.OVER, done)
    begin(cluster)
    assert cluster.asked == 1


def test_a_damaged_status_ends_the_upgrade_alone(capsys: pytest.CaptureFixture[str]) -> None:
    upgrade_status.file_of("lab").write_text("{")
    cluster = Cluster()
    begin(cluster)
    assert cluster.asked == 0
    assert "lab: the upgrade ends: The file " in capsys.readouterr().err
    assert upgrade_status.read("lab") is None


def test_a_full_disk_ends_the_upgrade_alone(capsys: pytest.CaptureFixture[str]) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))

    cluster = Cluster(fill)
    try:
        begin(cluster)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert cluster.asked == 1
    assert "that has room" in capsys.readouterr().err
    assert upgrade_status.read("lab") is None
