"""The options of `pipespec up --invite`, and what they are passed on as."""

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
    assert parsed() is None
    passed_on = parsed(*wanted.flags)
    assert passed_on == JoinOptions("fd00::7", silent=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--at 10.0.0.1", "add --invite"),
        ("--hosts 2", "add --invite"),
        ("--invite --detach --hosts 2", "leave --detach out"),
        ("--invite --hosts 0", "--hosts is 0, but must be 1 to"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parsed(*options.split())
