"""Every supported architecture, cut into slices, against Hugging Face on the same weights."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import HashStore
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from pipespec.core import SamplingParams
from pipespec.engine.attention.attention_plan import AttentionPlan, Segment, causal_plan
from pipespec.engine.checkpoint.fingerprint import fingerprint
from pipespec.engine.formats.architectures import ARCHITECTURES, WRAPPERS, text_names
from pipespec.engine.graphs.graphs import CaptureFunction
from pipespec.engine.inspection.inspection import inspect
from pipespec.engine.recurrence import recurrent_plan, state_sizes
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.speedups import capture_graphs, compile_slice
from pipespec.engine.tensor_parallel.tp_member import TPMember, follow_tp_leader, leading_tp_group
from pipespec.errors import ModelError, RankFailed
from pipespec.sampling.draw import draw
from pipespec.transport.tp_group import TPProcessGroup
from tests.helpers.decoding import NUM_SLOTS, decode, load, run
from tests.helpers.kinds import ATTENDING, SHARED, by_kind
from tests.helpers.members import RecordableGroup, together
from tests.helpers.models import (
    CONFIGS,
    MULTIMODAL,
    NUM_LAYERS,
    VOCAB_SIZE,
    build,
    build_multimodal,
    shared,
)
from tests.helpers.recording import stand_in

T = TypeVar("T")
NEW_TOKENS = 16
OF_MEMBERS = 6  # tokens; each member computes them with others
# Compiled in every run: windows and caps, sinks and experts.
# One with running states, which is refused.
COMPILED = ("gemma2", "gpt_oss", "qwen3_next")
# Multimodal checkpoints whose text part is a common architecture, read as those of the others are.
COMMON_TEXT = ("aya_vision", "internvl", "llava")
# Numbers of tensor-parallel members: as many as there are KV heads, and more. The short suite tries
# the larger one with a dense one, and with one with experts.
MEMBERS = (2, 4)
# The host chooses the experts of these, so that they are not compiled.
ON_THE_HOST = ("longcat_flash",)
# Layers of these differ in their K and V; the most that a layer has is foretold.
UNEQUAL_KV = ("dots3_note_text", "gemma4_text", "gemma4_unified_text", "mimo_v2_flash")
# Transformers' own distance from double precision, where that is more than 1e-4; the rows of a tree
# are within 2e-5.
ROUNDING = {"qwen3_next": 3e-4}
# Transformers has no tensor-parallel plan for these, or one with rules that we do not have.
WITHOUT_PLAN = (
    *("aria_text", "bamba", "beam", "bitnet", "dots3_note_text", "falcon_h1", "gemma4_text"),
    *("gemma4_unified_text", "gpt_oss", "granite_swa", "granitemoe_swa", "hunyuan_v1_dense"),
    *("jetmoe", "laguna", "lfm2", "llama4_text", "longcat_flash", "mimo_v2_flash", "persimmon"),
    "stablelm",
)


class Conforming:
    """A tiny checkpoint of an architecture, loaded once for all tests of it: whole by Hugging
    Face, and in slices."""

    def __init__(self, path: Path):
        self.path = path
        self._slices: dict[int, list[ModelSlice]] = {}

    @cached_property
    def reference(self) -> PreTrainedModel:
        # SDPA of Transformers ignores Gemma 2's cap on the scores, eager does not.
        model = AutoModelForCausalLM.from_pretrained(self.path, attn_implementation="eager")
        model.generation_config.pad_token_id = 0
        return model

    @cached_property
    def static(self) -> list[ModelSlice]:
        """All layers, with the backend that computes on the device alone."""
        return load(self.path, 1, attention="static")

    def slices(self, count: int) -> list[ModelSlice]:
        if count not in self._slices:
            self._slices[count] = load(self.path, count)
        return self._slices[count]


@pytest.fixture(scope="module", params=by_kind())
def model(request) -> Conforming:
    """Each architecture in turn."""
    return Conforming(shared(request.param))


@pytest.fixture
def some_of(model, long):
    """`some_of(names)` skips the test of any other architecture, unless every case is tried."""

    def check(names: tuple[str, ...]) -> None:
        if model.path.name not in names and not long:
            pytest.skip("long: pass --long")

    return check


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def test_every_architecture_has_a_conformance_test():
    assert sorted(ARCHITECTURES) == sorted(CONFIGS)


def test_greedy_tokens_equal_generate(model, long):
    prompt = _random_tokens(13, seed=1)
    expected = model.reference.generate(
        prompt[None], max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True
    )[0, len(prompt) :]
    assert len(expected.unique()) > 4, "the reference repeats itself and would prove little"
    # The nodes of trees have the logits of the reference in two slices (below).
    for num_slices in (1, 2, 4) if long else (4,):
        tokens = decode(model.slices(num_slices), prompt, 5, NEW_TOKENS)
        assert tokens == expected.tolist(), f"{num_slices} slices"


def test_members_of_a_group_decode_as_the_whole(model, some_of, long):
    """What each holds is foretold."""
    some_of(SHARED)
    prompt, whole = _random_tokens(13, seed=1), model.slices(2)
    if model.path.name in WITHOUT_PLAN:
        with pytest.raises(ModelError, match="no tensor-parallel plan"):
            together(2, lambda group: load(model.path, 2, group))
        return
    expected = decode(whole, prompt, 5, OF_MEMBERS)
    info, bytes_of_whole = inspect(model.path), sum(part.num_weight_bytes for part in whole)
    many = model.path.name in ("llama", "mixtral")
    for size in MEMBERS if long else (MEMBERS[many],):
        members = together(size, lambda group: _member(group, model.path, prompt))
        assert [tokens for tokens, _ in members] == [expected] * size, f"{size} members"
        foretold = info.loaded_part(info.stored, size, "float32")
        twice = info.tied * foretold.embedding  # once in each of two slices
        for _, num_bytes in members:
            # Without the indexers of sparse attention, and biases that one member adds.
            assert 0.75 < num_bytes / (foretold.total + twice) <= 1.01
            assert num_bytes < bytes_of_whole


def test_members_draw_the_tokens_that_one_draws():
    """From the logits of all parts of the vocabulary, with the noise of seed and position."""
    path, prompt = shared("llama"), _random_tokens(13, seed=1)
    expected = [_drawn(load(path, 1), prompt, seed) for seed in (1, 2)]
    assert expected[0] != expected[1]
    members = together(
        4,
        lambda group: [
            _drawn(part, prompt, seed) for part in [load(path, 1, group)] for seed in (1, 2)
        ],
    )
    assert members == [expected] * 4


def test_a_member_reads_no_other_part_of_the_files(tmp_path):
    """Of matrices that are divided by rows and by columns."""
    path = build("llama", tmp_path / "model")
    prompt = _random_tokens(13, seed=1)
    expected = decode(load(path, 1), prompt, 5, NEW_TOKENS)
    damaged = tmp_path / "damaged"
    shutil.copytree(path, damaged)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "up_proj.weight")):
            tensor[len(tensor) // 2 :] = torch.nan
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[:, tensor.shape[1] // 2 :] = torch.nan
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})

    def tokens(group: TPProcessGroup) -> list[int]:
        (part,) = load(path if group.rank else damaged, 1, group)
        return decode([part], prompt, 5, NEW_TOKENS)

    assert together(2, tokens) == [expected] * 2


def test_norms_of_single_heads_that_members_cannot_share_are_refused(tmp_path):
    path = build("cohere", tmp_path / "model", use_qk_norm=True)
    with pytest.raises(ModelError, match="norm for every attention head"):
        together(2, lambda group: load(path, 1, group))


def test_members_attend_to_trees_on_the_device_alone():
    """And say that nothing captures or compiles what the host does between their products."""
    path = shared("gemma2")
    tree = _RandomTree()

    def member(group: TPProcessGroup) -> tuple[Tensor, list[str]]:
        (part,) = load(path, 1, group, attention="static")
        capture_graphs(part, [8])
        compile_slice(part)
        return tree.run([part]), part.refused

    expected = tree.run(load(path, 1))
    for logits, refused in together(2, member):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        graphs, compiler = refused
        assert "without graphs, as the host adds up" in graphs
        assert "is not compiled" in compiler


@pytest.mark.long
@pytest.mark.parametrize(
    ("model_type", "attention", "buckets"),
    [
        ("gemma2", "sdpa", []),
        ("gemma2", "static", []),
        ("gemma2", "static", [4, 16]),
        ("qwen3_next", "sdpa", []),
    ],
)
def test_tp_workers_compute_the_first_members_calls(model_type, attention, buckets):
    """In several lives of the group, with the weights of the first; all attend alike, and replay
    what they have recorded together."""
    path = shared(model_type)
    trees = [_RandomTree(seed) for seed in (3, 4)]
    meeting = [HashStore(), HashStore()]

    def member(rank: int) -> list[Tensor]:
        # The first member alone is told by what it attends, and has fewer slots.
        how, slots = ("sdpa", 2 * NUM_SLOTS) if rank else (attention, NUM_SLOTS)
        layers, part_of = range(NUM_LAYERS), TPMember(rank, 2)
        part = ModelSlice.load(path, layers, num_slots=slots, attention=how, parallel=part_of)
        if rank == 0 and buckets:
            capture_graphs(part, buckets, stand_in)
        found = []
        for tree, store in zip(trees, meeting, strict=True):
            group = RecordableGroup(store, rank, 2)
            if rank:
                follow_tp_leader(part, group, stand_in)
            else:
                with leading_tp_group(part, group, stand_in) as num_slots:
                    assert num_slots == NUM_SLOTS
                    found.append(tree.run([part]))
            assert (part.attention, part.refused) == (attention, [])
            assert (part.graphs.rows, part.graphs.captured) == ((), tuple(buckets))
        return found

    whole = load(path, 1)
    of_leader, of_worker = both(member)
    assert of_worker == []
    for tree, logits in zip(trees, of_leader, strict=True):
        near = ROUNDING.get(model_type, 1e-4)
        torch.testing.assert_close(logits, tree.run(whole), rtol=1e-4, atol=near)


def test_graphs_that_the_first_member_lacks_are_dropped():
    """They were captured while the slice was loaded, and gather nothing from the others."""
    path, store = shared("llama"), HashStore()

    def member(rank: int) -> tuple[int, ...]:
        (part,) = load(path, 1, parallel=TPMember(rank, 2), attention="static")
        if rank:
            capture_graphs(part, [16], stand_in)
            assert part.graphs.rows == (16,)
        _meet(part, RecordableGroup(store, rank, 2), stand_in)
        return part.graphs.captured

    assert both(member) == [(), ()]


def test_graphs_that_one_member_cannot_capture_are_captured_by_none():
    """Each replay would wait for all members; those of other sizes serve."""
    path, store = shared("llama"), HashStore()
    refused = ("no memory", "another device of the stage cannot capture it")

    def member(rank: int) -> tuple[tuple[int, ...], list[str]]:
        attempts = []

        def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
            attempts.append(stand_in(run))  # which, unlike CUDA, computes
            if rank == 0 and len(attempts) == 2:
                raise RuntimeError(refused[0])
            return attempts[-1]

        (part,) = load(path, 1, parallel=TPMember(rank, 2), attention="static")
        if rank == 0:
            capture_graphs(part, [4, 16], stand_in)
        _meet(part, RecordableGroup(store, rank, 2), capture)
        return part.graphs.captured, part.refused

    assert both(member) == [
        ((4,), [f"Batches of up to 16 rows are computed without a graph: {why}."])
        for why in refused
    ]


def test_graphs_are_captured_again_after_a_member_was_lost_meanwhile():
    path = shared("llama")
    (part,) = load(path, 1, parallel=TPMember(0, 2), attention="static")
    capture_graphs(part, [4, 16], stand_in)

    class Lost:
        """The others are there until the first graph is captured."""

        rank, size, supports_graphs = 0, 2, True
        gone = False

        def gather(self, mine: Tensor) -> list[Tensor]:
            if self.gone:
                raise RankFailed("a member has gone")
            return [mine, mine]

        def broadcast(self, message: Tensor) -> None: ...

    group = Lost()

    def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        found = stand_in(run)
        group.gone = True
        return found

    with pytest.raises(RankFailed), leading_tp_group(part, group, capture):
        pass
    assert (part.graphs.rows, part.graphs.captured) == ((), (4, 16))


def test_tree_rows_have_the_logits_of_their_own_path(model):
    tree = _RandomTree()
    logits = tree.run(model.slices(2))
    with torch.inference_mode():
        for node in range(24):
            expected = model.reference(tree.path(node)[None], use_cache=False).logits[0, -1]
            torch.testing.assert_close(
                logits[node], expected, rtol=1e-4, atol=ROUNDING.get(model.path.name, 1e-4)
            )


def test_plain_torch_attention_serves_every_architecture(model, some_of):
    some_of(ATTENDING)
    tree = _RandomTree()
    expected = tree.run(model.slices(2))
    torch.testing.assert_close(tree.run(model.static), expected, rtol=1e-4, atol=1e-4)


def test_a_slice_is_one_graph_for_every_plan(model, some_of):
    """Compiled as a whole, with attention as one operation in each layer, it computes any batch of
    as many rows; so it can be recorded as a CUDA graph."""
    some_of(COMPILED)
    if model.path.name in ON_THE_HOST:
        pytest.skip("the host chooses its experts")
    (part,) = model.static
    if part.recurrent:
        compile_slice(part)
        assert " running state." in part.refused[0]
        return
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(part.compute, fullgraph=True, backend=keep, dynamic=False)
    slots = np.random.default_rng(5).permutation(NUM_SLOTS)
    ids, rows = _random_tokens(24, seed=6), 6
    for start in range(0, 24, rows):
        plan = causal_plan(slots[:start], slots[start : start + rows])
        inputs = ids[start : start + rows], torch.arange(start, start + rows)
        with torch.inference_mode():
            expected = part.forward(*inputs, plan)
            torch.testing.assert_close(compiled(*inputs), expected, rtol=0, atol=1e-6)
    assert len(graphs) == 1, "another plan made another graph"
    calls = [node for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert [str(node.target) for node in calls].count("pipespec.attend") == NUM_LAYERS


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["kimi_linear", "bamba"])
def test_graphs_replay_layers_with_a_running_state(model_type, monkeypatch):
    """Also after another sequence, and a batch too large for the graph, made their pools grow."""
    monkeypatch.setattr(state_sizes, "LEAST_ENTRIES", 16)
    monkeypatch.setattr(recurrent_plan, "MOST_DEPTH", 10)
    captured, replayed = [], []

    def capture(run):
        captured.append(run)
        replay, result = stand_in(run)
        return lambda: (replayed.append(run), replay()), result

    path = shared(model_type)
    (part,) = load(path, 1, attention="static")
    capture_graphs(part, [2, 8], capture)
    assert (part.graphs.rows, part.refused, len(captured)) == ((2, 8), [], 2)
    replayed.clear()
    first, second = (_RandomTree(seed, num_nodes=80) for seed in (3, 4))
    batches = [slice(0, 2), slice(2, 10), slice(10, 40), slice(40, 80)]
    near = ROUNDING.get(model_type, 1e-4)
    for tree in (first, second):
        expected = tree.run(load(path, 1), batches)
        torch.testing.assert_close(tree.run([part], batches), expected, rtol=1e-4, atol=near)
    assert len(replayed) == 4, "batches of 2 and 8 rows"
    assert len(captured) == 4, "each graph anew after the growth between the trees"


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=pytest.mark.long) if name in COMMON_TEXT else name
        for name in MULTIMODAL
    ],
)
def test_the_text_part_of_a_multimodal_checkpoint_decodes_alone(tmp_path, model_type):
    path = build_multimodal(model_type, tmp_path / "model")
    whole = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager")
    whole.generation_config.pad_token_id = 0
    prompt = _random_tokens(13, seed=1)
    expected = whole.generate(prompt[None], max_new_tokens=NEW_TOKENS, do_sample=False)
    info = inspect(path)
    text = [name for name in load_file(path / "model.safetensors") if "language_model." in name]
    assert info.num_layers == NUM_LAYERS
    assert info.model_type == WRAPPERS[model_type]
    assert len(text) > 4 * NUM_LAYERS
    for num_slices in (1, 2):
        slices = load(path, num_slices)
        assert decode(slices, prompt, 5, NEW_TOKENS) == expected[0, len(prompt) :].tolist()
        held = sum(part.num_weight_bytes for part in slices)
        assert held <= info.stored.total + (info.stored.embedding if info.tied else 0)


@pytest.mark.parametrize(
    ("base", "head"),
    [("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")],
)
def test_a_multimodal_checkpoint_decodes_by_older_and_newer_names(tmp_path, base, head):
    path = build_multimodal("mistral3", tmp_path / "model")
    prompt = _random_tokens(13, seed=1)
    expected = decode(load(path, 2), prompt, 5, NEW_TOKENS)
    tensors = load_file(path / "model.safetensors")
    prefixes = {"model.": base, "lm_head.": head}
    renamed = {
        re.sub(r"^(model|lm_head)\.", lambda found: prefixes[found[0]], name): tensors[stored]
        for stored, name in text_names(tensors).items()
    }
    assert len(renamed) < len(tensors)
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    assert decode(load(path, 2), prompt, 5, NEW_TOKENS) == expected


def test_files_of_other_modalities_may_be_missing(tmp_path):
    path = build_multimodal("mistral3", tmp_path / "model", max_shard_size="20KB")
    prompt = _random_tokens(13, seed=1)
    expected = decode(load(path, 2), prompt, 5, NEW_TOKENS)
    shard_of = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    others = set(shard_of.values()) - {shard_of[name] for name in text_names(shard_of)}
    assert others
    for shard in others:
        (path / shard).unlink()
    assert fingerprint(str(path)).problem is None
    assert inspect(path).num_layers == NUM_LAYERS
    assert decode(load(path, 2), prompt, 5, NEW_TOKENS) == expected


def test_layers_that_a_slice_cannot_compute_are_refused(tmp_path):
    path = build("gemma4_text", tmp_path / "model", num_kv_shared_layers=2)
    with pytest.raises(ModelError, match=r"num_kv_shared_layers.*take a checkpoint of gemma4_text"):
        inspect(path)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("own", [0, 1, NUM_LAYERS - 1])
def test_a_slice_needs_and_holds_its_own_tensors_only(tmp_path, own, tied):
    path = build("llama", tmp_path / "model", tie_word_embeddings=tied)
    head = "embed_tokens" if tied else "lm_head"
    beside = {0: "embed_tokens", NUM_LAYERS - 1: rf"model\.norm|{head}"}.get(own, "nothing")
    tensors = load_file(path / "model.safetensors")
    kept = {k: v for k, v in tensors.items() if re.search(rf"layers\.{own}\.|{beside}", k)}
    assert len(kept) < len(tensors) / 3
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    assert ModelSlice.load(path, range(own, own + 1), num_slots=4).num_weight_bytes == sum(
        tensor.nbytes for tensor in kept.values()
    )


def test_the_pool_is_as_large_as_the_checkpoint_foretells(model):
    parts, info = model.slices(2), inspect(model.path)
    num_kv_bytes = sum(part.num_kv_bytes for part in parts)
    slot_bytes = info.kv_size * info.kv_layers(range(NUM_LAYERS)) * parts[0].dtype.itemsize
    if model.path.name in UNEQUAL_KV:
        assert 0.5 * slot_bytes < num_kv_bytes / NUM_SLOTS < slot_bytes
    else:
        assert num_kv_bytes == NUM_SLOTS * slot_bytes


def test_running_states_are_as_large_as_the_checkpoint_foretells(model):
    """After a prompt and a tree."""
    info = inspect(model.path)
    if info.recurrent is None:
        assert not any(part.recurrent for part in model.slices(2))
        return
    (whole,) = load(model.path, 1)
    tree = _RandomTree()
    tree.run([whole], batches=[slice(0, 24)])
    book, states = whole.recurrent._book, whole.recurrent.states
    foretold = info.recurrent_bytes(range(NUM_LAYERS), "float32", book.num_states, book.capacity)
    assert sum(pool.nbytes for each in states for pool in each.pools.values()) == foretold
    assert book.capacity < 64, "entries are for nodes alone"


def both(member: Callable[[int], T]) -> list[T]:
    """What two members return, each of which meets the other by itself."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        return [*pool.map(member, range(2))]


def _member(group: TPProcessGroup, path: Path, prompt: Tensor) -> tuple[list[int], int]:
    """What a member of two slices decodes, and the bytes of its weights."""
    parts = load(path, 2, group)
    tokens = decode(parts, prompt, 5, OF_MEMBERS)
    return tokens, sum(part.num_weight_bytes for part in parts)


def _meet(part: ModelSlice, group: TPProcessGroup, capture: CaptureFunction) -> None:
    """An epoch in which nothing is computed."""
    if group.rank:
        follow_tp_leader(part, group, capture)
    else:
        with leading_tp_group(part, group, capture):
            pass


def _drawn(slices: list[ModelSlice], prompt: Tensor, seed: int) -> list[int]:
    sampling = [SamplingParams(temperature=0.8, top_p=0.95, seed=seed)]

    def choose(logits: Tensor, position: int) -> int:
        (token,) = draw(logits[None].double(), sampling, [position])
        assert token is not None
        return token

    return decode(slices, prompt, 5, NEW_TOKENS, choose)


def _random_tokens(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB_SIZE, (count,), generator=generator)


class _RandomTree:
    """A prompt and random nodes below it, with scattered slots."""

    def __init__(self, seed: int = 3, num_nodes: int = 24):
        generator = torch.Generator().manual_seed(seed)
        self.prompt = _random_tokens(11, seed=2)
        self.tokens = _random_tokens(num_nodes, seed)
        # Few roots and a bias to recent parents: several branches, several depths.
        self.parent = [-1, -1] + [
            int(torch.randint(max(-1, i - 6), i, (), generator=generator))
            for i in range(2, num_nodes)
        ]
        self.slots = np.random.default_rng(seed).permutation(NUM_SLOTS)

    def ancestry(self, node: int) -> list[int]:
        """From the child of the prompt down to the node itself."""
        above = self.ancestry(self.parent[node]) if self.parent[node] >= 0 else []
        return [*above, node]

    def path(self, node: int) -> Tensor:
        return torch.cat([self.prompt, self.tokens[self.ancestry(node)]])

    def run(
        self,
        slices: list[ModelSlice],
        batches: Sequence[slice] = (slice(0, 3), slice(3, 14), slice(14, 24)),
    ) -> Tensor:
        """Logits `[nodes, vocab]`, with the nodes computed batch by batch."""
        size = len(self.prompt)
        prefix, node_slots = self.slots[:size], self.slots[size:]
        plan = causal_plan(prefix[:0], prefix)
        run(slices, self.prompt, torch.arange(size), plan)
        depths = torch.tensor([len(self.ancestry(i)) for i in range(len(self.tokens))])
        positions = size + depths - 1
        assert len(positions[batches[-1]].unique()) > 2
        logits = []
        for batch in batches:
            num_keys = batch.stop
            mask = torch.zeros(batch.stop - batch.start, num_keys, dtype=torch.bool)
            for row, node in enumerate(range(batch.start, batch.stop)):
                mask[row, self.ancestry(node)] = True
            segment = Segment(
                rows=slice(0, len(mask)),
                positions=positions[batch].numpy(),
                prefix=prefix,
                tree=node_slots[:num_keys],
                tree_positions=positions[:num_keys].numpy(),
                mask=mask.numpy(),
            )
            plan = AttentionPlan(node_slots[batch], [segment])
            logits.append(run(slices, self.tokens[batch], positions[batch], plan))
        return torch.cat(logits)
