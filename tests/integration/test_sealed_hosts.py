"""What two hosts of a cluster send each other, as somebody on the cable between them sees it."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pipespec.client.model_info import ModelInfo
from pipespec.cluster.deployment import decide
from pipespec.config.compose import compose
from pipespec.system.network_interfaces import LOOPBACK
from tests.helpers.driver import Driver, leftovers
from tests.helpers.listening import listening
from tests.helpers.waiting import until
from tools.rig.driver import PROMPT
from tools.rig.testbed import Testbed, missing

if (lacking := missing()) is not None:
    pytest.skip(lacking, allow_module_level=True)

TOKENS = 32
AT = 8
GREEDY = [f"decode.max_new_tokens={TOKENS}", "sampling.temperature=0"]
SAMPLED = [f"decode.max_new_tokens={TOKENS}", "sampling.temperature=1", "sampling.seed=7"]
# The head and a stage, and two stages.
DEVICES = {"a": 2, "b": 2}
TCP = 6
LONGEST = 65535


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    with Testbed(hosts=2, delay_ms=0.1, gbit=10) as bed:
        yield bed


@contextmanager
def cluster(bed: Testbed, *settings: str) -> Iterator[Driver]:
    driver = Driver(bed, DEVICES, *settings)
    yield driver
    assert driver.end() == 0
    until(lambda: not any(leftovers(bed, host) for host in bed.hosts))


@contextmanager
def captured(bed: Testbed, ports: set[int]) -> Iterator[dict[tuple[int, int], bytearray]]:
    """What passes between the hosts to or from these TCP ports within the block, by the two ports
    of each connection and direction."""
    streams: dict[tuple[int, int], bytearray] = {}
    over = threading.Event()
    with bed.capture("b") as packets:
        packets.settimeout(0.1)

        def listen() -> None:
            while not over.is_set():
                try:
                    packet = packets.recv(LONGEST)
                except TimeoutError:
                    continue
                start = (packet[0] & 15) * 4
                if packet[9] != TCP:
                    continue
                source, target, *_, offset = struct.unpack_from("!HHIIB", packet, start)
                if ports & {source, target}:
                    payload = packet[start + (offset >> 4) * 4 :]
                    streams.setdefault((source, target), bytearray()).extend(payload)

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        try:
            yield streams
        finally:
            over.set()
            thread.join()


def links(driver: Driver) -> set[int]:
    """The ports at which ranks can be reached from other hosts."""
    bed = driver.bed
    pids = [pid for host in bed.hosts for pid in leftovers(bed, host)]
    return {each.port for each in listening(pids) if each.address != LOOPBACK}


def told(tokens: list[int], prompt_length: int, streams: dict[tuple[int, int], bytearray]) -> int:
    """How many of the tokens can be read there, each with its position as rows have them."""
    rows = [
        struct.pack("<qq", token, position) for position, token in enumerate(tokens, prompt_length)
    ]
    return sum(any(row in stream for stream in streams.values()) for row in rows)


@pytest.mark.long
def test_eavesdropper_between_hosts_reads_nothing_and_changes_no_text(bed: Testbed) -> None:
    found: dict[str, list[list[int]]] = {}
    readable = {}
    deployment = decide(compose(["cluster.devices=[cpu]"]))
    prompt = ModelInfo.of(deployment).encode(PROMPT)
    for seal in ("auto", "no"):
        with cluster(bed, f"transport.seal={seal}") as driver:
            warm = driver.ask(GREEDY)  # ranks that have joined may not be linked yet
            ports = links(driver)
            assert ports, "nothing links the hosts"
            with captured(bed, ports) as streams:
                texts = [driver.ask(GREEDY), driver.ask(SAMPLED)]
            assert sum(map(len, streams.values())) > 1000 * TOKENS
            readable[seal] = told(texts[0][:-1], len(prompt), streams)
            assert texts[0] == warm
            found[seal] = texts
            if seal == "auto":
                driver.ask(SAMPLED, AT)
                bed.alter("a", "b")
                driver.say({})
                answer = driver.hear("tokens")
                assert "from rank 1 was altered, repeated, reordered" in answer["faults"][-1]
                assert answer["tokens"] == texts[1]
    assert found["auto"] == found["no"]
    assert readable["auto"] == 0
    assert readable["no"] == TOKENS - 1, "the test would not see them"
