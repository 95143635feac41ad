"""The tokenizer in a GGUF file, as llama.cpp has it.

The file has tokens, their types, and merges or scores. Of how text is split before merges apply it
has a name (`gguf_splits`), and which tokens end a text is found by their texts. What is not read is
refused by the first bytes of the file (`refusal`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from pipespec.engine.formats.gguf_splits import SPLITS, Split

if TYPE_CHECKING:  # not needed if the tokenizer is cached
    from tokenizers import Tokenizer

# Kinds of vocabularies (`tokenizer.ggml.model`) that are read.
BYTE_PAIRS, SPELLED_PAIRS, SCORED = "gpt2", "gemma4", "llama"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # types of tokens
SPACE = "\u2581"
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
# What llama.cpp takes where a file of scores names none.
_USUAL_IDS = {"bos": 1, "eos": 2, "unknown": 0}
# Tokens that end a text, whatever the file says of them.
_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
    *("<｜end▁of▁sentence｜>", "<|ifm|im_end|>"),
}
# By the field that may name another: tokens between files and at their ends, of which one counts.
_FILE_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>", "<|plamo:file_separator|>"),
}
# Tokens around the text that is to be filled in.
_FILLS = {
    *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
    *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
    *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
    *("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    *("<|prefix|>", "<|suffix|>", "<|middle|>"),
}
_HARMONY = {"<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"}  # never text either
# If all tokens of one of these sets are ends, these are none, but of another type.
_NO_ENDS: dict[str, tuple[int, tuple[set[str], ...]]] = {
    "<|end|>": (
        _USER_DEFINED,
        (
            *({"<|return|>", "<|call|>"}, {"<|return|>", "<|calls|>"}),
            *({"<|flush|>", "<|call|>"}, {"<|flush|>", "<|calls|>"}),
        ),
    ),
    "</s>": (_NORMAL, ({"<|tool_response>"}, {"<|plamo:eos|>"})),
}

# The value of a field of the metadata; None: there is none.
Field = Callable[[str], Any]


def refusal(kind: Any, split: Any) -> str | None:
    """Why a tokenizer is not read, as a clause; None: it is. Given are the metadata
    `tokenizer.ggml.model` and `tokenizer.ggml.pre`."""
    if kind in (SCORED, SPELLED_PAIRS):
        return None
    if kind != BYTE_PAIRS:
        return (
            f"its vocabulary is of the kind {kind!r}; read are {BYTE_PAIRS}, {SPELLED_PAIRS} and "
            f"{SCORED}"
        )
    if split in SPLITS:
        return None
    return f"it splits text as {split!r}, which is not among the {len(SPLITS)} ways that are read"


def load_tokenizer(
    field: Field,
) -> tuple[Tokenizer, str | dict[str, str] | None, dict[str, str]]:
    """The tokenizer in a file, its chat template if it has one, or several by name, and the texts
    of special tokens by names such as `bos_token`. Raises ValueError if its kind is not read."""
    name = str(field("general.name")).lower()
    kind, named = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")
    if (why := refusal(kind, named)) is not None:
        raise ValueError(why)
    tokens = field("tokenizer.ggml.tokens")
    ids = {name: _id(field, name, len(tokens)) for name in _SPECIAL}
    special = {
        f"{_SPECIAL[name]}_token": tokens[number]
        for name, number in ids.items()
        if number is not None
    }
    types = dict(
        zip(tokens, field("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens), strict=False)
    )
    ending = {tokens[number] for number in ends(field)}
    controls = _ENDS | _FILLS | (ending & {*chain(*_FILE_ENDS.values())})
    types |= dict.fromkeys(types.keys() & controls, _CONTROL)
    types |= {token: _NO_ENDS[token][0] for token in types.keys() & _NO_ENDS.keys() - ending}
    for token in types.keys() & _HARMONY:
        types[token] = max(types[token], _CONTROL)
    if kind == SCORED:
        begins, always = True, False
        prefixed = field("tokenizer.ggml.add_space_prefix") is not False
        backend = scored(tokens, field("tokenizer.ggml.scores") or (), prefixed=prefixed)
    else:
        split = SPLITS[named if kind == BYTE_PAIRS else SPELLED_PAIRS]
        begins, always = split.begins, split.begins and split.raw
        backend = of_pairs(tokens, field("tokenizer.ggml.merges") or (), split)
    _add_whole(backend, types, strips=bool(re.search("phi-?3", name)))
    given, last = (field(f"tokenizer.ggml.add_{name}_token") for name in ("bos", "eos"))
    # Gemma 4's files say wrongly that it does not.
    first = begins if given is None or always else given
    enclose(
        backend,
        special.get("bos_token") if first else None,
        special.get("eos_token") if last else None,
    )
    template = field("tokenizer.chat_template") or field("tokenizer.chat_template.default")
    if for_tools := field("tokenizer.chat_template.tool_use"):
        template = {"tool_use": for_tools} | ({"default": template} if template else {})
    return backend, template, special


def ends(field: Field) -> list[int]:
    """The ids of the tokens that end a text."""
    tokens: Sequence[str] = field("tokenizer.ggml.tokens") or ()
    id_of = {token: number for number, token in enumerate(tokens)}
    found: set[int | None] = {id_of[token] for token in _ENDS & id_of.keys()}
    for name in ("eos", "eot", "eom"):
        found.add(_id(field, name, len(tokens)))
    for name, usual in _FILE_ENDS.items():
        number = _id(field, name, len(tokens))
        by_text = next((id_of[text] for text in usual if text in id_of), None)
        found.add(by_text if number is None else number)
    texts = {tokens[number] for number in found if number is not None}
    for token, (_, others) in _NO_ENDS.items():
        if any(each <= texts for each in others):
            texts.discard(token)
    return sorted(id_of[token] for token in texts)


def _id(field: Field, name: str, num_tokens: int) -> int | None:
    """A token that the file names, or that is usual; None: there is none."""
    number = field(f"tokenizer.ggml.{name}_token_id")
    if number is None and field("tokenizer.ggml.model") == SCORED:
        number = _USUAL_IDS.get(name)
    return number if number is not None and 0 <= number < num_tokens else None


def of_pairs(tokens: Sequence[str], merges: Sequence[str], split: Split) -> Tokenizer:
    """A tokenizer of merges; its tokens are spelled as GPT-2 spells bytes unless the split is
    raw."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers
    from tokenizers import pre_tokenizers as pre
    from tokenizers.models import BPE

    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = []
    for merge in merges:
        space = merge.find(" ", 1)
        pairs.append((merge[:space], merge[space + 1 :]))
    found = Tokenizer(
        BPE(vocabulary, pairs, ignore_merges=split.whole, byte_fallback=split.raw, fuse_unk=False)
    )
    if split.raw:
        found.normalizer = normalizers.Replace(" ", SPACE)
    pieces = [pre.Split(Regex(each), "isolated") for each in split.expressions]
    spelled = [] if split.raw else [pre.ByteLevel(add_prefix_space=False, use_regex=False)]
    found.pre_tokenizer = pre.Sequence([*pieces, *spelled])
    found.decoder = raw_decoder() if split.raw else decoders.ByteLevel()
    return found


def scored(tokens: Sequence[str], scores: Sequence[float], *, prefixed: bool) -> Tokenizer:
    """A tokenizer that joins the two neighbours whose token has the highest score. Each text, and
    what follows a special token, begins with a space if `prefixed`."""
    from tokenizers import Tokenizer, normalizers
    from tokenizers.decoders import Strip
    from tokenizers.models import BPE

    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = merges_by_score(dict(zip(tokens, scores, strict=False)), vocabulary)
    found = Tokenizer(BPE(vocabulary, merges, byte_fallback=True, fuse_unk=False))
    spaces = [normalizers.Prepend(SPACE)] if prefixed else []
    found.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)])
    found.decoder = raw_decoder(*([Strip(" ", 1, 0)] if prefixed else []))
    return found


def merges_by_score(score_of: Mapping[str, float], parts: Collection[str]) -> list[tuple[str, str]]:
    """The pairs of `parts` that become tokens with a score, those with the highest first."""
    merges = sorted(
        (-score, (token[:cut], token[cut:]))
        for token, score in score_of.items()
        for cut in range(1, len(token))
        if token[:cut] in parts and token[cut:] in parts
    )
    return [pair for _, pair in merges]


def raw_decoder(*last: Any) -> Any:
    from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence

    return Sequence([Replace(SPACE, " "), ByteFallback(), Fuse(), *last])


def _add_whole(backend: Tokenizer, types: Mapping[str, int], *, strips: bool) -> None:
    """Let tokens of the types that stand for themselves be found in any text. `strips`: most of
    them take the spaces that follow."""
    from tokenizers import AddedToken

    for kinds in ((_CONTROL, _UNKNOWN), (_USER_DEFINED,)):
        special = _CONTROL in kinds
        whole = [
            AddedToken(
                token,
                normalized=False,
                special=special,
                rstrip=strips and token not in ("<unk>", "<s>", "<|endoftext|>"),
            )
            for token, kind in types.items()
            if kind in kinds
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(whole)


def enclose(backend: Tokenizer, first: str | None, last: str | None) -> None:
    from tokenizers.processors import TemplateProcessing

    if used := [token for token in (first, last) if token is not None]:
        pieces = ([] if first is None else [first], ["$A"], [] if last is None else [last])
        backend.post_processor = TemplateProcessing(
            single=[*chain(*pieces)],
            special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(used)],
        )
