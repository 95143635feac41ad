"""Reading from another host directly, and through the launcher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pipespec.cluster.byte_channel import LocalChannel
from pipespec.cluster.weight_links import LinkFailed
from pipespec.cluster.weight_sources import RelayedSource
from pipespec.engine.checkpoint_parts.hub_client import Unavailable
from pipespec.engine.checkpoint_parts.parts_file import Range

DATA = bytes(range(100))
BROKE, REFUSED = LinkFailed("it broke", reached=True), LinkFailed("refused", reached=False)


class Link:
    """Sends ten bytes and then fails, as often as there are failures."""

    def __init__(self, *failures: Exception) -> None:
        self._failures = list(failures)
        self.reads, self.closed = 0, False

    def read(self, file: str, part: Range) -> Iterator[bytes]:
        self.reads += 1
        start, stop = part
        if not self._failures:
            yield DATA[start:stop]
            return
        yield DATA[start : start + 10]
        raise self._failures.pop(0)

    name = "beta"

    def stop(self) -> None:
        self.closed = True


class Launcher:
    """What the launcher is asked for."""

    def __init__(self) -> None:
        self.relayed: list[Range] = []
        self.told: list[dict[str, Any]] = []
        self.channel = LocalChannel({"read": self._read, "unreachable": self._unreachable})

    def _read(self, kind: str, source: str, file: str, start: int, stop: int) -> Iterator[bytes]:
        self.relayed.append((start, stop))
        yield DATA[start:stop]

    def _unreachable(self, **what: Any) -> None:
        self.told.append(what)


@pytest.fixture
def launcher() -> Launcher:
    return Launcher()


def read(source: RelayedSource) -> bytes:
    return b"".join(source.read("m.safetensors", (0, 100)))


def test_a_connection_that_breaks_is_replaced_once(launcher: Launcher) -> None:
    link = Link(BROKE)
    source = RelayedSource(launcher.channel, "target", "beta", link)
    assert read(source) == read(source) == DATA
    assert link.reads == 3
    assert not launcher.relayed
    assert not launcher.told


@pytest.mark.parametrize(
    ("failures", "at", "told"),
    [
        ([BROKE, BROKE], 20, [{"source": "beta", "why": "it broke", "reached": True}]),
        ([REFUSED], 10, [{"source": "beta", "why": "refused", "reached": False}]),
        ([BROKE, REFUSED], 20, [{"source": "beta", "why": "refused", "reached": False}]),
        ([Unavailable("offline")], 10, []),
    ],
    ids=str,
)
def test_then_the_launcher_reads_from_the_byte_that_was_reached(
    failures: list[Exception], at: int, told: list[dict[str, Any]], launcher: Launcher
) -> None:
    link = Link(*failures)
    source = RelayedSource(launcher.channel, "target", "beta", link)
    assert read(source) == read(source) == DATA
    assert launcher.relayed == [(at, 100), (0, 100)]
    assert launcher.told == told
    source.stop()  # other threads may still read from it
    assert link.closed


def test_a_source_that_was_stopped_asks_nobody(launcher: Launcher) -> None:
    source = RelayedSource(launcher.channel, "target", "beta", Link(BROKE))
    source.stop()
    with pytest.raises(Unavailable, match="reading from beta was stopped"):
        read(source)
    assert not launcher.relayed
    assert not launcher.told
