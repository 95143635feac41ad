"""Drafts with another vocabulary: which tokens are alike, and what such a draft proposes."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipespec.core import NODE, PARENT, POSITION, TOKEN, Request, Verdict
from pipespec.engine.checkpoint.tokenizer import BackendTokenizer, same_tokens
from pipespec.engine.slice.runner import SliceRunner
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.proposer import Context, Proposal
from pipespec.head.proposers.draft_model import DraftModelProposer
from pipespec.head.proposers.token_map import MISSING, ProposedTokens, ReadText, TokenMap
from pipespec.head.scheduler_types import SchedulerConfig
from pipespec.head.tree import ROOT, Tree
from tests.helpers.drafted import Drafted
from tests.helpers.toy_pipeline import VOCABULARY, ForeignToy, ToyPipeline, text_of

TEXT = [
    "the cat sat on the mat",
    "a hat that the cat ate, then sat on",
    "über den Wolken\n\n  Ende",
]
ENDS = ["<|end|>", "<|im_end|>"]


@cache
def byte_level(size: int) -> BackendTokenizer:
    """As those of Qwen, SmolLM2 and Llama 3."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + size, initial_alphabet=alphabet)
    found.train_from_iterator(TEXT, trainer)
    found.add_special_tokens(ENDS)
    return BackendTokenizer(found.to_str())


@cache
def with_raw_bytes() -> BackendTokenizer:
    """As those of Llama 2 and Gemma: words begin with a mark, and bytes have names."""
    raw = {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    pieces = ["\u2581", *"thecasonmun,", "\u2581t", "th", "at", "\u2581the", "\u2581cat"]
    known = {"<unk>": 0, **raw, **{piece: 257 + i for i, piece in enumerate(pieces)}}
    found = Tokenizer(models.BPE(known, [], unk_token="<unk>", byte_fallback=True))
    found.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    found.add_special_tokens(ENDS[:1])
    return BackendTokenizer(found.to_str())


def between(target: BackendTokenizer, draft: BackendTokenizer) -> TokenMap:
    sizes = (len(target.get_vocab()) + 3, len(draft.get_vocab()))
    eos = tuple([each.get_vocab()[ENDS[0]]] for each in (target, draft))
    return TokenMap.between(target, draft, vocab_sizes=sizes, eos=eos)


PAIRS = {
    "fewer pairs": (byte_level(60), byte_level(20)),
    "more pairs": (byte_level(20), byte_level(60)),
    "words with a mark": (byte_level(60), with_raw_bytes()),
    "bytes for marks": (with_raw_bytes(), byte_level(60)),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
@given(st.text(max_size=12) | st.sampled_from(TEXT))
def test_a_draft_reads_the_text_that_the_target_has(pair, text: str):
    target, draft = pair
    tokens = between(target, draft)
    ids = target.encode(text, add_special_tokens=False)
    read = [own for token in ids for own in tokens.tokens(token)]
    # A vocabulary of pieces alone spells unknown characters by raw bytes.
    assert draft.decode(read) == target.decode(ids)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
def test_tokens_are_alike_by_their_text_alone(pair):
    target, draft = pair
    tokens = between(target, draft)
    known = np.flatnonzero(tokens.ids != MISSING)
    assert len(set(tokens.ids[known])) == len(known), "no two are the same token"
    for token in known.tolist():
        one, other = target.decode([token]), draft.decode([int(tokens.ids[token])])
        assert one == other
    assert (tokens.ids[-3:] == MISSING).all(), "padding of the embedding"
    assert tokens.share == pytest.approx(len(known) / len(draft.get_vocab()), abs=0.05)
    ours, theirs = target.get_vocab(), draft.get_vocab()
    assert tokens.ids[ours[ENDS[0]]] == theirs[ENDS[0]]
    if {ENDS[1]} <= ours.keys() & theirs.keys():
        assert tokens.ids[ours[ENDS[1]]] == theirs[ENDS[1]]


def test_a_token_is_spelled_as_the_draft_s_tokenizer_does():
    """Not by the longest pieces, and line ends as before a letter."""
    names = ["a", "b", "c", "\u010a", "bc", "ab", "\u010a\u010a", "abc\u010a\u010a"]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [("b", "c"), ("a", "b"), ("\u010a", "\u010a")]

    def made(size: int) -> BackendTokenizer:
        found = Tokenizer(models.BPE({name: i for name, i in vocab.items() if i < size}, merges))
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        found.decoder = decoders.ByteLevel()
        return BackendTokenizer(found.to_str())

    tokens = TokenMap.between(made(8), made(7), vocab_sizes=(8, 7), eos=([], []))
    assert tokens.tokens(vocab["abc\u010a\u010a"]) == [
        vocab[name] for name in ("a", "bc", *"\u010a\u010a")
    ]
    assert tokens.tokens(vocab["\u010a\u010a"]) == [vocab["\u010a"]] * 2
    assert tokens.tokens(vocab["ab"]) == [vocab["ab"]] and tokens.share == 1


def test_what_ends_a_text_is_alike_whatever_it_is_called():
    words = {"<|end|>": 0, "</s>": 0}
    target, draft = (
        BackendTokenizer(
            json.dumps(
                {"model": {"type": "WordLevel", "vocab": {name: 0, "a": 1}, "unk_token": "a"}}
            )
        )
        for name in words
    )
    asked = {"vocab_sizes": (2, 2)}
    assert TokenMap.between(target, draft, **asked, eos=([0], [0])).ids.tolist() == [0, 1]
    assert TokenMap.between(target, draft, **asked, eos=([0], [])).ids.tolist() == [MISSING, 1]
    assert same_tokens(target, target) and not same_tokens(target, draft)
    assert same_tokens(BackendTokenizer("not read"), BackendTokenizer("not read"))


SPELLED = TokenMap(np.array([4, 0, MISSING, 3, 1]), {b"a": 5, b"b": 6}, {2: b"ab"})


def test_rows_of_a_text_are_in_the_draft_s_tokens_and_positions():
    context = Context(7, [1, 2, 0, 2], [0, 1, 2, 9], shared_len=2)
    text = ReadText(context, SPELLED)
    assert text.own.tokens == [0, 5, 6, 4, 5, 6]
    assert [text.own.nodes[i] for i in (0, 2, 3, 5)] == [0, 1, 2, 9]
    assert len(set(text.own.nodes)) == 6 and text.own.shared_len == 3
    tree = Tree(9, 2, 2, 3, fed=True)
    tree.add_children(np.array([ROOT]), np.array([[3, 2]]), np.log([[0.6, 0.3]]))
    tree.add_children(np.array([1, 2]), np.array([[4], [4]]), np.log([[0.6], [0.3]]))
    nodes = np.array([1, 2, 3, 4])
    assert text.num_rows(tree, nodes).tolist() == [1, 2, 1, 1]
    rows = text.tree_rows(tree, nodes)
    assert rows[:, TOKEN].tolist() == [3, 5, 6, 1, 1]
    assert rows[:, POSITION].tolist() == [6, 6, 7, 7, 8]
    assert rows[[0, 2, 3, 4], NODE].tolist() == tree.id[nodes].tolist()
    assert rows[:, PARENT].tolist() == [9, 9, rows[1, NODE], *rows[[0, 2], NODE]]
    context.tokens += [2, 4]
    context.nodes += tree.id[[2, 4]].tolist()
    _, decided = text.accept(Verdict(7, 4, (2, 4)))
    assert decided == rows[[1, 2, 4], NODE].tolist(), "what was computed in the tree is kept"


@pytest.mark.parametrize("salted", [False, True])
def test_a_token_that_the_draft_lacks_is_proposed_once_a_text_had_it(salted):
    proposer = DraftModelProposer(
        SliceRunner(ForeignToy(50, SPELLED), 50), 8, VOCABULARY, tokens=SPELLED
    )

    def proposed(drafted: Drafted) -> set[int]:
        found = drafted.propose(VOCABULARY)
        assert np.exp(found.logps).sum() == pytest.approx(1)
        return {*found.tokens[np.isfinite(found.logps)].tolist()}

    first = Drafted.start(proposer, [1, 3], salted=salted)
    assert proposed(first) == {0, 1, 3, 4}
    first.decide(2)
    others = set() if salted else {2}
    assert proposed(first) == {0, 1, 3, 4} | others
    assert proposed(Drafted.start(proposer, [1], number=1)) == {0, 1, 3, 4} | others


def test_a_draft_goes_on_below_a_token_that_it_lacks():
    runner = SliceRunner(ForeignToy(50, SPELLED), 50)
    proposer = DraftModelProposer(runner, 8, VOCABULARY, tokens=SPELLED)
    drafted = Drafted.start(proposer, [1, 2])
    drafted.propose(VOCABULARY)
    for above, nodes in ((ROOT, [1, 2]), (1, [3, 4])):
        drafted.add(Proposal.from_lists(np.array([above]), [[(2, 0.6), (3, 0.3)]]))
        found = drafted.propose(VOCABULARY, nodes)
        assert found is not None and found.parents.tolist() == nodes
        assert np.isfinite(found.logps).all()
    computed = runner.model.rows
    drafted.decide(2, 2, 0)
    drafted.propose(VOCABULARY)
    assert runner.model.rows == computed + 1, "both rows of each token are kept"
    runner.check_integrity()


def test_tokens_that_begin_alike_share_a_probability_by_how_often_they_were_read():
    tokens = TokenMap(np.array([4, 0, MISSING, 3, 1]), {b"a": 4, b"b": 6}, {2: b"ab"})
    proposed = ProposedTokens(tokens)
    own = torch.tensor([[0.0, 0.0, 9.0, 0.0, 1.0, 9.0, 9.0]])
    assert proposed.known.tolist() == [0, 1, 3, 4]
    before = proposed.logits(own).softmax(-1)[0]
    proposed.learn([2, 1, 0, 2, 1])
    assert proposed.known.tolist() == [0, 1, 2, 3, 4]
    after = proposed.logits(own).softmax(-1)[0]
    assert after[[1, 3, 4]].tolist() == pytest.approx(before[[1, 2, 3]].tolist())
    assert after[[0, 2]].tolist() == pytest.approx([float(before[0]) / 2] * 2)


@pytest.mark.slow
def test_a_draft_with_other_tokens_is_as_good_where_it_has_them_all():
    """Its vocabulary is the target's in another order: every draft token is right, as without."""
    requests = [Request(i, (1, 2, i), 20) for i in range(3)]
    steps = []
    for tokens in (None, TokenMap(np.array([4, 0, 2, 3, 1]), {}, {})):
        told = SchedulerConfig(BestFirst(8, 2), 3, 1, 8, 90, 4, 16, num_slots=200, max_retained=8)
        toy = ToyPipeline(told, draft_slots=200, answers={}, tokens=tokens)
        for request in requests:
            toy.add(request)
        steps.append(0)
        while not toy.scheduler.admission.idle:
            toy.orderly_step()
            steps[-1] += 1
        assert all(toy.answers[each.id] == text_of(each, 3) for each in requests)
    assert steps[0] == steps[1]
