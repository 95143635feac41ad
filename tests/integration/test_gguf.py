import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipespec.client.model_info import full_name
from pipespec.config.choices import options
from pipespec.core import COMMITTED, DRAFT, Batch, Verdict
from pipespec.engine.attention.attention_plan import causal_plan
from pipespec.engine.checkpoint import tokenizer
from pipespec.engine.checkpoint.fingerprint import fingerprint
from pipespec.engine.formats.gguf import GGUF, KEPT_KINDS, GgufFiles
from pipespec.engine.ggml import library as ggml
from pipespec.engine.graphs.ggml_graph import SliceGraph
from pipespec.engine.inspection.inspection import inspect
from pipespec.engine.slice.kv_allocator import KVSlotAllocator
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.runner import SliceRunner
from pipespec.errors import ModelError
from pipespec.system.folders import resource_dir
from tests.helpers import llama_cpp
from tests.helpers.matrix import some_of
from tests.helpers.models import NUM_LAYERS, build, logits, weights
from tools.rig import cluster
from tools.rig.gguf_files import write

DEMO = resource_dir("demo")
PROMPT = list(range(20, 33))
NEW_TOKENS = 12
MADE = (Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q5_1)
# The difference that rounding rows to 8 bits makes, as ggml does in its products.
ROUNDED = 0.05
KEPT = [Type[each] for each in KEPT_KINDS if each != "MXFP4"]
WIDE = {"hidden_size": 256, "intermediate_size": 512}
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
SPECIAL = ("glm4_moe", "gpt_oss", "deepseek_v3", "deepseek_v2", "mistral", "ministral3")
PERIOD = 6
LATENT = {
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Kinds, and types of blocks, of which every run of the tests decodes a text.
READ = ("llama", "deepseek_v2", "gemma3_text", "gpt_oss")
BLOCKS = (Type.Q4_0, Type.Q4_K, Type.Q8_0)
# What llama.cpp takes for granted of an architecture.
GRANTED = {
    "qwen2": {
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * NUM_LAYERS,
    },
    "qwen2_moe": {
        "norm_topk_prob": False,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "qwen3_moe": {"norm_topk_prob": True, "moe_intermediate_size": 256, "head_dim": 64},
    "mixtral": {"sliding_window": None},
    "gemma3_text": {
        "tie_word_embeddings": True,
        "num_hidden_layers": PERIOD,
        "layer_types": ["sliding_attention"] * (PERIOD - 1) + ["full_attention"],
        "query_pre_attn_scalar": 64,
        "head_dim": 64,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
    "glm4_moe": {
        "moe_intermediate_size": 256,
        "head_dim": 64,
        "use_qk_norm": True,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "gpt_oss": {
        "intermediate_size": 256,
        "head_dim": 64,
        "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
    "deepseek_v2": {**LATENT, "moe_intermediate_size": 256},
    "deepseek_v3": {
        **LATENT,
        "moe_intermediate_size": 256,
        "n_group": 2,
        "topk_group": 1,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    },
    "mistral": {"sliding_window": None},
    "ministral3": {
        "head_dim": 64,
        "rope_parameters": {
            **YARN,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """`files(kind, type)`: a random model as a GGUF file, with matrices of that type."""
    root = tmp_path_factory.mktemp("gguf")

    def get(kind: str, stored: Type) -> Path:
        file = root / f"{kind}-{stored.name}.gguf"
        if not file.exists():
            source = root / kind
            if not source.exists():
                # Transformers passes over the size of a head, which is 128 in Qwen3.
                wide = {"head_dim": 128} if kind == "qwen3" else {}
                build(kind, source, **{**WIDE, **wide, **GRANTED.get(kind, {})})
            embedding = Type.F32 if stored == Type.F32 else Type.F16
            few = ("embed", "kv_b_proj")  # of which llama.cpp has no K-quants
            write(
                source,
                file,
                kind,
                lambda name: embedding if any(part in name for part in few) else stored,
            )
        return file

    return get


def in_blocks(
    path: Path, layers: range = range(NUM_LAYERS), num_slots: int = 64, dtype=torch.float32
) -> ModelSlice:
    """A slice that keeps the blocks of the file."""
    return ModelSlice.load(path, layers, dtype=dtype, quantization=GGUF, num_slots=num_slots)


def bytes_in_file(path: Path) -> int:
    """Of the second layer."""
    tensors = GGUFReader(path).tensors
    return sum(int(each.n_bytes) for each in tensors if each.name.startswith("blk.1."))


def whole(path: Path) -> AutoModelForCausalLM:
    """As Transformers reads it."""
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )


@pytest.mark.parametrize(
    ("kind", "stored"),
    some_of(("llama", "qwen2", "qwen3"), [each.name for each in (*MADE, Type.Q4_K, Type.Q6_K)]),
)
def test_a_slice_holds_the_dequantised_weights_bit_for_bit(files, kind, stored):
    """Those that Transformers' own reader gives the whole model."""
    path = files(kind, Type[stored])
    expected = whole(path).state_dict()
    for start, stop in ((0, 4), (1, 3)):
        found = weights(path, range(start, stop))
        for name, tensor in found.items():
            if name.startswith("layers."):
                _, number, rest = name.split(".", 2)
                name = f"model.layers.{start + int(number)}.{rest}"
            elif not name.startswith("lm_head"):
                name = f"model.{name}"
            assert torch.equal(tensor, expected[name]), name
    assert inspect(path).loaded("float32", None).layers[1] == sum(
        tensor.nbytes for name, tensor in expected.items() if ".layers.1." in name
    )


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in READ else pytest.param(kind, marks=pytest.mark.long)
        for kind in ("llama", "qwen2", "qwen3", "phi3", "gemma3_text", *MIXTURES, *SPECIAL)
    ],
)
def test_a_file_of_plain_numbers_decodes_as_its_source(files, kind):
    """The same weights under the same settings: the config too is read as llama.cpp means it."""
    path = files(kind, Type.F32)
    source = path.parent / kind
    found, expected = weights(path, range(4)), weights(source, range(4))
    assert found.keys() == expected.keys()
    exact = 1e-6 if kind == "gemma3_text" else 0  # whose norms are stored plus 1
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=exact)
    prompts = [PROMPT[start:] for start in (0, 3)]
    assert text(path, "cluster.stages=2", "model.dtype=float32") == cluster.reference(
        source, prompts, NEW_TOKENS
    )


def test_layers_for_multi_token_prediction_are_left_out(tmp_path):
    source = build("glm4_moe", tmp_path / "source", **{**WIDE, **GRANTED["glm4_moe"]})
    one = {"glm4moe__nextn_predict_layers": 1}
    path = write(source, tmp_path / "it.gguf", "glm4_moe", lambda _: Type.F32, **one)
    assert inspect(path).num_layers == NUM_LAYERS - 1
    found, expected = weights(path, range(3)), weights(source, range(3))
    assert all(torch.equal(found[name], each) for name, each in expected.items() if "norm" in name)


def text(path: Path, *overrides: str) -> list[list[int]]:
    """Two requests at once."""
    deployment = cluster.make_deployment(path, path, *overrides)
    return cluster.answers(deployment, [PROMPT[start:] for start in (0, 3)], NEW_TOKENS)


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        *((kind, Type.Q8_0) for kind in ("qwen2", "qwen3", "phi3", "gemma3_text")),
        *(
            pytest.param("llama", each, marks=[] if each in BLOCKS else [pytest.mark.long])
            for each in KEPT
        ),
    ],
    ids=str,
)
def test_blocks_stay_as_they_are(files, kind, stored):
    """The logits are those of the dequantised model but for the rounding of rows to 8 bits, and
    memory is foretold."""
    path = files(kind, stored)
    info = inspect(path)
    for dtype in ("bfloat16", "float32"):
        assert info.weight_format(None, "auto", dtype) == GGUF
        assert info.weight_format(None, "no", dtype) is None
    expected = logits(path, PROMPT, 1, dtype=torch.float32)
    found = logits(path, PROMPT, 2, dtype=torch.float32, quantization=GGUF)
    assert (found - expected).norm() <= ROUNDED * expected.norm()
    # bfloat16 rounds the dequantised model too.
    rounded, kept = (
        (logits(path, PROMPT, 2, dtype=torch.bfloat16, quantization=held) - expected).norm()
        for held in (None, GGUF)
    )
    assert kept <= 2 * rounded + ROUNDED * expected.norm()
    model = in_blocks(path, range(1, 2))
    assert model.num_weight_bytes <= info.loaded("float32", GGUF).layers[1]
    assert model.num_weight_bytes == bytes_in_file(path)


@pytest.mark.parametrize("stored", BLOCKS, ids=lambda each: each.name)
def test_without_ggml_blocks_are_dequantised_as_they_are_used(files, stored, monkeypatch):
    monkeypatch.setattr(ggml, "load", lambda: None)
    path = files("llama", stored)
    expected = logits(path, PROMPT, 1, dtype=torch.float32)
    found = logits(path, PROMPT, 2, dtype=torch.float32, quantization=GGUF)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_row_of_a_whole_slice_is_the_same_to_the_bit_in_every_batch(files, kind):
    """Beside rows of another sequence and in other KV slots, too."""
    path, rows, tokens = files(kind, Type.Q4_K), len(PROMPT), torch.tensor(PROMPT)
    model = in_blocks(path, num_slots=2 * rows)
    assert model.attention == "ggml"
    slots = np.random.default_rng(0).permutation(2 * rows)
    whole = model.forward(tokens, torch.arange(rows), causal_plan(slots[:0], slots[:rows]))
    for at in range(rows):
        plan = causal_plan(slots[rows : rows + at], slots[rows + at : rows + at + 1])
        alone = model.forward(tokens[at : at + 1], torch.tensor([at]), plan)
        assert torch.equal(alone[0], whole[at])
        assert torch.equal(model.logits(alone)[0], model.logits(whole)[at])


def test_a_slice_with_one_wrong_layer_is_not_computed_as_one_graph(files, monkeypatch):
    right = SliceGraph.part

    def wrong(graph: SliceGraph, start: int, stop: int) -> SliceGraph:
        return right(graph, 1, 2) if start == 2 else right(graph, start, stop)

    monkeypatch.setattr(SliceGraph, "part", wrong)
    model = in_blocks(files("llama", Type.Q4_K))
    assert model.attention != "ggml"
    assert "is off by" in model.refused[0]


@pytest.mark.parametrize("chunks", [[9, 1, 1, 1, 1], [4, 4, 5], [13], [1] * 13, [10, 3]])
def test_a_text_is_the_same_to_the_bit_in_any_chunks_of_its_prompt_and_answer(files, chunks):
    """As many decoded one by one are read again after a failure, beside another sequence too."""
    prompt, num_tokens = 9, 13
    model = in_blocks(files("llama", Type.Q4_K))

    def hidden(chunks: Sequence[int], sequences: int) -> torch.Tensor:
        runner, found, at = SliceRunner(model, 64), [], 0
        for sequence in range(sequences):
            runner.start_sequence(sequence, prompt_len=prompt)
        for size in chunks:
            rows = [
                (sequence, i, i - 1, 7 * i + 3, i, COMMITTED)
                for sequence in range(sequences)
                for i in range(at, at + size)
            ]
            found.append(runner.compute(Batch(0, np.array(rows))).hidden[-size:])
            at += size
        return torch.cat(found)

    expected = hidden([prompt] + [1] * (num_tokens - prompt), 1)
    assert torch.equal(hidden(chunks, 1), expected)
    assert torch.equal(hidden(chunks, 3), expected)


def _spread(slots: KVSlotAllocator) -> Iterator[None]:
    """Every third of the first 39 slots is free, and all behind them."""
    taken = slots.allocate(39)
    slots.release(taken[::3])
    yield


def _wrapped(slots: KVSlotAllocator) -> Iterator[None]:
    """The last twelve slots are free; behind the prompt others below them alone."""
    taken = slots.allocate(52)
    yield
    slots.release(taken)


def _undisturbed(_: KVSlotAllocator) -> Iterator[None]:
    yield


@pytest.mark.parametrize("occupy", [_spread, _wrapped])
@pytest.mark.parametrize("drafted", [False, True])
def test_a_text_is_the_same_to_the_bit_wherever_its_slots_are(files, occupy, drafted):
    """Read in place, gathered, and moved where they fall; with draft tokens before it or not."""
    prompt, num_tokens = 9, 19
    model = in_blocks(files("llama", Type.Q4_K))
    assert model.attention == "ggml"

    def token(position: int) -> int:
        return 7 * position + 3

    def hidden(occupy: Callable[[KVSlotAllocator], Iterator[None]], drafted: bool) -> torch.Tensor:
        runner, found = SliceRunner(model, 64), []
        others = occupy(runner.slots)
        next(others)
        runner.start_sequence(0, prompt_len=prompt)
        read = [(0, i, i - 1, token(i), i, COMMITTED) for i in range(prompt)]
        found.append(runner.compute(Batch(0, np.array(read))).hidden)
        next(others, None)
        at, tip = prompt, prompt - 1
        while at < num_tokens:
            rows = [(0, at, tip, token(at), at, COMMITTED)]
            if drafted and at < prompt + 5:  # the second of three children is right
                follows = at + 1
                rows += [
                    (0, 100 * at + i, at, token(follows) + i - 1, follows, DRAFT) for i in range(3)
                ]
                found.append(runner.compute(Batch(0, np.array(rows))).hidden[[0, 2]])
                runner.apply([Verdict(0, follows, (token(follows),))])
                at, tip = at + 2, 100 * at + 1
            else:
                found.append(runner.compute(Batch(0, np.array(rows))).hidden)
                at, tip = at + 1, at
        return torch.cat(found)[:num_tokens]

    assert torch.equal(hidden(occupy, drafted), hidden(_undisturbed, False))


@pytest.mark.parametrize(
    ("kind", "most"),
    # Deepseek's K and V are expanded by a plain matrix, made of two.
    [(kind, 1.3 if kind == "deepseek_v3" else 1.15) for kind in (*MIXTURES, *SPECIAL[:3])],
)
def test_experts_stay_in_their_blocks(files, kind, most):
    path = files(kind, Type.Q4_K)
    info = inspect(path)
    expected = logits(path, PROMPT, 1, dtype=torch.float32)
    found = logits(path, PROMPT, 2, dtype=torch.float32, quantization=GGUF)
    differences = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    # A rounding may choose another expert of two that are nearly as good, for a row.
    assert (differences > ROUNDED).sum() <= 1
    model = in_blocks(path, range(1, 2), dtype=torch.bfloat16)
    # What is added to the scores of experts stays in float32.
    assert model.num_weight_bytes - info.loaded("bfloat16", GGUF).layers[1] <= 8
    assert model.num_weight_bytes <= most * bytes_in_file(path)


def test_of_a_layer_of_several_types_each_matrix_stays_as_it_is(tmp_path):
    """Of one layer gate and up stay in blocks, and down is plain."""
    source = build("mixtral", tmp_path / "source", **{**WIDE, **GRANTED["mixtral"]})

    def type_of(name: str) -> Type:
        plain = "embed" in name or name.startswith("lm_head")
        plain |= ".layers.1." in name and name.endswith("w2.weight")
        return Type.F16 if plain else Type.Q4_0

    path = write(source, tmp_path / "mixed.gguf", "mixtral", type_of)
    info = inspect(path)
    assert 0 < info.storage.kept_layers[1].weights < info.storage.kept_layers[0].weights
    model = in_blocks(path, range(1, 2), dtype=torch.bfloat16)
    assert model.num_weight_bytes <= info.loaded("bfloat16", GGUF).layers[1]
    expected = text(path, "cluster.stages=1", "policy=root")
    assert text(path, "cluster.stages=2", "policy=best_first") == expected


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        ("llama", Type.Q4_0),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("qwen3_moe", Type.Q8_0),
                ("glm4_moe", Type.Q6_K),
                ("gpt_oss", Type.Q4_0),
                ("deepseek_v3", Type.Q8_0),
                ("ministral3", Type.Q5_1),
            )
        ),
    ],
)
def test_the_text_of_kept_blocks_is_one_for_every_stage_count_and_policy(files, kind, stored, long):
    path = files(kind, stored)
    expected = text(path, "cluster.stages=1", "policy=root")
    assert len({tuple(tokens) for tokens in expected}) == 2
    ways = list(zip(cycle((2, 1, 4)), options("policy"), strict=False))
    every = kind == "llama" or (long and kind not in SPECIAL)
    for stages, policy in ways if every else [(4, "best_first")]:
        assert text(path, f"cluster.stages={stages}", f"policy={policy}") == expected


@pytest.mark.long
def test_a_scaled_rotary_embedding_is_read(tmp_path):
    """Linear scaling, by one of two names, Llama 3's, by the divisors of its frequencies, and
    LongRoPE's, by those of a short and a long context."""
    rope = {"rope_theta": 1000.0}
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=48, num_attention_heads=4, rope_parameters=rope | llama3)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1000.0 ** -(torch.arange(0, 12, 2) / 12)
    linear = {"rope_type": "linear", "factor": 4.0}
    ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (linear, {"llama__rope__scaling__factor": 4}),
        (linear, {"llama__rope__scale_linear": 4, "llama__rope__scaling__type": "linear"}),
        (llama3, {"rope_freqs__weight": (plain / scaled).numpy()}),
    ]
    longrope = {
        "rope_type": "longrope",
        "attention_factor": 1.25,
        "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
        "long_factor": [9.0, 8.0, 7.0, 6.0, 5.0, 4.0],
    }
    original = "original_max_position_embeddings"
    ways += [(longrope | {original: 8}, {}), (longrope | {original: 64}, {})]
    for i, (settings, stored) in enumerate(ways):
        kind = "phi3" if "long_factor" in settings else "llama"
        settings = {"rope_parameters": rope | settings} | {
            name: value for name, value in settings.items() if kind == "phi3" and name == original
        }
        source = build(kind, tmp_path / f"source_{i}", **settings)
        path = write(source, tmp_path / f"{i}.gguf", kind, lambda _: Type.F32, **stored)
        expected = cluster.reference(source, [PROMPT, PROMPT[3:]], NEW_TOKENS)
        context = 64 if settings.get(original) == 64 else 256  # the texts are shorter
        assert text(path, "cluster.stages=2", f"model.context={context}") == expected


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """The demo target, with its tokenizer."""
    file = tmp_path_factory.mktemp("demo") / "target.gguf"
    return write(DEMO / "target", file, "llama", lambda _: Type.F16, tokenizer=DEMO / "target")


def test_the_tokenizer_is_in_the_file(demo):
    found, expected = tokenizer.load(demo), tokenizer.load(DEMO / "target")
    text = "Once upon a time\n\n\tthere were 12 of them: “né” \U0001f600!"
    assert found.encode(text) == expected.encode(text)
    assert found.decode(expected.encode(text)) == expected.decode(expected.encode(text))
    assert found.chat_template == expected.chat_template
    assert inspect(demo).eos == inspect(DEMO / "target").eos
    again = AutoTokenizer.from_pretrained(demo.parent, gguf_file=demo.name)
    assert found.encode(text) == again.encode(text)


def test_a_checkpoint_of_several_files_is_that_of_one(files, tmp_path):
    """Whichever of them names it."""
    (alone := tmp_path / "parts").mkdir()
    source, type_of = files("llama", Type.Q8_0).parent / "llama", lambda _: Type.Q8_0
    one = write(source, tmp_path / "one.gguf", "llama", type_of)
    first = write(source, alone / "m.gguf", "llama", type_of, per_file=5)
    assert {inspect(each).path for each in alone.iterdir()} == {first}
    assert replace(inspect(first), path=one) == inspect(one)
    places = GgufFiles(first).places.tensors
    assert {place.file for place in places.values()} == set(alone.iterdir())
    torch.testing.assert_close(logits(first, PROMPT, 2), logits(one, PROMPT, 2), rtol=0, atol=0)
    before = fingerprint(str(first))
    last = max(alone.iterdir())
    last.write_bytes(last.read_bytes()[:-2] + b"\1\2")
    assert fingerprint(str(first)).config != before.config


def test_a_tokenizer_that_is_not_read_is_refused_before_anything_is_imported(tmp_path):
    fields = {"model": "gpt2", "pre": "strange", "tokens": ["a"] * 50_000}
    file = llama_cpp.write(tmp_path / "it.gguf", fields)
    code = (
        "import sys; from pipespec.cli.main import main; status = main(sys.argv[1:]);"
        "print(status, {'torch', 'transformers'} & sys.modules.keys())"
    )
    for command in (["generate", "--prompt", "a"], ["serve"], ["up"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *command, f"model.target={file}"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "2 set()\n"
        assert "cannot be used (it splits text as 'strange', which is not among" in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_file_is_known_by_its_whole_path(files, monkeypatch):
    path = files("llama", Type.F16)
    monkeypatch.chdir(path.parent)
    assert full_name(path.name) == str(path)


def test_hosts_compare_files(demo, tmp_path):
    other = shutil.copy(demo, tmp_path / "other.gguf")
    assert fingerprint(str(demo)).problem is None
    assert fingerprint(str(other)).config == fingerprint(str(demo)).config
    longer = tmp_path / "longer.gguf"
    longer.write_bytes(demo.read_bytes() + b"\0")
    assert fingerprint(str(longer)).shards != fingerprint(str(demo)).shards
    tuned = tmp_path / "tuned.gguf"  # other weights under the same settings
    tuned.write_bytes(demo.read_bytes()[:-2] + b"\1\2")
    assert fingerprint(str(tuned)).config != fingerprint(str(demo)).config


def test_a_folder_of_that_name_is_a_folder(tmp_path):
    path = build("llama", tmp_path / "model.gguf")
    assert inspect(path).storage.dequantized_from is None


def refused(file: Path, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence) as error:
        inspect(file)
    assert "\n" not in str(error.value)


def test_a_part_or_a_file_without_a_tokenizer_is_refused_in_a_sentence(files, tmp_path):
    path = files("llama", Type.F16)
    part = shutil.copy(path, tmp_path / "model-00001-of-00002.gguf")
    refused(part, "the first of 2 files, of which model-00002-of-00002.gguf is missing; put it")
    shutil.copy(path, tmp_path / "model-00002-of-00002.gguf")
    refused(part, r"00001-of-00002.gguf is not what it is called, part 1 of 2; fetch it again")
    with pytest.raises(ModelError, match=r"the tokenizer in .* cannot be used"):
        tokenizer.load(path)


ODD = np.full(31, 3, np.float32)


@pytest.mark.parametrize(
    ("kind", "metadata", "sentence"),
    [
        ("gemma2", {}, "of the architecture 'gemma2', which is not read from GGUF; read are llama"),
        ("llama", {"rope__scaling__type": "yarn"}, r"embedding \(yarn\), which is not read"),
        ("llama", {"rope_freqs__weight": ODD}, "embedding in a way which is not read"),
        ("llama", {"rope__scaling__type": "none", "rope__scaling__factor": 4}, None),
        ("llama", {"rope__dimension_count": 2}, r"turns 2 of the \d+ numbers of a head by their"),
        ("llama", {"expert_count": 8}, r"holds \d+ tensors that mixtral of Transformers has no pl"),
        ("glm4_moe", {"nextn_predict_layers": 4}, "4 of 4 layers are for multi-token prediction"),
        ("deepseek_v3", {"expert_gating_func": 1}, r"metadata .* not valid: .* as in no DeepSeek"),
        ("deepseek_v3", {"attention__temperature_scale": 2}, "are not valid: .* as in no DeepSeek"),
    ],
)
def test_a_model_that_is_not_read_is_refused_in_a_sentence(tmp_path, kind, metadata, sentence):
    source = build(kind, tmp_path / "source", **{**WIDE, **GRANTED.get(kind, {})})
    prefix = {"glm4_moe": "glm4moe__", "deepseek_v3": "deepseek2__"}.get(kind, f"{kind}__")
    fields = {name if "freqs" in name else prefix + name: each for name, each in metadata.items()}
    file = write(source, tmp_path / "it.gguf", kind, lambda _: Type.F32, **fields)
    if sentence is None:
        assert inspect(file)
    else:
        refused(file, sentence)


UP, NORM = b"blk.0.ffn_up.weight", b"blk.0.attn_norm.weight"


@pytest.mark.parametrize(
    ("name", "other", "kind", "sentence"),
    [
        (UP, UP, Type.I8, "tensors of type I8, which gguf does not dequantise"),
        (UP, UP, 99, r"of a type that gguf does not know .99."),
        # A Llama with biases, of which Transformers' config would say nothing.
        (NORM, b"blk.0.attn_q.bias12345", None, r"1 tensors that llama .* no place for, .*q\.bias"),
    ],
)
def test_tensor_of_an_unknown_type_or_name_is_refused(files, tmp_path, name, other, kind, sentence):
    """Which is edited in the header."""
    data = bytearray(files("llama", Type.Q8_0).read_bytes())
    at = data.index(name)
    data[at : at + len(name)] = other
    if kind is not None:
        at += len(name) + 4 + 2 * 8
        assert data[at] == Type.Q8_0
        data[at] = kind
    (file := tmp_path / "wrong.gguf").write_bytes(data)
    refused(file, sentence)
