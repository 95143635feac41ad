"""Drafts with another vocabulary than the target's: which tokens have the same text.

Token-level intersection (Timor et al. 2025, arXiv 2502.05202, algorithm TLI): such a draft proposes
only tokens whose text both vocabularies have. A decided token that it lacks it reads as several of
its own. Each token is translated by itself, so a text that grows is not read anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from pipespec.core import POSITION, TOKEN, Verdict
from pipespec.engine.checkpoint import tokenizer
from pipespec.engine.checkpoint.checkpoint import open_files
from pipespec.engine.checkpoint.tokenizer import BackendTokenizer
from pipespec.engine.inspection.inspection import CheckpointInfo
from pipespec.errors import ModelError
from pipespec.head.proposer import Context
from pipespec.head.tree import ROOT, Tree
from pipespec.text import BYTE_OF, RAW_BYTE, WORD_BEGINS

MISSING = -1  # in place of a draft's token
LEAST_SHARE = 0.1  # of the draft's tokens; one of which fewer are the target's is of no use
# Ids of rows that are parts of a token; those of tree nodes are smaller.
FIRST_PART = 1 << 48


@dataclass(frozen=True)
class TokenMap:
    """The draft's tokens for those of a target.

    Attributes:
        ids: the draft's token with the text of each of the target's, or MISSING; those of two
            differ. `[vocab]`, of the target's embedding.
        spelled: the draft's tokens by their bytes, with which other tokens are spelled.
        texts: the bytes of the target's tokens for which there is none.
        share: of the draft's tokens, those with the text of one of the target's.
        unknown: the draft's token for bytes that it cannot spell.
    """

    ids: np.ndarray
    spelled: Mapping[bytes, int] = field(repr=False)
    texts: Mapping[int, bytes] = field(repr=False)
    share: float = 1.0
    unknown: int = 0

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
        return cls(ids, spelled, texts, share, (*eos[1], 0)[0])

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.spelled), default=0)

    def tokens(self, token: int) -> list[int]:
        """A token of the target in the draft's: one with its text, or those that spell its bytes,
        each as long as can be."""
        if self.ids[token] != MISSING:
            return [int(self.ids[token])]
        found, text = list[int](), self.texts.get(token, b"")
        while text:
            lengths = range(min(len(text), self._longest), 0, -1)
            length = next((each for each in lengths if text[:each] in self.spelled), 0)
            found.append(self.spelled[text[:length]] if length else self.unknown)
            text = text[length or 1 :]
        return found or [self.unknown]

    def readable(self, tree: Tree) -> np.ndarray:
        """Which nodes the draft can read: their tokens and those above them, but for the root's,
        are its own too; bool `[nodes]`."""
        read = self.ids[tree.token] != MISSING
        read[ROOT] = True
        while not np.array_equal(read, below := read & read[tree.parent]):
            read = below
        return read


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
            tokens = self._map.tokens(context.tokens[position])
            parts = range(FIRST_PART + len(own.tokens), FIRST_PART + len(own.tokens) + len(tokens))
            own.nodes += [*parts[:-1], context.nodes[position]]
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

    def tree_rows(self, tree: Tree, nodes: np.ndarray) -> np.ndarray:
        """As `Tree.rows`, of nodes that the draft can read, at positions of the own text,
        `[k, 6]`."""
        rows = tree.rows(self.own.sequence, nodes)
        if self._map is not None:
            rows[:, TOKEN] = self._map.ids[rows[:, TOKEN]]
        rows[:, POSITION] += len(self.own.tokens) - len(self._context.tokens)
        return rows


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
