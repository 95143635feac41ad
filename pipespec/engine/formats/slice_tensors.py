"""Which tensors of a checkpoint a slice of layers needs, by their names. Pure.

The names are those in the files, or in a GGUF file those of Transformers. A tensor belongs to a
*part* of the checkpoint: a layer, the embedding, or the head.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

EMBEDDING, HEAD = "embedding", "head"
# Of multi-token prediction (Qwen3-Next, Qwen3.5), which no slice computes.
UNUSED = "unused"
# The layer of a tensor, and its name in the layer; base models are saved without a prefix.
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.*)")
EMBEDDING_NAME = re.compile(r"(?:^|\.)(embed_tokens|embed_in|embeddings)\.weight$")


def part_of(name: str) -> str:
    """The part of a tensor: the number of its layer, EMBEDDING, HEAD (final norm and output head)
    or UNUSED."""
    if name.startswith("mtp."):
        return UNUSED
    layer = LAYER.search(name)
    if layer is not None:
        return layer[1]
    return EMBEDDING if EMBEDDING_NAME.search(name) else HEAD


def parts_of(layers: range, num_layers: int, *, tied: bool) -> set[str]:
    """The parts that a slice needs; `tied`: the embedding is the output head too.

    Layers beyond `num_layers` (multi-token prediction) are in no slice.
    """
    found = set(map(str, layers))
    last = layers.stop == num_layers
    if last:
        found.add(HEAD)
    if layers.start == 0 or (last and tied):
        found.add(EMBEDDING)
    return found


def needed(names: Iterable[str], parts: Collection[str]) -> list[str]:
    """Those of the tensors that are of one of these parts."""
    return [name for name in names if part_of(name) in parts]


def described(parts: Iterable[str]) -> str:
    """The parts in words, as in "layers 0 to 3 and 5, embedding and head"."""
    names = set(parts)
    numbers = sorted(int(name) for name in names if name not in (EMBEDDING, HEAD))
    texts = []
    for _, run in groupby(enumerate(numbers), lambda each: each[1] - each[0]):
        (_, first), *rest = run
        texts.append(f"{first} to {rest[-1][1]}" if rest else f"{first}")
    layers = [f"layer{'s' if numbers[1:] else ''} {listed(texts)}"] if texts else []
    return listed([*layers, *(name for name in (EMBEDDING, HEAD) if name in names)])


def listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
