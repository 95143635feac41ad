"""The options of `pipespec up --invite`, and what they are passed on as."""

from __future__ import annotations

import argparse

import pytest

from pipespec.cli.invite import JoinOptions, add_join_options, parse_place
from pipespec.errors import ConfigError


def parsed(*options: str) -> JoinOptions | None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--detach", action="store_true")
    add_join_options(parser)
    return JoinOptions.of(parser.parse_args(options))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("10.0.0.1", ("10.0.0.1", 0)),
        ("10.0.0.1:4000", ("10.0.0.1", 4000)),
        ("alpha.lan:4000", ("alpha.lan", 4000)),
        ("fd00::7", ("fd00::7", 0)),
        ("[fd00::7]:4000", ("fd00::7", 4000)),
    ],
)
def test_an_address_may_have_a_port(text: str, place: tuple[str, int]) -> None:
    assert parse_place(text) == place


@pytest.mark.parametrize("text", ["", ":4000", "10.0.0.1:http", "10.0.0.1:70000"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be an address of this machine"):
        parse_place(text)


def test_a_detached_cluster_gets_the_same_options_and_writes_no_token_to_its_log() -> None:
    wanted = parsed("--invite", "--at", "fd00::7")
    assert wanted == JoinOptions("fd00::7")
    passed_on = parsed(*wanted.flags)
    assert passed_on == JoinOptions("fd00::7", silent=True)


def test_without_invite_no_host_may_join() -> None:
    assert parsed() is None
    for option in (["--at", "10.0.0.1"], ["--hosts", "2"]):
        with pytest.raises(ConfigError, match="add --invite"):
            parsed(*option)


def test_a_cluster_that_waits_for_hosts_stays_in_the_foreground() -> None:
    with pytest.raises(ConfigError, match="leave --detach out"):
        parsed("--invite", "--detach", "--hosts", "2")
    with pytest.raises(ConfigError, match=r"--hosts is 0, but must be 1 to"):
        parsed("--invite", "--hosts", "0")
