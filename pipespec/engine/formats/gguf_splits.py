"""How llama.cpp splits text, by the name in a GGUF file (`tokenizer.ggml.pre`).

Each name has expressions that cut one after the other, each within the pieces of those before. They
are llama.cpp's, written for Oniguruma. Where they are not those of the model's own tokenizer, a
comment says so; the files are made for llama.cpp, so it counts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """How text is split.

    Attributes:
        expressions: they cut one after the other.
        whole: a piece that is a token needs no merges.
        begins: a text begins with the token for it, unless the file says otherwise.
        raw: pieces are spelled as they are, spaces as U+2581, and not as GPT-2 spells bytes.
    """

    expressions: tuple[str, ...]
    whole: bool = False
    begins: bool = False
    raw: bool = False


_SUFFIX = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_SPACES = r"\s+(?!\S)|\s+"
_REST = rf"\s*[\r\n]+|{_SPACES}"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_SPACED = r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_KANA = r"\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}"
_HAN = (
    r"\x{3400}-\x{4DBF}\x{4E00}-\x{9FFF}\x{F900}-\x{FAFF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}"
    r"\x{2F800}-\x{2FA1F}"
)
# Digits in threes from the last one on; the first of them stay with the text before, unlike in the
# models' own tokenizers.
_THREES = r"[^\p{N}]*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_LINES = r"[^\n]+|\n+"
_ASCII_SIGN = r"[!-/:-@\[-`{-~][A-Za-z]+"
_PUNCTUATED = (
    rf"{_ASCII_SIGN}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+%s|%s"
)
# Cased letters of Unicode 9, as DeepSeek's first tokenizer lists them.
_CASED = (
    r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8A}\x{2D00}-\x{2D2D}"
    r"\x{A790}-\x{A7FA}\x{AB30}-\x{AB68}\x{10570}-\x{105BC}\x{16E40}-\x{1DF2F}]]"
)
_EAST_ASIAN = r"[[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]&&\S]+"


def _words(digits: str, word: str = _WORD, signs: str = _SIGNS, rest: str = _REST) -> str:
    return rf"{_SUFFIX}|{word}|\p{{N}}{digits}|{signs}|{rest}"


def _cased(suffix: str, digits: str, letters: str = r"\p{L}") -> str:
    # Letters beyond ASCII count as of both cases, and most marks as none; in the models' own
    # tokenizers letters count by their case, and marks as of both.
    upper, lower = rf"[{letters}&&[^a-z]]", rf"[{letters}&&[^A-Z]]"
    begin = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{begin}{upper}*{lower}+{suffix}|{begin}{upper}+{lower}*{suffix}|\p{{N}}{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
    )


def _one_case(digits: str) -> str:
    # No letter's case counts, unlike in the models' own tokenizers.
    return rf"{_MARKED}(?:{_SUFFIX})?|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"


GPT_2 = r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DIGITS = r"\p{N}", GPT_2
_FALCON = r"[\p{P}$+<=>^~|`]+", GPT_2, "[0-9][0-9][0-9]"
_LLAMA_3, _QWEN_2 = _words("{1,3}"), _words("")
_GPT_4O = _cased(f"(?:{_SUFFIX})?", "{1,3}")
_GRANITE = _cased(f"(?:{_SUFFIX})?", "{1,3}", r"[\p{L}\p{M}]")
_POEM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"
_DEEPSEEK_3 = r"\p{N}{1,3}", f"[{_KANA}]+", _PUNCTUATED % (r"[\r\n]*", _REST)
_SHRINKING = "|".join(rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1))
_SCRIPTS = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}"
    r"\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+"
    rf"|[\x{{3105}}-\x{{312F}}]+|[{_KANA}]+"
)
# Moonshot's own cuts words by their case too, and counts marks as letters.
_KIMI = (
    rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+(?:{_SUFFIX})?|\p{{N}}{{1,3}}"
    rf"|{_SIGNS}|{_REST}"
)
# The model's own begins the compatibility ideographs at U+F900, and not within 4E00 to FAFF.
_ASIAN = (
    r"[\x{3400}-\x{4DBF}\x{4E00}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-"
    r"\x{2FDF}\x{E40}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{1100}-\x{11FF}]+"
)

_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?{_CASED}+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3001}\x{3002}]+",
    r"\s+\z",
    _EAST_ASIAN,
    r"\p{N}+",
)
_CODER = r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"
_SPARK = (*_DEEPSEEK_3[:2], _PUNCTUATED % ("", rf"[\r\n]|{_SPACES}"), r"\p{N}")
_IMAGES = "<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  "
_CHAMELEON = (*_IMAGES, r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", GPT_2)

# Names, expressions, and which of `Split`'s attributes hold.
_TABLE: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion", (GPT_2,), ""),
    ("granite-docling modern-bert roberta-bpe jina-es jina-de jina-v2-es", (GPT_2,), ""),
    ("jina-v2-de jina-v1-en jina-v2-code", (GPT_2,), ""),
    ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral", (_LLAMA_3,), "whole begins"),
    ("midm-2.0 lfm2 jina-v5-nano", (_LLAMA_3,), "whole begins"),
    ("dbrx smaug-bpe chatglm-bpe", (_LLAMA_3,), ""),
    ("glm4 glm5", (_LLAMA_3,), "whole"),
    ("minicpm5", (r"\p{N}{1,3}", _words("+")), "whole"),
    ("jais-2", (_words("{1,3}", rest=rf"\s*[\r\n]+|{_SHRINKING}|\s{{1,2}}(?!\S)|\s"),), ""),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan", (_QWEN_2,), ""),
    ("solar-open grok-2 bailingmoe bailingmoe2 llada-moe", (_QWEN_2,), ""),
    ("qwen35", (_words("", _MARKED, r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),), ""),
    ("laguna", (_LINES, _QWEN_2), ""),
    ("ufakzeka", (rf"{_WORD}|\p{{N}}|{_SIGNS}|{_REST}",), ""),
    ("seed-coder", (_words("", signs=r" ?[^\s\p{L}\p{N}\r\n]+"),), ""),
    ("exaone-moe", (_words("", _SPACED, r" ?[^\s\p{L}\p{N}]+[\r\n/]?"),), ""),
    ("tekken", (_cased("", ""),), "whole begins"),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", (_GPT_4O,), ""),
    ("granite-embed-multi-97m", (_GRANITE,), "whole"),
    ("tiny_aya cohere2moe", (_THREES, _one_case("{1,3}")), ""),
    ("youtu", (_SCRIPTS, _one_case("")), "whole"),
    ("kimi-k2", (_KIMI,), ""),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", _DIGITS, ""),
    ("falcon", _FALCON, ""),
    ("default", (_FALCON[0].replace("`", ""), GPT_2, r"\p{N}+", _FALCON[2]), ""),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK_3, ""),
    ("spark2_5", _SPARK, ""),
    ("afmoe", (_THREES, _ASIAN, _DEEPSEEK_3[2]), ""),
    ("deepseek-llm", _DEEPSEEK, ""),
    ("deepseek-coder", _CODER, ""),
    ("poro-chat bloom gpt3-finnish", (_POEM,), ""),
    ("viking", (_POEM, r"\p{N}"), ""),
    ("chameleon", _CHAMELEON, "begins"),
    ("superbpe", (r"\p{N}+", "(?=(?:[0-9]{3})+(?![0-9]))"), ""),
    ("gemma4 granite-embed-multi-311m", (_LINES,), "begins raw"),
    ("sarvam-moe", (_LINES,), "raw"),
)
SPLITS = {
    name: Split(expressions, **dict.fromkeys(flags.split(), True))
    for names, expressions, flags in _TABLE
    for name in names.split()
}
