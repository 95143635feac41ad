"""The tokenizer in a GGUF file, as Transformers builds it.

The file has tokens and merges, but of how text is split before they apply no more than a name
(`tokenizer.ggml.pre`). Transformers splits as GPT-2 does where it does not know the name; here such
a file is refused, and the expressions are those that the models' own tokenizers have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

# GPT-2 has an expression of its own, which Transformers knows.
GPT2: tuple[str, ...] = ()
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_REST}"
)
LLAMA_3 = (_WORDS % "{1,3}",)
QWEN_2 = (_WORDS % "",)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    rf"|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_REST}"
)
TEKKEN = (_CASED % ("", "", ""),)
GPT_4O = (_CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}"),)
DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*{_REST}"
    ),
)
# By the name in the file.
SPLITS = {
    "gpt-2": GPT2,
    "llama-bpe": LLAMA_3,
    "llama3": LLAMA_3,
    "llama-v3": LLAMA_3,
    "qwen2": QWEN_2,
    "deepseek-r1-qwen": QWEN_2,
    "chatglm-bpe": LLAMA_3,
    "glm4": LLAMA_3,
    "glm5": LLAMA_3,
    "tekken": TEKKEN,
    "gpt-4o": GPT_4O,
    "llama4": GPT_4O,
    "deepseek-v3": DEEPSEEK_3,
}
# Those in which a piece of text that is a token needs no merges.
WHOLE = ("llama-bpe", "llama3", "llama-v3", "glm4", "glm5", "tekken")


def load_tokenizer(path: Path, model: str | None, split: str | None) -> Any:
    """The tokenizer in a file, whose metadata name this model of tokenizer and this way to split.

    Raises ValueError if text is split in a way that is not known, and what Transformers raises.
    """
    from transformers import PreTrainedTokenizerFast

    if model == "gpt2" and split not in SPLITS:
        raise ValueError(f"it splits text as {split!r}, and read are {', '.join(SPLITS)}")
    found = PreTrainedTokenizerFast.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True
    )
    if model == "gpt2":
        set_split(found.backend_tokenizer, str(split))
    return found


def set_split(backend: Any, split: str) -> None:
    """Let a byte-pair tokenizer of the package `tokenizers` split text in one of SPLITS."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    if expressions := SPLITS[split]:
        pieces = [Split(Regex(each), "isolated") for each in expressions]
        bytes_alone = ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = Sequence([*pieces, bytes_alone])
    backend.model.ignore_merges = split in WHOLE
