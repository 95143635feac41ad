"""Random texts of mixed scripts, for tokenizers."""

import random
import string
import unicodedata

SCRIPTS = {
    "han": (0x4E00, 0x9FFF),
    "kana": (0x3041, 0x30FF),
    "hangul": (0xAC00, 0xD7A3),
    "greek": (0x370, 0x52F),
    "arabic": (0x600, 0x6FF),
    "indic": (0x900, 0xDF4),
    "emoji": (0x1F300, 0x1FAFF),
}
LAST = 0x3134A  # of the ideographs
# Those that the interpreter's Unicode does not know are left out, as each library knows another
# version of it.
KNOWN = [chr(number) for number in range(1, LAST) if unicodedata.category(chr(number)) != "Cn"]
USUAL = {"lower": [*string.ascii_lowercase], "digits": [*string.digits], "spaces": [" "]}
ALPHABETS = {
    **USUAL,
    "upper": [*string.ascii_uppercase],
    "signs": [*string.punctuation],
    "lines": ["\n", "\r"],
    **{
        name: [letter for letter in KNOWN if first <= ord(letter) <= last]
        for name, (first, last) in SCRIPTS.items()
    },
    **{
        category: [letter for letter in KNOWN if unicodedata.category(letter) == category]
        for category in sorted({*map(unicodedata.category, KNOWN)} - {"Cs", "Co", "Lo"})
    },
}
# Those that expressions name.
PIECES = (
    *("'s", "'T", "'re", "'VE", "'m", "'Ll", "'d", "'tis", "d'small", "don't", "WE'LL", "été"),
    *("\r\n", "\n\n", "  ", "    ", " \n ", "\t\n", "1234567", "00", "hello", "World"),
    *("HTTPServer", "camelCase", "<sentinel:12>", "IMGIMGABCZ", "👩‍👩‍👧", "...", "!!", "//", "/\n"),
    *("(x", " (", "$1", "`a`", "_b", "…。"),
    *("，、", "「日本」", "कि", "ạ̈", "ﷺ", "\u3000", " \u3000"),
    *("Ⅷ", "½", "٣٤", "a1", "1a", "x" * 9),
)
# A letter of ASCII is more usual than the whole of another alphabet.
WEIGHTS = [6 if name in USUAL else 2 for name in ALPHABETS]


def mixed_text(dice: random.Random) -> str:
    """Some runs of characters, each of one alphabet, with pieces in between."""
    found = []
    for _ in range(dice.randint(1, 12)):
        if dice.random() < 0.25:
            found.append(dice.choice(PIECES))
            continue
        (name,) = dice.choices(list(ALPHABETS), WEIGHTS)
        run = dice.choice((1, 1, 2, 3, 4, 7))
        found.append("".join(dice.choices(ALPHABETS[name], k=run)))
    return "".join(found)
