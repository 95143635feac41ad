"""The tokenizer in a GGUF file.

The file has tokens and merges, but of how text is split before they apply no more than a name
(`tokenizer.ggml.pre`). The expressions here are those that the models' own tokenizers have; a file
with another name is refused. (Transformers would split as GPT-2 does, and give special tokens that
are not of GPT-2's alphabet new ids.) What is not of pairs of bytes, Transformers builds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # not needed if the tokenizer is cached
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

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
_GPT2 = r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
SMOLLM = (r"\p{N}", _GPT2)
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
    "smollm": SMOLLM,
}
# Those in which a piece of text that is a token needs no merges.
WHOLE = ("llama-bpe", "llama3", "llama-v3", "glm4", "glm5", "tekken")


# Those that begin a text with the token for it where the file does not say so.
WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "tekken")
BYTE_LEVEL = "gpt2"
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}

# The value of a field `tokenizer.…` of the file; None: there is none.
Field = Callable[[str], Any]


def load_tokenizer(path: Path, field: Field) -> Any:
    """The tokenizer in a file, as one of Transformers.

    Raises ValueError if text is split in a way that is not known, and what Transformers raises.
    """
    from transformers import PreTrainedTokenizerFast

    if field("ggml.model") != BYTE_LEVEL:
        return PreTrainedTokenizerFast.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True
        )
    split = field("ggml.pre")
    if split not in SPLITS:
        raise ValueError(f"it splits text as {split!r}, and read are {', '.join(SPLITS)}")
    tokens = field("ggml.tokens")
    special = {
        f"{ours}_token": tokens[number]
        for theirs, ours in _SPECIAL.items()
        if (number := field(f"ggml.{theirs}_token_id")) is not None
    }
    backend = byte_level(tokens, field("ggml.merges") or (), field("ggml.token_type") or (), split)
    add_bos = field("ggml.add_bos_token")
    if add_bos or (add_bos is None and split in WITH_BOS):
        _begin_with(backend, special["bos_token"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=field("chat_template"), **special
    )


def byte_level(
    tokens: Sequence[str], merges: Sequence[str], types: Sequence[int], split: str
) -> Tokenizer:
    """A tokenizer of bytes and pairs; tokens are spelled as GPT-2 spells bytes, but for those of
    the types that stand for themselves."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import BPE

    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    found = Tokenizer(BPE(vocabulary, pairs, ignore_merges=split in WHOLE))
    found.pre_tokenizer = splitter(split)
    found.decoder = ByteLevel()
    whole = {
        kind: [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, of in zip(tokens, types, strict=False)
            if of == kind
        ]
        for kind in (_CONTROL, _USER_DEFINED)
    }
    found.add_special_tokens(whole[_CONTROL])
    found.add_tokens(whole[_USER_DEFINED])
    return found


def splitter(split: str) -> PreTokenizer:
    """What splits text in one of SPLITS, and spells its bytes."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    if not (expressions := SPLITS[split]):
        return ByteLevel(add_prefix_space=False)
    pieces = [Split(Regex(each), "isolated") for each in expressions]
    return Sequence([*pieces, ByteLevel(add_prefix_space=False, use_regex=False)])


def _begin_with(backend: Tokenizer, token: str) -> None:
    """Let texts begin with a special token."""
    from tokenizers.processors import TemplateProcessing

    number = backend.token_to_id(token)
    backend.post_processor = TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", token, "$B"], special_tokens=[(token, number)]
    )
