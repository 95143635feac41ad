"""The address of the launcher's machine towards its hosts."""

from __future__ import annotations

import socket

import pytest

from pipespec.cluster.redis_setup import own_address
from pipespec.config.hosts import Host
from pipespec.errors import ConfigError


def test_hosts_with_addresses_of_ipv6_alone_are_reached_over_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def source_address(address: str, family: int = socket.AF_UNSPEC) -> str:
        if family == socket.AF_INET or address == "fd00::3":
            raise OSError(-9, "Address family for hostname not supported")
        return "fd00::1"

    monkeypatch.setattr("pipespec.cluster.redis_setup.source_address", source_address)
    assert own_address([Host("b", "fd00::2")]) == "fd00::1"
    with pytest.raises(ConfigError, match="no route to fd00::3"):
        own_address([Host("b", "fd00::3")])


def test_ipv4_comes_first_and_a_lone_machine_has_none() -> None:
    assert own_address([Host("b", "127.0.0.2")]) == "127.0.0.1"
    assert own_address([]) is None
