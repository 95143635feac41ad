"""Random texts of mixed scripts, for tokenizers."""

from __future__ import annotations

import random
import unicodedata

# Ranges of code points; those that the interpreter's Unicode does not know are left out, as each
# library knows another version of it.
_RANGES = {
    "lower": [(0x61, 0x7A)],
    "upper": [(0x41, 0x5A)],
    "latin": [(0xAA, 0x24F), (0x1E00, 0x1EFF), (0x2C60, 0x2C7F)],
    "digits": [(0x30, 0x39)],
    "numbers": [(0xB2, 0xBE), (0x660, 0x669), (0x966, 0x96F), (0x2150, 0x218B), (0x2460, 0x249B)],
    "marks": [(0x300, 0x36F), (0x483, 0x489), (0x610, 0x61A), (0x64B, 0x65F), (0x20D0, 0x20F0)],
    "cjk": [(0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2E80, 0x2FD5)],
    "compatible": [(0xF900, 0xFAD9), (0x2F800, 0x2FA1D), (0x30000, 0x3134A)],
    "kana": [(0x3041, 0x30FF), (0x31F0, 0x31FF), (0xFF65, 0xFF9F)],
    "wide": [(0x3000, 0x303F), (0xFE30, 0xFE4F), (0xFF01, 0xFF64), (0x3105, 0x312F)],
    "hangul": [(0xAC00, 0xD7A3), (0x1100, 0x11FF), (0x3131, 0x318E), (0xD7B0, 0xD7FB)],
    "greek": [(0x370, 0x52F), (0x1F00, 0x1FFE)],
    "cased": [
        (0x531, 0x58A),
        (0x10A0, 0x10FF),
        (0x13A0, 0x13FD),
        (0x1C80, 0x1CBF),
        (0xA640, 0xA7CA),
    ],
    "beyond": [(0x10400, 0x1044F), (0x1D400, 0x1D7FF), (0x1E900, 0x1E95F), (0x16E40, 0x16E7F)],
    "arabic": [(0x600, 0x6FF), (0xFB50, 0xFDFF)],
    "hebrew": [(0x591, 0x5F4)],
    "indic": [(0x900, 0xDF4)],
    "asian": [
        (0xE01, 0xFDA),
        (0x1000, 0x109F),
        (0x1780, 0x17F9),
        (0xA9E0, 0xA9FE),
        (0xAA60, 0xAA7F),
    ],
    "emoji": [(0x1F300, 0x1FAFF), (0x2600, 0x27BF), (0xFE0F, 0xFE0F), (0x200D, 0x200D)],
    "signs": [(0x21, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x7B, 0x7E)],
    "dashes": [(0xA1, 0xBF), (0x2010, 0x2027), (0x2030, 0x205E), (0x20A0, 0x23FF)],
    "spaces": [(0x20, 0x20)],
    "blanks": [(0x9, 0xD), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)],
    "more blanks": [(0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)],
    "lines": [(0xA, 0xA), (0xD, 0xD)],
    "controls": [(0x1, 0x1F), (0x7F, 0x9F), (0x200B, 0x200F), (0xFEFF, 0xFEFF), (0xE000, 0xE010)],
}
ALPHABETS = {
    name: [
        chr(number)
        for first, last in ranges
        for number in range(first, last + 1)
        if unicodedata.category(chr(number)) != "Cn"
    ]
    for name, ranges in _RANGES.items()
}
# Those that expressions name.
_PIECES = (
    *(
        "'s",
        "'T",
        "'re",
        "'VE",
        "'m",
        "'Ll",
        "'d",
        "'tis",
        "d'small",
        "don't",
        "WE'LL",
        "\r\n",
        "\n\n",
        "  ",
    ),
    *("    ", " \n ", "\t\n", "1234567", "00", "hello", "World", "HTTPServer", "camelCase", "été"),
    *(
        "<sentinel:12>",
        "IMGIMGABCZ",
        "👩‍👩‍👧",
        "...",
        "!!",
        "//",
        "/\n",
        "(x",
        " (",
        "$1",
        "`a`",
        "_b",
    ),
    *(
        "…。",
        "，、",
        "「日本」",
        "कि",
        "ạ̈",
        "ﷺ",
        "\u3000",
        " \u3000",
        "Ⅷ",
        "½",
        "٣٤",
        "a1",
        "1a",
        "x" * 9,
    ),
)
# A letter of ASCII is more usual than the whole of another alphabet.
_WEIGHTS = [6 if name in ("lower", "spaces", "digits") else 2 for name in ALPHABETS]


def mixed_text(dice: random.Random) -> str:
    """Some runs of characters, each of one alphabet, with pieces in between."""
    found = []
    for _ in range(dice.randint(1, 12)):
        if dice.random() < 0.25:
            found.append(dice.choice(_PIECES))
            continue
        (name,) = dice.choices(list(ALPHABETS), _WEIGHTS)
        run = dice.choice((1, 1, 2, 3, 4, 7))
        found.append("".join(dice.choices(ALPHABETS[name], k=run)))
    return "".join(found)
