"""What a hub may do to a client, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from pipespec.engine.checkpoint.parts import range_source
from pipespec.engine.checkpoint.parts.range_source import (
    MAX_TRIES,
    HubSource,
    RangeSource,
    Unavailable,
)
from pipespec.errors import ModelError
from tests.helpers.hub import COMMIT, Fault, Hub, serving

NAME = "model.safetensors"
DATA = bytes(range(256)) * 400  # 100 KB


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    (tmp_path / NAME).write_bytes(DATA)
    (tmp_path / "config.json").write_text("{}")
    hub = Hub({"org/model": tmp_path})
    with serving(hub) as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "secret")
        yield hub


class Waits(list[float]):
    """Seconds that a client would have waited."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def client(hub: Hub, waits: Waits) -> HubSource:
    assert not hub.requests
    return HubSource("org/model", COMMIT, waits)


def read(client: HubSource, start: int = 1000, stop: int = 90_000) -> bytes:
    return read_file(client, NAME, start, stop, len(DATA))


def read_file(client: RangeSource, name: str, start: int, stop: int, size: int) -> bytes:
    found = bytearray()
    client.read(name, (start, stop), size, found.extend)
    return bytes(found)


@pytest.mark.parametrize("commit", ["../../../etc", "", "main", None])
def test_a_mirror_that_names_no_commit_is_refused(hub, client, commit):
    hub.commit = commit
    with pytest.raises(ModelError, match="names no commit of org/model; take another mirror"):
        client.revision()


def test_the_files_of_a_commit_with_sizes_and_hashes(client):
    found = client.revision()
    assert (found.repo, found.commit) == ("org/model", COMMIT)
    assert found.files[NAME].size == len(DATA)
    assert len(found.files[NAME].sha256) == 64
    assert found.files["config.json"].sha256 is None


def test_a_part_is_read_and_no_more(hub, client):
    assert read(client) == DATA[1000:90_000]
    assert hub.sent[NAME] == 89_000
    assert read_file(client, "config.json", 0, 2, 2) == b"{}"


def test_a_signed_url_is_used_again_and_gets_no_token(hub, client):
    hub.token = "secret"
    read(client, 0, 10), read(client, 10, 20)
    assert hub.requests == {"HEAD resolve": 1, "GET cdn": 2}
    assert hub.tokens_at_cdn == []


def test_an_expired_signed_url_is_resolved_anew(hub, client, waits):
    read(client, 0, 10)
    hub.expire()
    assert read(client, 10, 20) == DATA[10:20]
    assert len(waits) == 1


def test_a_cut_answer_goes_on_where_it_ended(hub, client):
    hub.faults = [Fault(cut_at=30_000), Fault(cut_at=1), Fault(cut_at=0)]
    assert read(client) == DATA[1000:90_000]
    assert [start for _, start, _ in hub.ranges] == [1000, 31_000, 31_001, 31_001]
    assert hub.sent[NAME] == 89_000  # nothing twice


LENGTHS = {
    "it sends the range": Fault(headers={"Content-Range": "bytes 0-88999/100000"}),
    "sends 89001 bytes where 89000 were asked for": Fault(change=lambda data: data + b"x"),
    "sends 88999 bytes where 89000 were asked for": Fault(change=lambda data: data[:-1]),
}


@pytest.mark.parametrize(
    ("faults", "least"),
    [
        ([Fault(429), Fault(500), Fault(503)], [0.375, 0.75, 1.5]),
        ([Fault(429, {"Retry-After": "17"}), Fault(429, {"Retry-After": "rubbish"})], [17, 0.75]),
        *(([fault], [0.375]) for fault in LENGTHS.values()),
    ],
)
def test_a_busy_or_wrong_answer_is_asked_for_again_later(hub, client, waits, faults, least):
    hub.faults = faults
    assert read(client) == DATA[1000:90_000]
    assert len(waits) == len(least)
    for each, at_least in zip(waits, least, strict=True):  # longer each time
        assert at_least <= each <= at_least * 5 / 3


@pytest.mark.parametrize(
    ("fault", "why", "tries"),
    [
        (Fault(429, {"Retry-After": "86400"}), "it answers 429", 1),
        (Fault(503), "it answers 503; check the network", MAX_TRIES),
        *((fault, why, MAX_TRIES) for why, fault in LENGTHS.items()),
    ],
)
def test_a_hub_that_stays_away_is_one_sentence(hub, client, waits, fault, why, tries):
    hub.faults = [fault] * MAX_TRIES
    with pytest.raises(Unavailable) as caught:
        read(client)
    assert len(waits) == tries - 1
    assert str(caught.value).startswith(
        f"{constants.ENDPOINT} (org/model) did not send {NAME}, though asked {tries} times: "
    )
    assert why in str(caught.value)


def test_a_hub_without_ranges_is_refused_without_reading_whole_files(hub, client):
    hub.without_ranges = True
    with pytest.raises(Unavailable, match="does not send parts of files"):
        read(client)
    assert read_file(client, "config.json", 0, 2, 2) == b"{}"


def test_a_slow_answer_times_out_and_is_asked_for_again(hub, client, monkeypatch):
    import threading

    monkeypatch.setattr(range_source, "READ_S", 0.2)
    slow = threading.Event()
    calls: list[int] = []

    def on_range() -> None:
        calls.append(1)
        if len(calls) == 1:
            slow.wait(20)

    hub.on_range = on_range
    assert read(client) == DATA[1000:90_000]
    assert len(calls) == 2
    slow.set()


def test_a_gated_model_names_the_token(hub, client):
    hub.token = "another"
    for ask in (client.revision, lambda: read(client)):
        with pytest.raises(ModelError, match=r"refuses org/model \(401\).* set HF_TOKEN"):
            ask()


@pytest.mark.usefixtures("hub")
def test_a_model_that_is_not_there():
    with pytest.raises(ModelError, match=r"org/other\) has no such model"):
        HubSource("org/other").revision()


def test_offline_nothing_is_asked_for(hub, client, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for ask in (client.revision, lambda: read(client)):
        with pytest.raises(Unavailable, match="HF_HUB_OFFLINE is set"):
            ask()
    assert not hub.requests


def test_no_hub_at_all(monkeypatch, waits):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    client = HubSource("org/model", COMMIT, waits)
    for ask in (client.revision, lambda: read(client)):
        with pytest.raises(Unavailable, match="check the network"):
            ask()


def test_reading_that_is_stopped_ends_at_once(hub, client):
    hub.faults = [Fault(503)]
    client.stopped.set()
    with pytest.raises(Unavailable, match="was stopped"):
        read(client)


def test_the_token_is_no_part_of_where_a_file_is(hub, client, monkeypatch):
    """Hosts without it are told a URL only where they need none."""
    assert f"/cdn/0/org/model/{NAME}" in client.signed_url(NAME)
    hub.signs = False
    client.located.clear()
    assert client.signed_url(NAME) is None
    client.located.clear()
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    assert f"/resolve/{COMMIT}/{NAME}" in client.signed_url(NAME)


def test_a_name_does_not_lead_out_of_the_repository(hub, client):
    hub.folders["org/other"] = hub.folders["org/model"]
    name = f"../../../other/resolve/{COMMIT}/{NAME}"
    with pytest.raises(ModelError, match="or not that file of it"):
        client.signed_url(name)


def test_another_host_reads_at_signed_urls_until_they_expire(hub, client, waits):
    other = RangeSource("the hub", {NAME: client.signed_url(NAME)}, wait=waits)
    assert read(other) == DATA[1000:90_000]
    assert hub.tokens_at_cdn == []
    hub.expire()
    with pytest.raises(Unavailable, match="refuses a signed URL"):
        read(other)


def test_too_many_bytes_are_dropped_and_asked_for_again(waits: Waits, monkeypatch) -> None:
    asked: list[tuple[int, int]] = []

    def answer(_file, part, _size, sink):
        asked.append(part)
        for chunk in (b"abcdef", b"ghijkl") if len(asked) == 1 else (b"ghij",):
            sink(chunk)

    source = RangeSource("beta", {}, wait=waits)
    monkeypatch.setattr(source, "_request", answer)
    assert read_file(source, NAME, 0, 10, 10) == b"abcdefghij"
    assert asked == [(0, 10), (6, 10)]
