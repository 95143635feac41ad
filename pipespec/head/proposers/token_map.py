"""Drafts with another vocabulary than the target's: which tokens have the same text.

A draft reads a token that it lacks as several of its own. Each token is translated by itself, so a
text that grows is not read anew. It proposes the tokens whose text both vocabularies have
(token-level intersection: Timor et al. 2025, arXiv 2502.05202, algorithm TLI), and of the others
those that texts have had, by the first token of their own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from pipespec.core import NUM_COLUMNS, POSITION, TOKEN, Verdict
from pipespec.engine.checkpoint import tokenizer
from pipespec.engine.checkpoint.checkpoint import open_files
from pipespec.engine.checkpoint.tokenizer import BackendTokenizer
from pipespec.engine.inspection.inspection import CheckpointInfo
from pipespec.errors import ModelError
from pipespec.head.proposer import Context
from pipespec.head.tree import ROOT, Tree
from pipespec.system.device_copy import to_device
from pipespec.text import BYTE_OF, RAW_BYTE, WORD_BEGINS

if TYPE_CHECKING:  # reading settings needs no torch
    from torch import Tensor

MISSING = -1  # in place of a draft's token
LEAST_SHARE = 0.1  # of the draft's tokens; one of which fewer are the target's is of no use
# Ids of rows that are parts of a token, so many for each node; those of tree nodes are smaller.
FIRST_PART, MOST_PARTS = 1 << 48, 1 << 10
# What ends a line is spelled as before a letter, as tokenizers split white space by what follows.
LETTER = b"a"
# How often a token that both vocabularies have is assumed to have occurred before texts were read.
PRIOR = 1.0


@dataclass(frozen=True)
class TokenMap:
    """The draft's tokens for those of a target.

    Attributes:
        ids: the draft's token as which it reads each of the target's, or MISSING: it reads
            several; those of two differ. `[vocab]`, of the target's embedding.
        spelled: the draft's tokens by their bytes, with which other tokens are spelled.
        texts: the bytes of these other tokens.
        share: of the draft's tokens, those with the text of one of the target's.
        unknown: the draft's token for bytes that it cannot spell.
        encode: the draft's tokens of a text.
    """

    ids: np.ndarray
    spelled: Mapping[bytes, int] = field(repr=False)
    texts: Mapping[int, bytes] = field(repr=False)
    share: float = 1.0
    unknown: int = 0
    encode: Callable[[str], Sequence[int]] = field(default=lambda text: (), repr=False)
    _spelling: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def between(
        cls,
        target: BackendTokenizer,
        draft: BackendTokenizer,
        *,
        vocab_sizes: tuple[int, int],
        eos: tuple[Sequence[int], Sequence[int]],
    ) -> TokenMap:
        """`vocab_sizes`: rows of the two embeddings; `eos`: tokens that end a text; the first one
        of the draft is that of a target without a common one."""
        known: dict[tuple[bytes, bool], int] = {}
        for token, text in _texts(draft):
            if token < vocab_sizes[1]:
                known.setdefault(text, token)
        num_known = len(known)
        spelled = {text: token for (text, special), token in known.items() if text and not special}
        ids, texts = np.full(vocab_sizes[0], MISSING, np.int64), dict[int, bytes]()
        for token, text in _texts(target):
            if token < vocab_sizes[0]:
                ids[token] = known.pop(text, MISSING)  # so no other token is the same one
                if ids[token] == MISSING:
                    texts[token] = text[0]
        ends = [token for token in eos[0] if ids[token] == MISSING]
        if ends and len(ends) == len(eos[0]) and eos[1] and eos[1][0] not in ids:
            ids[ends[0]] = eos[1][0]
            texts.pop(ends[0], None)
        share = np.count_nonzero(ids != MISSING) / max(num_known, 1)
        encode = partial(draft.encode, add_special_tokens=False)
        found = cls(ids, spelled, texts, share, (*eos[1], 0)[0], encode)
        owner = {own: token for token, own in enumerate(ids.tolist()) if own != MISSING}
        for line, own in spelled.items():
            if line.endswith(b"\n") and own in owner and len(found.spell(line)) > 1:
                ids[owner[own]] = MISSING
                texts[owner[own]] = line
        return found

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.spelled), default=0)

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        return {token: text for text, token in self.spelled.items()}

    def tokens(self, token: int) -> list[int]:
        """A token of the target in the draft's: one with its text, or those that spell it."""
        if self.ids[token] != MISSING:
            return [int(self.ids[token])]
        if token not in self._spelling:
            spelled = self.spell(self.texts.get(token, b""))
            self._spelling[token] = spelled or [self.unknown]
        return self._spelling[token]

    def spell(self, text: bytes) -> list[int]:
        """The tokens of the draft's own tokenizer for a text; if these have other bytes, such as a
        space before them, tokens that are each as long as can be."""
        after = LETTER if text.endswith(b"\n") else b""
        with suppress(UnicodeDecodeError):
            found = [*self.encode((text + after).decode())]
            read = [self._bytes.get(token, b"") for token in found]
            if all(read) and b"".join(read) == text + after and (not after or read[-1] == after):
                return found[: len(found) - len(after)]
        found = []
        while text:
            lengths = range(min(len(text), self._longest), 0, -1)
            length = next((each for each in lengths if text[:each] in self.spelled), 0)
            found.append(self.spelled[text[:length]] if length else self.unknown)
            text = text[length or 1 :]
        return found

    def num_rows(self, tokens: np.ndarray) -> np.ndarray:
        """How many tokens the draft reads for each of the target's, `[k]`."""
        found = np.ones(len(tokens), np.int64)
        for place in np.flatnonzero(self.ids[tokens] == MISSING).tolist():
            found[place] = len(self.tokens(int(tokens[place])))
        return found


class ProposedTokens:
    """The target's tokens that a draft proposes. To one that it lacks it gives the probability of
    the first token that spells it, times how often that has begun this token in texts so far.

    Attributes:
        known: these tokens, rising, `[k]`.
    """

    def __init__(self, tokens: TokenMap) -> None:
        self._map = tokens
        self.known = np.flatnonzero(tokens.ids != MISSING)
        self._first = tokens.ids[self.known]  # of the draft's tokens for each
        self._share = np.zeros(len(self.known), np.float32)  # logarithms
        self._alone = dict(zip(self._first.tolist(), self.known.tolist(), strict=True))
        self._counts: dict[int, Counter[int]] = {}  # the target's tokens by the first that they are
        self._on_device: tuple[Tensor, Tensor] | None = None

    def learn(self, text: Sequence[int]) -> None:
        """Count the tokens of a text."""
        begun = set[int]()
        for token, count in Counter(text).items():
            begun.add(first := self._map.tokens(token)[0])
            counts = self._counts.setdefault(first, Counter())
            if token not in counts and self._map.ids[token] == MISSING:
                place = np.searchsorted(self.known, token)
                self.known = np.insert(self.known, place, token)
                self._first = np.insert(self._first, place, first)
                self._share = np.insert(self._share, place, 0)
                self._on_device = None
            counts[token] += count
        for first in begun:
            counts, alone = self._counts[first], self._alone.get(first)
            tokens = [*{*counts, *([] if alone is None else [alone])}]
            if len(tokens) > 1:
                weights = np.array([counts[each] + PRIOR * (each == alone) for each in tokens])
                self._share[np.searchsorted(self.known, tokens)] = np.log(weights / weights.sum())
                self._on_device = None

    def logits(self, own: Tensor) -> Tensor:
        """The logits of `known`, given those of the draft's tokens `[rows, vocab]`."""
        if self._on_device is None:
            columns, share = (to_device(each, own.device) for each in (self._first, self._share))
            self._on_device = columns, share
        columns, share = self._on_device
        return own.index_select(1, columns).float().add_(share)


def token_map(
    target: CheckpointInfo, draft: CheckpointInfo, ours: BackendTokenizer | None = None
) -> TokenMap | None:
    """The tokens of a draft for those of a target, whose tokenizer is `ours`, if it is read
    already; None: both have the same, or no texts but numbers. Raises ModelError where the draft
    has too few of them, or proposes several tokens a pass."""
    if draft.head is not None:  # its tokens are the target's
        return None
    if ours is None:
        if not any(open_files(each.path).has_tokenizer for each in (target, draft)):
            return None
        ours = tokenizer.load(target.path)
    theirs = tokenizer.load(draft.path)
    if tokenizer.same_tokens(ours, theirs):
        return None
    sizes, eos = (target.vocab_size, draft.vocab_size), (target.eos, draft.eos)
    found = TokenMap.between(ours, theirs, vocab_sizes=sizes, eos=eos)
    why = ""
    if found.share < LEAST_SHARE:
        why = f"shares only {found.share:.1%} of its tokens with the target"
    elif draft.mask_token is not None and draft.parallel_tokens != 1:
        why = "proposes several tokens a pass, which takes the vocabulary of the target"
    if why:
        raise ModelError(
            f"the draft {draft.path} {why}; choose a draft with the target's tokenizer, such as "
            "the smallest model of its family, or proposer=suffix, which needs no draft"
        )
    return found


class ReadText:
    """The decided text of a sequence as a draft reads it: `own`, which is the head's own context
    unless `tokens` translates it."""

    def __init__(self, context: Context, tokens: TokenMap | None) -> None:
        self._context, self._map = context, tokens
        self.own = context
        if tokens is None:
            return
        self.own, self._lengths = replace(context, tokens=[], nodes=[]), [0]
        self._read()
        self.own.shared_len = self._lengths[context.shared_len]

    @property
    def lengths(self) -> Sequence[int]:
        """Of the own text, up to each of the target's tokens, `[tokens + 1]`."""
        return self._lengths if self._map is not None else range(len(self.own.tokens) + 1)

    def _read(self) -> None:
        """Translate what was decided since."""
        assert self._map is not None
        context, own = self._context, self.own
        for position in range(len(self._lengths) - 1, len(context.tokens)):
            tokens, node = self._map.tokens(context.tokens[position]), context.nodes[position]
            own.nodes += [*_parts(node, len(tokens)), node]
            own.tokens += tokens
            self._lengths.append(len(own.tokens))

    def accept(self, verdict: Verdict) -> tuple[Verdict, list[int]]:
        """A verdict on the context, which contains its tokens already, as one on the own text, and
        the ids of its nodes."""
        if self._map is None:
            return verdict, self.own.nodes[verdict.base : verdict.base + len(verdict.tokens)]
        base = len(self.own.tokens)
        self._read()
        return replace(verdict, base=base, tokens=(*self.own.tokens[base:],)), self.own.nodes[base:]

    def num_rows(self, tree: Tree, nodes: np.ndarray) -> np.ndarray:
        """How many rows `tree_rows` has for each of some nodes, `[k]`."""
        if self._map is None:
            return np.ones(len(nodes), np.int64)
        return self._map.num_rows(tree.token[nodes])

    def tree_rows(self, tree: Tree, nodes: np.ndarray) -> np.ndarray:
        """As `Tree.rows`, in tokens and at positions of the own text: `num_rows` for each node, the
        last with its id."""
        rows = tree.rows(self.own.sequence, nodes)
        rows[:, POSITION] += len(self.own.tokens) - len(self._context.tokens)
        if self._map is None:
            return rows
        more = self._map.num_rows(tree.token) - 1
        more[ROOT] = 0
        if not more.any():
            rows[:, TOKEN] = self._map.ids[rows[:, TOKEN]]
            return rows
        for level in range(1, int(tree.depth[-1]) + 1):
            mine = tree.depth == level
            more[mine] += more[tree.parent[mine]]
        found = list[tuple[int, ...]]()
        for node, (sequence, row_id, parent, token, position, kind) in zip(
            nodes.tolist(), rows.tolist(), strict=True
        ):
            own = self._map.tokens(token)
            ids = [parent, *_parts(row_id, len(own)), row_id]
            first = position + int(more[node]) - len(own) + 1
            for part, each in enumerate(own):
                found.append((sequence, ids[part + 1], ids[part], each, first + part, kind))
        return np.array(found, np.int64).reshape(-1, NUM_COLUMNS)


def _parts(node: int, num_tokens: int) -> range:
    """The ids of the rows of a node's tokens but the last one."""
    first = FIRST_PART + node * MOST_PARTS
    return range(first, first + num_tokens - 1)


def _texts(of: BackendTokenizer) -> Iterator[tuple[int, tuple[bytes, bool]]]:
    """The bytes of each token, and whether it is a special one; tokens that are a raw byte come
    last."""
    known = json.loads(of.backend)
    added = {each["id"]: each for each in known.get("added_tokens", ())}
    of_bytes = '"ByteLevel"' in json.dumps(known.get("decoder"))
    vocabulary = sorted(of.get_vocab().items(), key=lambda each: each[1])
    for name, token in vocabulary:
        if token in added:
            yield token, (added[token]["content"].encode(), bool(added[token]["special"]))
        elif of_bytes and all(each in BYTE_OF for each in name):
            yield token, (bytes(BYTE_OF[each] for each in name), False)
        elif of_bytes or not RAW_BYTE.fullmatch(name):
            yield token, (name.replace(WORD_BEGINS, " ").encode(), False)
    for name, token in vocabulary:
        if token not in added and not of_bytes and RAW_BYTE.fullmatch(name):
            yield token, (bytes([int(name[3:5], 16)]), False)
