"""With draft heads, which read hidden states of the target, the text is that of Hugging Face."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipespec.cluster.deployment.checks import require_fit
from pipespec.cluster.weights.plan import parts_of_rank
from pipespec.config.compose import compose
from pipespec.engine.checkpoint.partial_checkpoint import missing
from pipespec.engine.slice.head_slice import load_head
from pipespec.errors import ConfigError, ModelError
from tests.helpers import heads, models
from tests.helpers.matrix import some_of
from tests.helpers.proposers import POLICIES
from tools.rig import cluster

NUM_TOKENS = 24
# The second repeats itself, the last is a single token, which has nothing before it.
PROMPTS = [[5, 17, 3, 8, 120, 44], [7, 9, 11] * 5, [3] * 4, [9, 1, 1, 2, 50], [7]]
# A head that is followed everywhere decodes many trees.
ALWAYS = ("policy.row_cost=0.0001", "proposer.rounds=3")
MTP = ("deepseek_v3", "glm4_moe", "qwen3_next")


@pytest.fixture(scope="module")
def llama() -> Path:
    return models.shared("llama")


@pytest.fixture(scope="module")
def expected(llama) -> list[list[int]]:
    return cluster.reference(llama, PROMPTS, NUM_TOKENS)


def deployed(target: Path, *settings: str, head: Path | str = "null"):
    return cluster.make_deployment(target, head, "proposer=head", *settings)  # type: ignore[arg-type]


def decoded(deployment, redis, prompts=PROMPTS) -> list[list[int]]:
    asked = [{"prompt": tuple(prompt), "max_new_tokens": NUM_TOKENS} for prompt in prompts]
    return [tokens for tokens, *_ in cluster.decode(deployment, redis, asked)]


@pytest.mark.parametrize(("policy", "stages"), some_of(POLICIES, [1, 3], share=2))
def test_eagle3_head_gives_the_text_of_hugging_face(llama, expected, redis, policy, stages):
    """All requests at once."""
    settings = f"cluster.stages={stages}", *POLICIES[policy]
    found = decoded(deployed(llama, *settings, head=heads.shared(llama)), redis)
    assert found == expected


@pytest.mark.parametrize(("model_type", "layers"), some_of(MTP, [1, 3], share=2))
def test_mtp_layers_of_a_checkpoint_give_hugging_faces_text(redis, model_type, layers, tmp_path):
    target = heads.write_mtp(model_type, tmp_path / "target", layers)
    deployment = deployed(target, "cluster.stages=2", *ALWAYS)
    require_fit(deployment)
    assert deployment.draft is not None and deployment.draft.path == target
    expected = cluster.reference(target, PROMPTS[:3], NUM_TOKENS)
    assert decoded(deployment, redis, PROMPTS[:3]) == expected


def test_one_batch_at_a_time_is_in_the_pipeline_and_trees_are_computed(llama, expected, redis):
    """In a pipeline of three stages a step is a whole pass, so a plain text takes a step a token,
    and every accepted draft token saves one."""
    deployment = deployed(llama, "cluster.stages=3", *ALWAYS, head=heads.shared(llama))
    asked = [{"prompt": tuple(PROMPTS[0]), "max_new_tokens": NUM_TOKENS}]
    ((tokens, _, stats),) = cluster.decode(deployment, redis, asked)
    assert tokens == expected[0]
    assert stats["rows_per_step"] > 4 and stats["draft_rounds_per_step"] > 2
    assert stats["steps"] <= NUM_TOKENS + 3
    assert 0 < stats["features_ms_per_step"] < stats["step_ms"]


def test_head_that_knows_the_text_decodes_several_tokens_a_pass(tmp_path, redis):
    """A target whose next token depends on the last one alone, and a head that knows it: its fused
    features are nothing, its layer adds nothing, and its output head has learnt the pairs."""
    target, head = heads.write_follower(tmp_path)
    deployment = deployed(target, *ALWAYS, "policy.children=1", head=head)
    ((tokens, _, stats),) = cluster.decode(
        deployment, redis, [{"prompt": (3, 9), "max_new_tokens": NUM_TOKENS}]
    )
    assert tokens == cluster.reference(target, [[3, 9]], NUM_TOKENS)[0]
    assert stats["tokens_per_step"] > 3


def test_texts_that_share_a_prefix_are_those_of_hugging_face(llama, redis):
    """One after another, so that the later ones find the text of the first in the cache: of a whole
    prompt, of a part, and of an answer."""
    long = [*range(3, 51)]
    (first,) = cluster.reference(llama, [long], NUM_TOKENS)
    prompts = [long, long, [*long[:40], 1, 2, 3], [*long, *first, 4]]
    deployment = deployed(llama, *ALWAYS, "scheduler.max_num_seqs=1", head=heads.shared(llama))
    asked = [{"prompt": tuple(prompt), "max_new_tokens": NUM_TOKENS} for prompt in prompts]
    found = cluster.decode(deployment, redis, asked)
    assert [tokens for tokens, *_ in found] == cluster.reference(llama, prompts, NUM_TOKENS)
    assert all(stats["cached_tokens"] for _, _, stats in found[1:])


def test_host_of_the_head_needs_the_targets_embedding_too(llama, tmp_path):
    deployment = deployed(llama, "cluster.stages=2", head=heads.shared(llama))
    needed = parts_of_rank(deployment, 0)
    assert needed["target"] == {"embedding"} and not missing(deployment.draft.path, needed["draft"])
    whole = heads.write_eagle3(tmp_path / "whole", llama, draft_vocab_size=None)
    assert parts_of_rank(deployed(llama, head=whole), 0)["target"] == {"embedding", "head"}
    mtp = heads.write_mtp("deepseek_v3", tmp_path / "mtp")
    assert {"4", "embedding", "head"} == parts_of_rank(deployed(mtp), 0)["draft"]
    two = heads.write_mtp("glm4_moe", tmp_path / "two", layers=2)
    assert {"4", "5", "embedding", "head"} == parts_of_rank(deployed(two), 0)["draft"]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "a DFlash head: it proposes a whole block"),
        ({"dflash_config": {}}, "a DFlash head"),
        ({"architectures": ["DSparkForCausalLM"]}, "a DSpark head: it proposes a whole block"),
        ({"medusa_num_heads": 5}, "Medusa heads: each proposes a position without"),
        ({"pard_token": 3}, "a P-EAGLE head"),
        ({"speculators_model_type": "eagle3"}, "format of speculators: name the EAGLE-3 folder"),
        ({"architectures": ["DeepSeekMTPModel"]}, "MTP layers in a folder of their own"),
        ({"norm_before_residual": True}, "norm_before_residual=True, which is not computed"),
        ({"num_hidden_layers": 2}, "2 layers of llama, but heads of one layer"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 9, 3]}}, "must name layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3]}}, "for another target"),
        ({"hidden_size": 0}, "hidden_size is 0"),
    ],
)
def test_other_heads_are_refused_by_name(llama, tmp_path, config, why):
    head = heads.write_eagle3(tmp_path / "head", llama, **config)
    with pytest.raises(ModelError) as caught:
        deployed(llama, head=head)
    assert why in str(caught.value) and "\n" not in str(caught.value)


def changed(head: Path, drop: str | None = None, rename: tuple[str, str] | None = None) -> None:
    tensors = load_file(file := head / "model.safetensors")
    if drop is not None:
        del tensors[drop]
    if rename is not None:
        tensors = {name.replace(*rename): each for name, each in tensors.items()}
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rename": ("midlayer.", "layers.0.")}, "an EAGLE or EAGLE-2 head"),
        ({"rename": ("fc.", "gc.")}, "a model, or a head of another kind"),
        ({"drop": "d2t"}, "holds no d2t, but proposes 61 tokens"),
        ({"drop": "midlayer.mlp.up_proj.weight"}, "1 missing tensors"),
    ],
)
def test_heads_without_their_tensors_are_refused(llama, tmp_path, change, why):
    head = Path(shutil.copytree(heads.shared(llama), tmp_path / "head"))
    changed(head, **change)
    with pytest.raises(ModelError, match=why):
        require_fit(deployed(llama, head=head))


def test_head_whose_tokens_are_none_of_the_target_is_refused(llama, tmp_path):
    head = Path(shutil.copytree(heads.shared(llama), tmp_path / "head"))
    tensors = load_file(head / "model.safetensors")
    tensors["d2t"][-1] += models.VOCAB_SIZE
    save_file(tensors, head / "model.safetensors")
    info = deployed(llama, head=head).draft
    assert info is not None and info.head is not None
    with pytest.raises(ModelError, match="d2t must name rising tokens of the target; fetch"):
        load_head(head, info.head, llama, dtype=torch.float32, num_slots=8)


def test_head_takes_no_quantisation_and_one_device(llama):
    with pytest.raises(ConfigError, match="not for draft heads; leave it out"):
        deployed(llama, "model.draft_quantization=int8", head=heads.shared(llama))
    with pytest.raises(ConfigError, match="a draft head is computed by one"):
        deployed(llama, "cluster.draft_tensor_parallel=2", head=heads.shared(llama))


def test_head_is_refused_as_a_model_with_what_takes_it(llama):
    with pytest.raises(ModelError, match="an EAGLE-3 head is for proposer=head"):
        cluster.make_deployment(llama, heads.shared(llama))
    config = compose(["proposer=head", f"model.target={llama}"])
    assert json.dumps(config.model.draft) == "null"
