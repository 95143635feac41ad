"""Checks that target and draft have the same vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from pipespec.errors import ModelError

# How many differing tokens an error message shows.
NUM_SHOWN = 3
# Small published models, by tokens that only their family has, and one that others of the family
# have; the first that fits counts.
SMALL_MODELS = (
    (("<|begin_of_text|>", "<|eom_id|>"), "<think>", "meta-llama/Llama-3.2-1B-Instruct"),
    (("<|object_ref_start|>", "<think>", "<tool_response>"), None, "Qwen/Qwen3-0.6B"),
    (("<|object_ref_start|>", "<|fim_pad|>"), "<think>", "Qwen/Qwen2.5-0.5B-Instruct"),
    (("<start_of_turn>", "<start_of_image>"), None, "google/gemma-3-1b-it"),
    (("<start_of_turn>",), None, "google/gemma-2-2b-it"),
    (("<|channel|>", "<|constrain|>"), None, "openai/gpt-oss-20b"),
)


class Vocabulary(Protocol):
    """The method of a tokenizer that is needed here."""

    def get_vocab(self) -> Mapping[str, int]: ...


def compare_vocabularies(target: Vocabulary, draft: Vocabulary) -> None:
    """Check that both tokenizers give every token the same id.

    Raises ModelError, with the number of tokens that differ and some of them. The embeddings may
    have different numbers of rows (padding).
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    differing = sorted(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
    shown = ", ".join(
        f"{token!r} ({_id_of(token, ours)} in the target, {_id_of(token, theirs)} in the draft)"
        for token in differing[:NUM_SHOWN]
    )
    raise ModelError(
        f"the vocabularies of target and draft differ in {len(differing)} tokens, for example "
        f"{shown}; choose a draft with the target's tokenizer, {_suggestion(ours)}, or "
        "proposer=suffix, which needs no draft"
    )


def _suggestion(vocabulary: Mapping[str, int]) -> str:
    """Which drafts have this vocabulary, as an apposition."""
    for tokens, other, model in SMALL_MODELS:
        if other not in vocabulary and all(token in vocabulary for token in tokens):
            return f"such as {model}"
    return "the smallest model of its family"


def _id_of(token: str, vocabulary: Mapping[str, int]) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "missing"
