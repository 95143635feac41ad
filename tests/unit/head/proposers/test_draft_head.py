"""A draft head reads features of decided text, and its own states below it."""

from math import ceil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipespec.core import Batch, SamplingParams
from pipespec.engine.inspection.draft_heads import inspect_head
from pipespec.engine.inspection.inspection import inspect
from pipespec.engine.slice.head_slice import load_head
from pipespec.engine.slice.runner import SliceRunner
from pipespec.head.proposer import Proposal
from pipespec.head.proposers.draft_head import DraftHeadProposer
from pipespec.head.tree import ROOT
from pipespec.sampling.shared_noise import score_tokens
from tests.helpers import heads, models
from tests.helpers.drafted import Drafted

CHUNK, SLOTS, CHILDREN = 16, 256, 3
TEXT = [5, 17, 3, 8, 120, 44, 7, 9]


class Target:
    """What the target computes of texts, and what the head says by plain torch."""

    def __init__(self, path: Path, head: Path):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.table = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
        self.weights = load_file(head / "model.safetensors")

    @torch.inference_mode()
    def features(self, tokens: list[int]) -> torch.Tensor:
        """Of each position, `[tokens, columns]`: the outputs of layers 0, 1 and 3."""
        states = {}
        hooks = [
            self.model.model.layers[layer].register_forward_hook(
                lambda _, __, out, layer=layer: states.__setitem__(layer, out[0])
            )
            for layer in (0, 1, 3)
        ]
        self.model(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        return torch.cat([states[layer] for layer in (0, 1, 3)], -1)

    def said(self, tokens: list[int], before: torch.Tensor, drafted: list[int]) -> torch.Tensor:
        """The logits of the head's tokens after a path of draft tokens below the last of some
        decided tokens, given what is known of the positions before these."""
        for more in range(len(drafted) + 1):
            read = [*tokens, *drafted[:more]]
            states = heads.eagle3(self.weights, self.table[read], before)
            before = torch.cat((before, states[-1:]))
        normed = heads.rms(states[-1], self.weights["norm.weight"])
        return normed @ self.weights["lm_head.weight"].T

    def likeliest(self, logits: torch.Tensor, count: int = CHILDREN) -> list[int]:
        best = logits.topk(count).indices
        return (best + self.weights["d2t"][best]).tolist()

    def logits(self, tokens: list[int], drafted: tuple[int, ...] = ()) -> torch.Tensor:
        """The same of a text of which all features are known."""
        before = self.features(tokens)[:-1] @ self.weights["fc.weight"].T
        return self.said(tokens[1:], before, [*drafted])

    def after(
        self, tokens: list[int], drafted: tuple[int, ...] = (), count: int = CHILDREN
    ) -> list[int]:
        return self.likeliest(self.logits(tokens, drafted), count)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    torch.set_num_threads(1)
    target = models.shared("llama")
    return target, heads.write_eagle3(tmp_path_factory.mktemp("heads") / "head", target)


@pytest.fixture(scope="module")
def target(folders) -> Target:
    return Target(*folders)


@pytest.fixture
def proposer(folders) -> DraftHeadProposer:
    info = inspect(folders[0])
    head = inspect_head(folders[1], info)
    assert head.head is not None
    made = load_head(folders[1], head.head, folders[0], dtype=torch.float32, num_slots=SLOTS)
    return DraftHeadProposer(SliceRunner(made, SLOTS), made, CHUNK, info.vocab_size, 8)


def deliver(request: Drafted, target: Target, start: int, stop: int | None = None) -> None:
    """The features of positions of a text, as the last stage returns them."""
    rows = request.context.rows(start, stop)
    features = target.features(request.context.tokens)[start:stop]
    request.proposer.add_features(Batch(0, rows, features))


def best(found: Proposal | None, node: int = 0) -> list[int]:
    assert found is not None
    return found.tokens[node].tolist()


def test_candidates_follow_the_head_from_true_features_and_from_its_own_states(proposer, target):
    asked = Drafted.start(proposer, TEXT)
    deliver(asked, target, 0, len(TEXT) - 1)
    found = asked.propose(CHILDREN)
    assert best(found) == target.after(TEXT)
    asked.add(found)
    found = asked.propose(CHILDREN, [1, 2])
    for node in (0, 1):
        token = int(asked.tree.token[1 + node])
        assert best(found, node) == target.after(TEXT, (token,))
    asked.add(found)
    deep = len(asked.tree) - 1
    path = tuple(asked.tree.token[asked.tree.path(deep)[1:]].tolist())
    assert len(path) == 2
    assert best(asked.propose(CHILDREN, [deep])) == target.after(TEXT, path)


def test_grammar_leaves_the_likeliest_of_the_tokens_that_the_head_has(proposer, target):
    asked = Drafted.start(proposer, TEXT)
    deliver(asked, target, 0, len(TEXT) - 1)
    known = proposer.known.tolist()
    lacking = set(range(models.VOCAB_SIZE)) - {*known}
    may = {*known[5:20], *lacking}
    bits = np.isin(np.arange(ceil(models.VOCAB_SIZE / 32) * 32), [*may])[None]
    allowed = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    said = target.after(TEXT, count=len(known))
    expected = [token for token in said if token in may][:CHILDREN]
    assert best(asked.propose(CHILDREN, allowed=allowed)) == expected


def test_drawn_tokens_are_ranked_with_the_noise_of_the_targets_tokens(proposer, target):
    sampling = SamplingParams(temperature=1.0, seed=3)
    asked = Drafted.start(proposer, TEXT, sampling=sampling)
    deliver(asked, target, 0, len(TEXT) - 1)
    logits = torch.full((1, models.VOCAB_SIZE), -torch.inf)
    logits[0, proposer.known] = target.logits(TEXT)
    tokens, scores, _ = score_tokens(logits, [len(TEXT)], [sampling])
    expected = tokens[0][scores[0].topk(CHILDREN).indices].tolist()
    assert best(asked.propose(CHILDREN)) == expected


def test_true_features_replace_own_states_once_tokens_are_decided(proposer, target):
    asked = Drafted.start(proposer, TEXT)
    deliver(asked, target, 0, len(TEXT) - 1)
    asked.add(asked.propose(CHILDREN))
    asked.add(asked.propose(CHILDREN, [1]))
    for decided in ([int(asked.tree.token[1])], [3, 3], [50]):
        before = len(asked.context.tokens)
        asked.decide(*decided)
        asked.tree.drop_unfed()
        deliver(asked, target, before - 1, len(asked.context.tokens) - 1)
        assert best(asked.propose(CHILDREN)) == target.after(asked.context.tokens)
        proposer.runner.check_integrity()
    proposer.end_sequence(0)
    proposer.runner.check_integrity()


def test_prompt_is_read_as_far_as_its_features_reach(proposer, target):
    text = [*range(20, 60)]
    asked = Drafted.start(proposer, text)
    assert asked.propose(CHILDREN) is None
    deliver(asked, target, 0, 20)
    assert asked.propose(CHILDREN) is None and asked.propose(CHILDREN) is None
    assert proposer.runner.length(0) == 20
    deliver(asked, target, 20, 39)
    assert asked.propose(CHILDREN) is None  # the chunk is smaller, and has no room for candidates
    assert best(asked.propose(CHILDREN)) == target.after(text)


def test_prompt_that_one_pass_reads_is_drafted_in_the_next(proposer, target):
    proposer.chunk = 64
    text = [*range(20, 60)]
    asked = Drafted.start(proposer, text)
    deliver(asked, target, 0, 39)
    assert asked.propose(CHILDREN) is None and proposer.runner.length(0) == 38
    assert best(asked.propose(CHILDREN)) == target.after(text)


def test_many_texts_are_drafted_in_one_pass_as_each_alone(proposer, target):
    texts = [TEXT, TEXT[::-1], TEXT[:3]]
    asked = [Drafted.start(proposer, text, number) for number, text in enumerate(texts)]
    for each in asked:
        deliver(each, target, 0, len(each.context.tokens) - 1)
    found = proposer.propose([each.asked() for each in asked], CHILDREN)
    for each, proposal, text in zip(asked, found, texts, strict=True):
        assert best(proposal) == target.after(text)
        each.add(proposal)
    found = proposer.propose([each.asked([1]) for each in asked], CHILDREN)
    for each, proposal, text in zip(asked, found, texts, strict=True):
        assert best(proposal) == target.after(text, (int(each.tree.token[1]),))


def test_text_from_the_prefix_cache_is_read_without_the_token_behind_it(proposer, target):
    """The head keeps its rows of a text that has ended. The features of the last cached token are
    not computed again, so the token behind it is left out."""
    first = Drafted.start(proposer, TEXT)
    deliver(first, target, 0, len(TEXT) - 1)
    assert best(first.propose(CHILDREN)) == target.after(TEXT)
    proposer.end_sequence(0)
    text, shared = [*TEXT[:5], 1, 2, 3], 5
    for parent, kept in ((0, shared), (17, 0)):  # of the other text the head has kept nothing
        asked = Drafted.start(proposer, text, 1 + parent, parent=parent, shared_len=shared)
        nothing = asked.propose(CHILDREN)
        assert nothing is None
        deliver(asked, target, shared, len(text) - 1)
        features = target.features(text) @ target.weights["fc.weight"].T
        read = [*range(1, kept), *range(shared + 1, len(text))]
        before = features[[place - 1 for place in read]]
        expected = target.said([text[place] for place in read], before, [])
        assert best(asked.propose(CHILDREN)) == target.likeliest(expected)
        proposer.runner.check_integrity()


def test_root_whose_features_never_come_has_no_candidates(proposer):
    """All before it is cached; and of a text of one token there is nothing before it."""
    for number, (text, shared) in enumerate([(TEXT, len(TEXT) - 1), ([7], 0)]):
        asked = Drafted.start(proposer, text, number, parent=99, shared_len=shared)
        found = asked.propose(CHILDREN)
        assert found is not None and found.parents.tolist() == [ROOT]
        assert not np.isfinite(found.logps).any()


class TargetOfMTP:
    """A target with MTP layers, and what these say by plain torch."""

    def __init__(self, folder: Path, layers: int, model_type: str):
        self.folder = heads.write_mtp(model_type, folder, layers=layers)
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).model
        self.plain = heads.PlainMTP(self.folder)

    @torch.inference_mode()
    def features(self, tokens: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]

    def proposer(self) -> DraftHeadProposer:
        info = inspect(self.folder)
        head = inspect_head(None, info)
        made = load_head(head.path, head.head, self.folder, dtype=torch.float32, num_slots=SLOTS)
        return DraftHeadProposer(SliceRunner(made, SLOTS), made, CHUNK, info.vocab_size, 8)

    def check(self, asked: Drafted, nodes: list[int]) -> Proposal:
        """A round for some nodes, each of which is given what the layers say after its path."""
        found = asked.propose(CHILDREN, nodes)
        assert found is not None
        tokens, features = asked.context.tokens, self.features(asked.context.tokens)[:-1]
        for row, node in enumerate(nodes):
            path = asked.tree.token[asked.tree.path(node)[1:]].tolist()
            said = self.plain.logits(tokens, path, features).log_softmax(-1).topk(CHILDREN)
            assert found.tokens[row].tolist() == said.indices.tolist(), (node, path)
            assert found.logps[row] == pytest.approx(said.values.numpy(), abs=1e-3)
        return found


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe", "qwen3_next"])
def test_each_mtp_layer_proposes_the_next_token_of_a_path(tmp_path, model_type, layers):
    """At every depth of the tree, in passes of one level and of several, and again once tokens are
    decided, drafted ones and others."""
    target = TargetOfMTP(tmp_path / "target", layers, model_type)
    proposer = target.proposer()
    asked = Drafted.start(proposer, TEXT)
    deliver(asked, target, 0, len(TEXT) - 1)
    for decided in ([], [0], [0, 0, 0], [50], [3, 3]):
        if decided:
            before = len(asked.context.tokens)
            asked.decide(*decided)
            asked.tree.drop_unfed()
            deliver(asked, target, before - 1, len(asked.context.tokens) - 1)
        asked.add(target.check(asked, [0]))
        asked.add(target.check(asked, [1, 2]))
        asked.add(target.check(asked, [4]))
        asked.add(target.check(asked, [3, 5, len(asked.tree) - 1]))
        asked.add(target.check(asked, [len(asked.tree) - 1, 6]))
        for layer in proposer.layers:
            layer.runner.check_integrity()
    proposer.end_sequence(0)
    for layer in proposer.layers:
        layer.runner.check_integrity()


def test_text_from_the_prefix_cache_is_read_later_by_later_layers(tmp_path):
    """Each layer keeps its own rows. The first leaves out the token behind the cached text, the
    second also the one after that, as it lacks the states of the first before it."""
    target = TargetOfMTP(tmp_path / "target", 2, "qwen3_next")
    proposer = target.proposer()
    first = Drafted.start(proposer, TEXT)
    deliver(first, target, 0, len(TEXT) - 1)
    target.check(first, [0])
    proposer.end_sequence(0)
    text, shared = [*TEXT[:5], 1, 2, 3], 5
    asked = Drafted.start(proposer, text, 1, parent=0, shared_len=shared)
    deliver(asked, target, shared, len(text) - 1)
    root = asked.propose(CHILDREN)
    asked.add(root)
    token, features = int(asked.tree.token[1]), target.features(text)
    read = [[1, 2, 3, 4, 6, 7], [2, 3, 4, 7, 8]]
    path = [*text, token]
    states = target.plain.states(
        0, [path[at] for at in read[0]], features[[at - 1 for at in read[0]]]
    )
    below = states[[read[0].index(at - 1) for at in read[1]]]
    deep = target.plain.states(1, [path[at] for at in read[1]], below)
    for found, said in ((root, states), (asked.propose(CHILDREN, [1]), deep)):
        assert best(found) == target.plain.output(said[-1]).topk(CHILDREN).indices.tolist()
    for layer in proposer.layers:
        layer.runner.check_integrity()


@pytest.mark.slow
def test_many_texts_in_few_slots_are_read_by_all_mtp_layers(tmp_path):
    """What is retained of texts that have ended gives way, and long prompts take several passes."""
    target = TargetOfMTP(tmp_path / "target", 3, "deepseek_v3")
    proposer = target.proposer()
    for number in range(12):
        text = [*range(3 + number, 43 + number)]
        asked = Drafted.start(proposer, text, number)
        deliver(asked, target, 0, len(text) - 1)
        passes = 0
        while asked.propose(CHILDREN) is None:
            passes += 1
            assert passes < 6
        asked.decide(9)
        asked.tree.drop_unfed()
        deliver(asked, target, len(text) - 1, len(text))
        asked.add(target.check(asked, [0]))
        target.check(asked, [1, 2])
        proposer.end_sequence(number)
        for layer in proposer.layers:
            layer.runner.check_integrity()
