"""Tokens and invitations: what is no whole one is refused, and each lets in one host."""

from __future__ import annotations

import string

import pytest

from pipespec.cluster.host_link.token import (
    FINGERPRINT_BYTES,
    SECRET_BYTES,
    Invitations,
    Refused,
    Token,
    fingerprint_of,
    key_of,
)
from pipespec.errors import ConfigError

TOKEN = Token(
    "fd00::7", 40123, bytes(range(100, 100 + FINGERPRINT_BYTES)), bytes(range(SECRET_BYTES))
)
LETTERS = string.ascii_letters + string.digits + "-_"


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_token_is_one_word_that_says_where_and_with_what() -> None:
    word = TOKEN.encode()
    assert set(word) <= set(LETTERS)
    assert Token.decode(f" {word}\n") == TOKEN
    assert TOKEN.secret.hex() not in repr(TOKEN)


def test_a_token_with_another_letter_anywhere_is_refused() -> None:
    word = TOKEN.encode()
    for place, letter in enumerate(word):
        for other in {LETTERS[(LETTERS.index(letter) + step) % len(LETTERS)] for step in (1, 13)}:
            with pytest.raises(ConfigError, match="no token"):
                Token.decode(word[:place] + other + word[place + 1 :])


@pytest.mark.parametrize("text", ["", "p", "é", TOKEN.encode()[:-1], TOKEN.encode() + "A", "p===="])
def test_what_is_not_a_whole_token_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError, match="copy the whole command") as caught:
        Token.decode(text)
    assert len(text) < 6 or text not in str(caught.value)


def test_the_key_of_a_secret_is_the_same_on_both_sides() -> None:
    assert key_of(TOKEN.secret) == key_of(TOKEN.secret)
    assert key_of(TOKEN.secret) != key_of(TOKEN.secret[::-1])


def test_an_invitation_lets_in_one_host() -> None:
    invitations = Invitations(Clock())
    key = fingerprint_of(key_of(invitations.make(60)))
    assert key in invitations
    invitations.use(key)
    with pytest.raises(Refused, match="used already"):
        invitations.use(key)


def test_an_invitation_expires_by_the_clock_of_the_launcher() -> None:
    clock = Clock()
    invitations = Invitations(clock)
    early, late = (fingerprint_of(key_of(invitations.make(60))) for _ in range(2))
    clock.now = 59.9
    invitations.use(early)
    clock.now = 60.0
    with pytest.raises(Refused, match="has expired"):
        invitations.use(late)


def test_a_secret_of_another_cluster_is_not_known() -> None:
    assert fingerprint_of(key_of(TOKEN.secret)) not in Invitations(Clock())
