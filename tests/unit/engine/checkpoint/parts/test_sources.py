import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from pipespec.engine.checkpoint.parts import parts_file, sources
from pipespec.engine.checkpoint.parts.parts_file import PartsFile, Range
from pipespec.engine.checkpoint.parts.sources import (
    MAX_TRIES,
    HubSource,
    RangeSource,
    Unavailable,
    fetch,
)
from pipespec.errors import ModelError
from tests.helpers.hub import COMMIT, Fault, Hub, used

NAME = "model.safetensors"
DATA = bytes(range(256)) * 400  # 100 KB


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    (tmp_path / NAME).write_bytes(DATA)
    (tmp_path / "config.json").write_text("{}")
    hub = Hub({"org/model": tmp_path})
    monkeypatch.setenv("HF_TOKEN", "secret")
    with used(hub, tmp_path / "hub", monkeypatch):
        yield hub


@pytest.fixture
def client(hub: Hub, waits: list[float]) -> HubSource:
    assert not hub.requests
    source = HubSource("org/model", COMMIT)
    source.wait = waits.append
    return source


@pytest.fixture
def waits() -> list[float]:
    """Seconds that a client would have waited."""
    return []


def read(client: RangeSource, start: int = 1000, stop: int = 90_000) -> bytes:
    return bytes(client.read(NAME, (start, stop), len(DATA)))


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


def test_the_hub_redirects_to_a_signed_url_which_gets_no_token(hub, client):
    hub.token = "secret"
    assert read(client, 0, 10) + read(client, 10, 20) == DATA[:20]
    assert hub.requests == {"GET resolve": 2, "GET cdn": 2}
    assert hub.sent[NAME] == 20  # and no more than was asked for
    assert hub.tokens_at_cdn == []


WRONG = {
    "it sends the range": Fault(headers={"Content-Range": "bytes 0-88999/100000"}),
    "it sends more bytes than were asked for": Fault(change=lambda data: data + bytes(70_000)),
    "it ended the answer early": Fault(change=lambda data: data[:-1]),
}


@pytest.mark.parametrize(
    ("faults", "least"),
    [
        ([Fault(429), Fault(500), Fault(503)], [0.375, 0.75, 1.5]),
        ([Fault(429, {"Retry-After": "17"}), Fault(429, {"Retry-After": "rubbish"})], [17, 0.75]),
        ([Fault(429, {"RateLimit": '"resolvers";r=0;t=17'})], [17]),
        ([Fault(503, {"RateLimit": '"resolvers";r=9;t=17'})], [0.375]),  # it is not reached
        ([Fault(cut_at=30_000), Fault(cut_at=1), Fault(cut_at=0)], [0.375, 0.75, 1.5]),
        *(([fault], [0.375]) for fault in WRONG.values()),
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
        *((fault, why, MAX_TRIES) for why, fault in WRONG.items()),
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


def test_a_slow_answer_times_out_and_is_asked_for_again(hub, client, monkeypatch):
    monkeypatch.setattr(sources, "READ_S", 0.2)
    slow, calls = threading.Event(), []

    def on_range() -> None:
        calls.append(1)
        if len(calls) == 1:
            slow.wait(20)

    hub.on_range = on_range
    assert read(client) == DATA[1000:90_000]
    assert len(calls) == 2
    slow.set()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gated": ({"token": "another"}, r"refuses org/model \(401\).* set HF_TOKEN"),
    "absent": ({"folders": {}}, r"org/model\) has no such model"),
    "gone": ({"faults": [Fault(410)]}, r"refuses org/model \(410\); check the name and your"),
    "no ranges": ({"without_ranges": True}, "does not send parts of files"),
    "stopped": ({"faults": [Fault(503)]}, "was stopped"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_a_hub_refuses_is_one_sentence(why, hub, client):
    changes, message = REFUSED[why]
    for name, value in changes.items():
        setattr(hub, name, value)
    if why == "stopped":
        client.stopped.set()
    asked = [lambda: read(client)] + [client.revision] * (why in ("gated", "absent"))
    for ask in asked:
        with pytest.raises(ModelError, match=message):
            ask()
    if why == "no ranges":
        assert client.read("config.json", (0, 2), 2) == b"{}", "it is the whole file"


@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.usefixtures("hub")
def test_without_a_hub_nothing_is_waited_for_for_good(waits, offline, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    client = HubSource("org/model", COMMIT)
    client.wait = waits.append
    message = "HF_HUB_OFFLINE is set" if offline else "check the network"
    for ask in (client.revision, lambda: read(client)):
        with pytest.raises(Unavailable, match=message):
            ask()


def test_other_hosts_read_at_signed_urls_alone(hub, client, waits, monkeypatch):
    """They are given no token: where one is needed, they cannot read."""
    urls = client.signed_urls([NAME])
    assert f"/cdn/0/org/model/{NAME}" in urls[NAME]
    other = RangeSource("the hub", urls)
    other.wait = waits.append
    assert read(other) == DATA[1000:90_000]
    assert hub.tokens_at_cdn == []
    hub.expire()
    with pytest.raises(Unavailable, match="the hub answers 403"):
        read(other)
    hub.signs, hub.token = False, "secret"
    urls = client.signed_urls([NAME])
    assert f"/resolve/{COMMIT}/{NAME}" in urls[NAME]
    assert read(RangeSource("the hub", urls)) == DATA[1000:90_000]
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    with pytest.raises(Unavailable, match="the hub answers 401"):
        read(RangeSource("the hub", urls))


def test_the_token_goes_to_the_hub_alone(hub, client, monkeypatch):
    """Not to another port of its name either."""
    hub.signs, hub.token = False, "secret"
    other = RangeSource("the hub", client.signed_urls([NAME]))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(Unavailable, match="the hub answers 401"):
        read(other)


def test_a_name_does_not_lead_out_of_the_repository(hub, client):
    hub.folders["org/other"] = hub.folders["org/model"]
    with pytest.raises(ModelError, match="or not that file of it"):
        client.signed_urls([f"../../../other/resolve/{COMMIT}/{NAME}"])


class Beta:
    """A host that sends what it has, and fails at a byte."""

    name = "beta"

    def __init__(self, fails_at: int = len(DATA), error: type[ModelError] = Unavailable) -> None:
        self._fails_at, self._error = fails_at, error
        self.asked: list[Range] = []
        self.stopped = threading.Event()

    def read(self, file: str, part: Range, size: int) -> bytes:
        assert (file, size) == (NAME, 256)
        self.asked.append(part)
        if part[1] > self._fails_at:
            raise self._error("it broke")
        return DATA[slice(*part)]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PartsFile:
    monkeypatch.setattr(parts_file, "BLOCK_BYTES", 16)
    return PartsFile.create(tmp_path / NAME, 256)


@pytest.mark.parametrize(
    ("beta", "wanted", "error", "here"),
    [
        (Beta(), [1, 2, 5], "", [1, 2, 5]),
        # What came before a source was given up is kept.
        (Beta(fails_at=40), [0, 2], "it broke", [0]),
    ],
    ids=["all", "given up"],
)
def test_blocks_are_written_as_they_come(beta, wanted, error, here, own: PartsFile) -> None:
    found = fetch({beta: [(own, block) for block in wanted]})
    assert [*map(str, found.values())] == [error] * bool(error)
    again = PartsFile(own.path)
    assert [block for block in range(16) if again.has(block)] == here
    data = own.path.read_bytes()  # and nothing else is written
    assert data == b"".join(
        DATA[slice(*own.place(block))] if block in here else bytes(16) for block in range(16)
    )
    assert sorted(beta.asked) == [own.place(block) for block in wanted]


def test_a_source_that_refuses_ends_the_start(own: PartsFile) -> None:
    with pytest.raises(ModelError, match="it broke"):
        fetch({Beta(fails_at=0, error=ModelError): [(own, 0), (own, 1)]})
