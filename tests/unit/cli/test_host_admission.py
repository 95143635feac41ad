import pytest

from pipespec.cli import host_admission, up
from pipespec.cli.invite import JoinOptions
from pipespec.cluster.host_link.host_session import HostSession
from pipespec.config.compose import compose
from pipespec.config.hosts import Host
from pipespec.errors import ConfigError, HostFailed


class Changes:
    """A cluster which another host leaves for a moment, too."""

    def __init__(self) -> None:
        self.problems = ["c: timed out", "c: timed out"]
        self.lost_names: list[str] = []

    def ranks_of(self, host: Host) -> str:
        return "layer 1 (rank 1)"

    def join(self, host: Host, tell: object, leaving: object) -> None:
        raise HostFailed("it was stopped")

    def over(self) -> bool:
        return bool(self.lost_names)

    def failure(self, name: str) -> str | None:
        return "it was stopped"

    def lost(self, name: str) -> None:
        if self.problems:
            raise HostFailed(self.problems.pop())
        self.lost_names.append(name)


@pytest.mark.parametrize("joined", [True, False])
def test_a_host_that_is_gone_is_taken_away_as_soon_as_the_others_can_go_on(monkeypatch, joined):
    monkeypatch.setattr(host_admission, "RETRY_S", 0.0)
    changes, lines = Changes(), list[str]()
    host_admission.look_after_host(
        HostSession("b", "10.0.0.2"),
        changes,
        patience_s=1e3,
        on_log=lambda _, line: lines.append(line),
        joined=joined,
    )
    assert changes.lost_names == ["b"]
    assert lines[-2].endswith("it was stopped")
    assert lines[-1] == "the others cannot go on without it yet: c: timed out"


def test_without_a_default_route_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(host_admission, "ANYWHERE", ())
    monkeypatch.setattr(up, "measured_problem", lambda *_: pytest.fail("hosts were measured"))
    with (
        pytest.raises(ConfigError, match="no default route, by which others could reach it"),
        up.planned(compose(), lambda _: None, measure=False, join_options=JoinOptions()),
    ):
        pass
