import string

import pytest

from pipespec.cluster.host_link.token import FINGERPRINT_BYTES, SECRET_BYTES, Token
from pipespec.errors import ConfigError

TOKEN = Token(
    "fd00::7", 40123, bytes(range(100, 100 + FINGERPRINT_BYTES)), bytes(range(SECRET_BYTES))
)
LETTERS = string.ascii_letters + string.digits + "-_"


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
