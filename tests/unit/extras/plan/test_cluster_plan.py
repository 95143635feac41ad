import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.cli.main import main
from pipespec.engine.formats.architectures import ARCHITECTURES
from pipespec.engine.inspection.inspection import inspect
from pipespec.errors import ConfigError, ModelError
from pipespec.extras.emulation.link import EmulatedLink
from pipespec.extras.plan.gpu_layouts import LAYER_MS, PlannedModel, clusters, round_ms
from pipespec.extras.plan.hardware import GPUS, parse_gpus
from pipespec.extras.plan.model_shape import TABLE, ModelShape, count, find, published
from pipespec.placement.measurements import STATES
from tests.helpers.few_bits import FP4S, FP8S, make
from tests.helpers.kinds import WITH_STATE, by_kind
from tests.helpers.models import NUM_LAYERS, VOCAB_SIZE, build_multimodal, shared

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"
TARGET, DRAFT = find("meta-llama/Llama-3.1-70B"), find("meta-llama/Llama-3.2-1B")
SMALL, LARGE = PlannedModel(DRAFT, "", 2048), PlannedModel(TARGET, "", 2048)
# Billions of parameters that their publishers state.
BILLIONS = {
    "meta-llama/Llama-3.1-405B": 406,
    "meta-llama/Llama-3.2-1B": 1.24,
    "mistralai/Mistral-Nemo-2407": 12.2,
    "mistralai/Mistral-Large-2407": 123,
    "mistralai/Mixtral-8x7B-v0.1": 46.7,
    "Qwen/Qwen2.5-7B": 7.61,
    "Qwen/Qwen3-32B": 32.8,
    "Qwen/Qwen3-235B-A22B": 235,
    "Qwen/Qwen3.5-27B": 27,
    "Qwen/Qwen3.5-397B-A17B": 397,
    "deepseek-ai/DeepSeek-V3": 671,
    "deepseek-ai/DeepSeek-V4-Flash": 284,
    "moonshotai/Kimi-K2-Instruct": 1026,
    "MiniMaxAI/MiniMax-M2": 229,
    "zai-org/GLM-4.5": 355,
    "zai-org/GLM-5": 744,
    "openai/gpt-oss-120b": 117,
    "google/gemma-2-27b": 27.2,
    "microsoft/phi-4": 14.7,
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": 49.1,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.6,
}
# One of each way to count: latent and unequal heads, experts alone or beside others, two attentions
# in a layer, running states.
COUNTED = (
    *("deepseek_v3", "gemma4_text", "gpt_oss", "llama", "llama4_text", "longcat_flash"),
    *("qwen2_moe", *WITH_STATE),
)
# Their layers are of several kinds, some with a running state.
MIXED = ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")


@pytest.mark.parametrize("model_type", by_kind(COUNTED))
def test_the_config_alone_gives_the_sizes_of_every_architecture(model_type):
    folder = shared(model_type)
    stored = inspect(folder)
    shape = find(str(folder))
    assert shape.num_layers == NUM_LAYERS
    layer = sum(stored.matrices.num_bytes) / 4 / NUM_LAYERS
    with_kv = sum(stored.has_kv) or NUM_LAYERS
    assert shape.layer == pytest.approx(layer, rel=0.03)
    assert (shape.kv, shape.tied) == (stored.kv_size * with_kv // NUM_LAYERS, stored.tied)
    whole = range(NUM_LAYERS)
    for states, nodes in ((0, 7), (STATES, 0)):
        kept = stored.recurrent_bytes(whole, "bfloat16", states, nodes)
        shaped = NUM_LAYERS * (states * shape.state + nodes * shape.node)
        assert shaped == pytest.approx(kept, abs=NUM_LAYERS * (states + nodes))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma3", "llama4", "mistral3"])
def test_the_text_part_of_a_multimodal_model_is_planned(tmp_path, model_type):
    folder = build_multimodal(model_type, tmp_path / "model")
    shape, stored = find(str(folder)), inspect(folder)
    assert (shape.num_layers, shape.vocab_size) == (NUM_LAYERS, VOCAB_SIZE)
    assert shape.layer == pytest.approx(sum(stored.matrices.num_bytes) / 4 / NUM_LAYERS, rel=0.03)
    assert (shape.kv, shape.tied) == (stored.kv_size, stored.tied)


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_published_models_have_the_published_number_of_parameters(name, billions):
    assert published()[name].parameters == pytest.approx(billions * 1e9, rel=0.01)


def _by_type() -> list[object]:
    """The table's names; all but the shallowest model of each architecture are `long`."""
    configs = {name: each["config"] for name, each in json.loads(TABLE.read_text()).items()}
    deepest_first = sorted(published().values(), key=lambda shape: -shape.num_layers)
    always = {configs[shape.name]["model_type"]: shape.name for shape in deepest_first}.values()
    return [
        name if name in always else pytest.param(name, marks=pytest.mark.long) for name in configs
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", _by_type())
def test_shapes_of_the_table_are_what_transformers_makes_of_its_configs(name):
    """`count` of a config is what an entry must hold."""
    shape, raw = published()[name], json.loads(TABLE.read_text())[name]["config"]
    assert replace(count(name, raw), undecoded=shape.undecoded) == shape
    decoded = raw["model_type"] in ARCHITECTURES and not name.startswith("moonshotai/Kimi-K2")
    assert bool(shape.undecoded) != decoded


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", ["Q4_0", "Q6_K", *FP4S, *FP8S[:2], "awq", "gptq symmetric", "gptq 8 bits", "compressed"]
)
def test_weights_of_few_bits_count_as_they_are_held_on_a_gpu(form, tmp_path):
    path = make(tmp_path, form, "llama", hidden_size=256, intermediate_size=512)
    info = inspect(path)
    layers = info.loaded("bfloat16", info.weight_format(None, "auto", "bfloat16")).layers
    shape = find(str(path))
    assert shape.layer_bytes("") == pytest.approx(sum(layers) / len(layers), rel=0.03)
    if path.is_dir():  # config.json alone says about the same
        alone = ModelShape.from_config(form, json.loads((path / "config.json").read_text()))
        assert alone.layer_bytes("") == pytest.approx(shape.layer_bytes(""), rel=0.2)


def test_of_gpt_oss_the_experts_alone_are_in_four_bits():
    """65.25 GB are published."""
    shape = published()["openai/gpt-oss-120b"]
    assert (shape.dense_weights.held, shape.expert_weights.held) == (2.0, 17 / 32)
    assert shape.num_bytes("") == pytest.approx(65.25e9, rel=0.01)


@pytest.mark.parametrize(
    ("tuned", "base"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-70B"),
        ("mirror/llama-3.1-70b", "meta-llama/Llama-3.1-70B"),
        ("meta-llama/Llama-2-70b-chat", "meta-llama/Llama-2-70b-hf"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistralai/Mistral-Nemo-2407"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistralai/Mistral-Small-24B-2501"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "Qwen/Qwen3-30B-A3B"),
        ("google/gemma-2-9b-it", "google/gemma-2-9b"),
        ("moonshotai/Kimi-Linear-48B-A3B-Base", "moonshotai/Kimi-Linear-48B-A3B-Instruct"),
        ("moonshotai/Kimi-K2-Instruct-0905", "moonshotai/Kimi-K2-Instruct"),
        ("moonshotai/Kimi-K2-Thinking", "moonshotai/Kimi-K2-Thinking"),
    ],
)
def test_names_of_tuned_versions_are_known(tuned, base):
    assert find(tuned) == published()[base]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": None}, "some is not valid: .*'hidden_size'"),
        ({"num_attention_heads": "8"}, "some is not valid: .*'num_attention_heads'"),
        ({"model_type": "unknown"}, "not supported"),
        ({"quantization_config": {"quant_method": "quip"}}, "quantised by 'quip'"),
    ],
)
def test_a_config_that_is_not_valid_is_refused(changes, reason):
    raw = json.loads(TABLE.read_text())["Qwen/Qwen3-8B"]["config"] | changes
    with pytest.raises(ModelError, match=reason):
        ModelShape.from_config("some", raw)


def test_ten_layers_of_a_70b_take_what_vllm_takes_on_that_gpu_and_a_layer_its_launches():
    """181.41 ms over eight stages (SpecPipe, section 4)."""
    gpus = [GPUS["rtx3090"]] * 8
    found, *_ = clusters(PlannedModel(TARGET, "bfloat16", 2048), None, gpus, None)
    assert [stage.layers for stage in found.stages[:-1]].count(10) >= 5
    assert found.machine.plain_tbt_ms == pytest.approx(181.4 + 80 * LAYER_MS, rel=0.03)


def test_stages_and_drafts_take_about_what_they_took_on_an_h200():
    """With CUDA graphs, behind 2048 tokens (docs/gpus.md)."""
    stored = json.loads((RESULTS / "stage_h200.json").read_text())
    h200 = GPUS["h200"]
    shapes = {"llama-1b": DRAFT, "llama-8b": find("meta-llama/Llama-3.1-8B")}
    found, *_ = clusters(PlannedModel(TARGET, "bfloat16", 2048), None, [h200] * 8, None)
    of_ten = next(stage for stage in found.stages if stage.layers == 10)
    for cell in stored["steps"]:
        if cell["context"] == 2048:
            took = cell["ms"]["step"]["median"]
            assert of_ten.times.ms(cell["rows"]) == pytest.approx(took, rel=0.1)
    for cell in stored["drafts"]:
        if cell["rows"] == 16:
            took = cell["ms"]["round"]["median"]
            assert round_ms(PlannedModel(shapes[cell["shape"]], "", 0), h200) == pytest.approx(
                took, rel=0.1
            )


names = st.sampled_from(sorted(GPUS))


@given(gpus=st.lists(names, min_size=2, max_size=12), weights=st.sampled_from(["int4", "bfloat16"]))
def test_layers_fit_and_no_other_split_of_them_is_faster(gpus, weights):
    chosen = [GPUS[name] for name in gpus]
    try:
        found, *_ = clusters(PlannedModel(TARGET, weights, 4096), None, chosen, None)
    except ConfigError:  # it does not fit
        return
    stages = found.stages
    assert sum(stage.layers for stage in stages) == TARGET.num_layers
    per_layer = TARGET.layer_bytes(weights) + TARGET.kv_bytes(4096)
    slowest = max(stages, key=lambda stage: stage.times.ms(16))
    for stage in stages:
        assert stage.layers >= 1
        assert stage.weight_bytes + stage.kv_bytes <= stage.gpu.usable_bytes
        has_room = stage.weight_bytes + stage.kv_bytes + per_layer <= stage.gpu.usable_bytes
        if has_room and slowest.layers > 1:
            one_more = stage.times.ms(16) * (stage.layers + 1) / stage.layers
            assert one_more >= slowest.times.ms(16) * 0.999


def test_stages_have_room_for_running_states_and_their_nodes():
    """A node takes 72 KiB in each of Kimi's 20 layers with a state, a state 2120 KiB."""
    target = find("moonshotai/Kimi-Linear-48B-A3B-Instruct")
    gpus = [GPUS["a100-80gb"]] * 3
    found, *_ = clusters(PlannedModel(target, "bfloat16", 2048, 100), None, gpus, None)
    kept = sum(stage.state_bytes for stage in found.stages)
    assert kept == pytest.approx(20 * (100 * 72 + STATES * 2120) * 1024, rel=0.01)


def test_a_hop_has_the_latency_and_the_bytes_of_the_rows():
    link = EmulatedLink(latency_ms=0.1, gbit_per_s=1.0)
    gpus = [GPUS["a100-80gb"]] * 3
    found, *_ = clusters(PlannedModel(TARGET, "bfloat16", 2048), SMALL, gpus, link)
    assert found.machine.hop.ms(1) == pytest.approx(0.1 + 0.131, abs=0.001)
    assert found.machine.hop.ms(64) == pytest.approx(0.1 + 8.389, abs=0.001)


def test_the_draft_gets_each_kind_of_gpu_in_turn():
    gpus = [GPUS["h100"], GPUS["a100-80gb"], GPUS["h100"], GPUS["l4"]]
    found = clusters(PlannedModel(TARGET, "bfloat16", 2048), SMALL, gpus, None)
    on_all = [each for each in found if len(each.stages) == 3]
    assert [each.draft.name for each in on_all if each.draft] == ["h100", "a100-80gb", "l4"]


def test_fewer_gpus_are_the_fastest_of_them_or_the_largest():
    gpus = [GPUS[name] for name in ("l40", "rtx4090", "rtx5090", "rtx4090")]
    found = clusters(PlannedModel(TARGET, "int4", 8192), None, gpus, None)
    assert [[gpu.name for gpu in each.gpus] for each in found] == [
        ["l40", "rtx4090", "rtx5090", "rtx4090"],
        ["rtx4090", "rtx5090", "rtx4090"],
        ["rtx4090", "rtx5090"],
        ["l40"],  # no other has room for all layers
    ]


@pytest.mark.parametrize(
    ("gpus", "context", "draft", "advice"),
    [
        ("rtx3090:4", 8192, SMALL, "is room for 66.2 GiB on 3 GPUs beside the draft's: 67.7 GiB "),
        ("rtx3090:4", 8192, SMALL, "missing; --weights int4 or 4 more rtx3090 would fit."),
        ("h100:1", 8192, SMALL, "1B needs a GPU of its own with room for 2.4 GiB, beside those of"),
        ("rtx3060:4", 8192, LARGE, "70B needs a GPU of its own with room for 132.0 GiB, beside"),
        ("rtx3060:2", 8192, None, "missing; 12 more rtx3060 would fit."),
        ("h100:2", 2**17, None, "missing; --context 51727 or --weights int8 or 1 more h100 would"),
        ("h200:2", 8192, SMALL, "missing; --weights int8 or proposer=suffix instead of the draft"),
        ("rtx3060:1", 8192, None, "missing; more or larger GPUs are needed."),
    ],
)
def test_what_does_not_fit_is_said_with_the_remedies_that_help(gpus, context, draft, advice):
    shape = TARGET if gpus != "rtx3060:1" else find("meta-llama/Llama-3.1-405B")
    with pytest.raises(ConfigError) as refused:
        clusters(PlannedModel(shape, "", context), draft, parse_gpus([gpus]), None)
    assert advice in str(refused.value)


ASKED = ["plan", "model.target=meta-llama/Llama-3.1-70B", "model.draft=meta-llama/Llama-3.2-1B"]


@pytest.mark.slow
def test_the_command_predicts_a_range_and_names_the_layers(capsys):
    options = ["--gpus", "rtx3090:8,l40", "--link", "10gbe", "--tokens", "30"]
    assert main([*ASKED, *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(stage["layers"] for stage in found["stages"]) == 80
    times = [each["tbt_ms"] for each in found["by_accuracy"]]
    assert times == sorted(times, reverse=True) and len(times) == 3
    assert times[0] < found["plain_tbt_ms"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("link", "draft", "left_out"),
    [
        # Every hop takes as long as many layers, so each stage more costs time.
        ("wan", ASKED[2:], {"rtx3090": 5}),
        ("wan", [], {"rtx3090": 6}),
        # Stages without hops work at the same time, but the last four save less than 5 %.
        (None, ASKED[2:], {"rtx3090": 4}),
        # Without draft tokens they wait for each other.
        (None, [], {"rtx3090": 6}),
    ],
)
def test_the_command_leaves_out_gpus_that_make_a_token_take_longer(link, draft, left_out, capsys):
    asked = [*ASKED[:2], *draft, "--gpus", "rtx3090:8", "--weights", "int4", "--tokens", "60"]
    asked += ["--link", link] if link else []
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["left_out"] == left_out
    assert len(found["stages"]) == 8 - bool(draft) - sum(left_out.values())


@pytest.mark.slow
def test_stages_whose_step_holds_one_draft_round_and_a_part_are_planned_with_two(capsys):
    asked = ["plan", "model.target=Qwen3-32B", "model.draft=Qwen3-0.6B", "--weights", "int4"]
    assert main([*asked, "--gpus", "rtx3090:4", "--tokens", "200", "--json"]) == 0
    found: dict[str, list] = {}
    for each in json.loads(capsys.readouterr().out)["predictions"]:
        found.setdefault(each["layout"], []).append(each)  # the fastest first
    one, two, three = (found[f"rtx3090 + {n} x rtx3090"][0] for n in (1, 2, 3))
    assert three["rounds"] == 2
    assert three["tbt_ms"] < one["tbt_ms"] and two["tbt_ms"] < one["tbt_ms"]


@pytest.mark.slow
def test_where_no_draft_pays_none_is_planned_and_the_fastest_gpu_holds_the_target(capsys):
    asked = ["plan", "model.target=Qwen3-4B", "model.draft=Qwen3-0.6B", "curve=1:0.05"]
    assert main([*asked, "--tokens", "30", "--gpus", "rtx3090,rtx4090", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommended"] is None and found["draft_gpu"] is None
    assert [stage["gpu"] for stage in found["stages"]] == ["rtx4090"]
    assert main([*asked, "--tokens", "30", "--gpus", "rtx3090,rtx4090"]) == 0
    said = capsys.readouterr().out
    assert "Use 1 GPU; the others (1 x rtx3090)" in said and "Draft tokens may help" not in said


def test_the_command_plans_layers_with_running_states(capsys):
    kimi, nemotron = MIXED
    asked = ["plan", f"model.target={kimi}", f"model.draft={nemotron}", "--gpus", "a100-80gb:4"]
    assert main([*asked, "--tokens", "30", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(stage["layers"] for stage in found["stages"]) == found["target"]["num_layers"]
    assert all(stage["state_bytes"] > 0 for stage in found["stages"])
    assert main([*asked, "--tokens", "30"]) == 0
    assert "KV and running states" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([*ASKED[:2], "--gpus", "h100:3"], "give model.draft=meta-llama/Llama-3.2-1B or proposer="),
        ([*ASKED[:2], "--gpus", "rtx3090:8", "--weights", "int4"], "(6 x rtx3090) add nothing: "),
        ([*ASKED[:2], "--gpus", "h100:2"], "Draft tokens may help: give proposer=suffix, which"),
        ([*ASKED[:2], "--gpus", "h100:3", "proposer=suffix"], " proposer=suffix policy=best_first"),
        (
            ["plan", "stages=2", "proposer=suffix", "policy=level"],
            "d: proposer=suffix policy=level",
        ),
        ([*ASKED, "--gpus", "h100:4", "curve=1:0.7,8:0.95"], "whose first choice is right for 70%"),
        (
            [*ASKED, "--gpus", "rtx3090:3,h100", "--weights", "int4"],
            "over plain pipeline parallelism (policy=root) in the same layout, in the rec",
        ),
        ([*ASKED, "--gpus", "h100:4"], "Rank 0: the draft on h100, 2.30 GiB, 4."),
        ([*ASKED, "--gpus", "h100:4", "--draft-weights", "int8"], "draft on h100, 1.42 GiB, 4."),
        (["plan", "model.target=a/DeepSeek-V4-Flash", "--gpus", "h200:2"], "pipespec does not dec"),
    ],
)
def test_the_command_says_of_drafts_and_models(asked, expected, capsys):
    assert main([*asked, "--tokens", "30"]) == 0
    assert expected in capsys.readouterr().out


def test_known_models_are_listed_within_80_columns(capsys):
    assert main(["plan", "--models"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in published())
    assert max(map(len, said.partition("\nWeights are")[0].splitlines())) <= 80
    assert main(["plan", "--models", "--gpus", "rtx3090", "--weights", "int4", "--json"]) == 0
    fitting = [each["name"] for each in json.loads(capsys.readouterr().out)]
    assert "Qwen/Qwen3-32B" in fitting and "Qwen/Qwen2.5-72B" not in fitting


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([*ASKED, "--gpus", "rtx309"], "did you mean rtx3090"),
        ([*ASKED, "--gpus", "rtx3090:0"], "no number of GPUs"),
        ([*ASKED, "--gpus", "rtx3090:65"], "too many"),
        ([*ASKED, "--gpus", "h100:2", "--weights", "int3"], "--weights is 'int3'"),
        ([*ASKED, "--gpus", "h100:2", "--link", "2gbe"], "emulate_link"),
        ([*ASKED, "--gpus", "h100:2", "--context", "0"], "context is 0"),
        ([*ASKED, "spread=0.5", "--gpus", "h100:2"], "give curve too"),
        ([*ASKED, "--gpus", "h100:2", "--profile", "f"], "are different plans"),
        ([*ASKED, "--gpus", "h100:2", "hosts.yaml"], "--gpus is of no plan with a hosts file"),
        (["plan", "--drafts", "stages=2"], "`pipespec plan --drafts` needs model.target"),
        (["plan", "--groups"], "for the devices of a hosts file"),
        (["plan", "--models", "stages=2"], "takes no settings"),
        ([*ASKED, "stage_ms=1", "--gpus", "h100:2"], "takes no setting 'stage_ms=1'"),
        ([*ASKED, "policy=root", "--gpus", "h100:2"], "takes no setting 'policy=root'"),
        (["plan", "--gpus", "h100:2"], "needs model.target, a folder or a hub id; --models lists"),
        ([*ASKED, "--gpus", "h100:2", "--draft-weights", "x"], "--draft-weights is 'x'"),
        ([*ASKED, "--gpus", "h100:2", "proposer=suffix"], "leave model.draft out"),
        ([*ASKED[:2], "--gpus", "h100:2", "proposer=sufix"], "proposer is 'sufix'; did you mean"),
        (["plan", "model.target=/no/such", "--gpus", "h100:2"], "there is no model /no/such"),
        (ASKED, "give --gpus too"),
        (["plan", "--link", "1gbe"], "give --gpus too"),
        (["plan", "--weights", "bfloat16", "stages=4"], "--weights is of a cluster"),
    ],
)
def test_wrong_input_is_one_sentence(arguments, reason, capsys):
    assert main(arguments) != 0
    said = capsys.readouterr().err.strip()
    assert reason in said and "\n" not in said
