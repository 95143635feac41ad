"""A draft with another vocabulary than the target's, as a user names it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipespec.client.model_info import ModelInfo
from pipespec.cluster.decide import decide
from pipespec.config.compose import compose
from pipespec.core import SamplingParams
from pipespec.errors import ModelError
from pipespec.extras.bench.figures import RequestResult
from pipespec.extras.bench.profiling import read_answers
from pipespec.system.folders import resource_dir
from tools.rig import cluster

pytestmark = pytest.mark.slow
EMBEDDING = "model.embed_tokens.weight"
PROMPT = "Once upon a time there was a king who had three sons and"


@pytest.fixture(scope="module")
def renamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo draft with its tokens in another order, of which some have other texts."""
    folder = tmp_path_factory.mktemp("renamed") / "draft"
    shutil.copytree(resource_dir("demo") / "draft", folder)
    tensors = load_file(folder / "model.safetensors")
    vocab_size = len(tensors[EMBEDDING])
    ids = np.random.default_rng(0).permutation(vocab_size)
    tensors[EMBEDDING][torch.from_numpy(ids)] = tensors[EMBEDDING].clone()
    save_file(tensors, folder / "model.safetensors")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = {text: int(ids[token]) for text, token in tokenizer["model"]["vocab"].items()}
    lacked = set(list(vocabulary)[1000::8])
    tokenizer["model"]["vocab"] = {
        f"{text}{text}{text}" if text in lacked else text: token
        for text, token in vocabulary.items()
    }
    tokenizer["model"]["merges"] = [
        pair for pair in tokenizer["model"]["merges"] if not lacked & {*pair, "".join(pair)}
    ]
    for added in tokenizer["added_tokens"]:
        added["id"] = int(ids[added["id"]])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        settings["eos_token_id"] = int(ids[settings["eos_token_id"]])
        (folder / name).write_text(json.dumps(settings))
    return folder


def test_its_draft_tokens_are_accepted_and_the_text_is_the_target_s(renamed, redis, caplog):
    texts = []
    for draft, policy in ((renamed, "level"), (resource_dir("demo") / "draft", "root")):
        settings = "cluster.stages=2", f"policy={policy}"
        deployment = cluster.make_deployment(resource_dir("demo") / "target", draft, *settings)
        asked = {"prompt": ModelInfo.of(deployment).encode(PROMPT), "max_new_tokens": 40}
        drawn = {"sampling": SamplingParams(temperature=0.7, seed=3)}
        answers = cluster.decode(deployment, redis, [asked, asked | drawn])
        texts.append([tokens for tokens, *_ in answers])
        *_, stats = answers[0]
        assert (stats["hit_rate"] > 0.6) == (policy == "level")
    assert texts[0] == texts[1]
    assert "94 % of its tokens are the target's too" in caplog.text


def test_a_profile_has_its_accuracy_for_the_target_s_tokens(renamed):
    """As the demo draft's own where it has the tokens, and missed where it has not."""
    target = resource_dir("demo") / "target"
    ids = ModelInfo.of(decide(compose([f"model.target={target}"]))).encode(PROMPT)
    told = RequestResult("r", "b", ids[:4], ids[4:], "", "length", 0.0, [], {})
    ranks = []
    for draft in (renamed, resource_dir("demo") / "draft"):
        deployment = decide(compose([f"model.target={target}", f"model.draft={draft}"]))
        ranks.append(np.array(read_answers(deployment, [told], 64).texts[0].ranks))
    both = (ranks[0] > 0) & (ranks[1] > 0)
    assert both.mean() > 0.6
    assert (ranks[0] <= ranks[1])[both].mean() > 0.6, "others are not in its way"


def test_one_that_shares_hardly_a_token_is_refused(renamed, tmp_path):
    folder = tmp_path / "draft"
    shutil.copytree(renamed, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {f"{text}~{text}": id_ for text, id_ in vocabulary.items()}
    tokenizer["model"]["merges"] = tokenizer["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = [f"model.target={resource_dir('demo') / 'target'}", f"model.draft={folder}"]
    with pytest.raises(ModelError, match=r"shares only 0\.0% of its tokens with the target"):
        ModelInfo.of(decide(compose(settings)))
