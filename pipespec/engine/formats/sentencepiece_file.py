"""The tokenizer in a SentencePiece model (`tokenizer.model`), of BPE or of unigrams.

Transformers reads its pieces, but not how it treats spaces. The ids are those of SentencePiece, but
where two orders of the same unigrams are equally probable, as of `aa` and `a`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pipespec.engine.formats.gguf_tokenizer import SPACE, enclose, merges_by_score, raw_decoder
from pipespec.engine.formats.safetensors_headers import read_json

if TYPE_CHECKING:  # not needed if the tokenizer is cached
    from tokenizers import Tokenizer

_ALL = 1 << 30  # more spaces than any text has
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5


def read(path: Path) -> Any:
    """The model in a file; None: it is no model of SentencePiece, such as a list of tiktoken."""
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError:
        return None
    return model if model.pieces else None


def refusal(model: Any) -> str | None:
    """Why a model is not read, as a clause; None: it is."""
    trained, normal = model.trainer_spec, model.normalizer_spec
    for wrong, why in (
        (trained.model_type not in (_UNIGRAM, _BPE), "is of words or characters"),
        (trained.treat_whitespace_as_suffix, "has spaces at the ends of words"),
        (not normal.escape_whitespaces, "keeps spaces as they are"),
        # The package tokenizers normalizes some combined characters otherwise.
        (normal.precompiled_charsmap, "normalizes characters"),
        (model.denormalizer_spec.precompiled_charsmap, "changes characters when it decodes"),
        (any(piece.type == _UNUSED for piece in model.pieces), "has pieces that are not used"),
    ):
        if wrong:
            return f"its SentencePiece model {why}, which is not read"
    return None


def build(model: Any, *, prefixed: bool, everywhere: bool) -> Tokenizer:
    """The tokenizer of a model. A text begins with a space if `prefixed` and the model says so,
    and what follows a special token too if `everywhere`. Raises ValueError."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers
    from tokenizers import pre_tokenizers as pre
    from tokenizers.decoders import Strip

    if (why := refusal(model)) is not None:
        raise ValueError(why)
    trained, normal, pieces = model.trainer_spec, model.normalizer_spec, model.pieces
    symbols = [piece.piece for piece in pieces if piece.type == _USER_DEFINED]
    cuts: list[Any] = []
    if trained.model_type == _UNIGRAM:
        best = max(0.0, *(piece.score for piece in pieces if piece.type == _NORMAL))
        scores = [  # as SentencePiece's own search has those of symbols
            len(piece.piece.encode()) * best - 0.1 if piece.type == _USER_DEFINED else piece.score
            for piece in pieces
        ]
        unknown = next(at for at, piece in enumerate(pieces) if piece.type == _UNKNOWN)
        named = [(piece.piece, score) for piece, score in zip(pieces, scores, strict=True)]
        found = Tokenizer(models.Unigram(named, unknown, trained.byte_fallback))
    else:
        vocabulary = {piece.piece: at for at, piece in enumerate(pieces)}
        joined = {piece.piece: piece.score for piece in pieces if piece.type == _NORMAL}
        found = Tokenizer(
            models.BPE(
                vocabulary,
                merges_by_score(joined, joined.keys()),
                unk_token=next(piece.piece for piece in pieces if piece.type == _UNKNOWN),
                fuse_unk=True,
                byte_fallback=trained.byte_fallback,
                ignore_merges=bool(symbols),  # symbols are made of no merges
            )
        )
        if symbols:
            whole = "|".join(map(re.escape, sorted(symbols, key=len, reverse=True)))
            cuts.append(pre.Split(Regex(whole), "isolated"))
    # The text of a byte's piece is no such piece.
    cuts.append(pre.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "merged_with_previous"))
    steps: list[Any] = []
    prefixed, trimmed = prefixed and normal.add_dummy_prefix, normal.remove_extra_whitespaces
    if trimmed:  # a first space may stand for the one that is added
        first = "" if prefixed else r"\A +|"
        steps.append(normalizers.Replace(Regex(rf"{first}[ {SPACE}]+\z|(?<= ) +"), ""))
    space = Regex(r"(?<!\A) ") if prefixed and trimmed else " "
    found.normalizer = normalizers.Sequence([*steps, normalizers.Replace(space, SPACE)])
    if prefixed:  # in two steps, as it adds none before a text that begins with its mark
        first = "always" if everywhere else "first"
        cuts[:0] = [pre.Metaspace(" ", first, False), pre.Metaspace(SPACE, "never", False)]
    found.pre_tokenizer = pre.Sequence(cuts)
    found.decoder = raw_decoder(Strip(" ", _ALL if trimmed else int(prefixed), 0))
    found.add_special_tokens(
        [
            AddedToken(piece.piece, normalized=False)
            for piece in pieces
            if piece.type in (_UNKNOWN, _CONTROL)
        ]
    )
    return found


def with_settings(model: Any, theirs: Any, folder: Path) -> Any:
    """The tokenizer of a model, with the special tokens, template and settings of that which
    Transformers makes of the same folder. Raises ValueError, and ModelError."""
    found = build(
        model,
        prefixed=getattr(theirs, "add_prefix_space", None) is not False,
        everywhere=getattr(theirs, "legacy", False) is True,
    )
    symbols = {piece.piece for piece in model.pieces if piece.type == _USER_DEFINED}
    for _, token in sorted(theirs.added_tokens_decoder.items()):
        if token.content in symbols and not token.special:
            continue  # the model finds it itself
        (found.add_special_tokens if token.special else found.add_tokens)([token])
    # Transformers gives a token another id than the folder does without an error.
    for content, number in _stated_ids(folder):
        if found.token_to_id(content) != int(number):
            raise ValueError(f"its token {content!r} has no place at the id {number}")
    enclose(
        found,
        theirs.bos_token if getattr(theirs, "add_bos_token", False) else None,
        theirs.eos_token if getattr(theirs, "add_eos_token", False) else None,
    )
    return SimpleNamespace(
        backend_tokenizer=found,
        chat_template=theirs.chat_template,
        special_tokens_map=theirs.special_tokens_map,
    )


def _stated_ids(folder: Path) -> Iterator[tuple[str, Any]]:
    """The tokens that a folder adds to those of its model, with their ids."""
    if (settings := folder / "tokenizer_config.json").is_file():
        for number, token in (read_json(settings).get("added_tokens_decoder") or {}).items():
            yield token["content"], number
    if (added := folder / "added_tokens.json").is_file():
        yield from read_json(added).items()
