"""`pipespec bench --policies` as a user runs it: one cluster for several policies."""

import json

import pytest
from transformers import AutoTokenizer

from pipespec.cli.main import main
from pipespec.system.folders import resource_dir
from tools.rig import cluster

pytestmark = pytest.mark.slow
PROMPT = "Once upon a time there was a king who"
NUM_TOKENS = 12
PLAIN, WIDE = "root", "level policy.width=4 policy.children=2"
SETTINGS = ("cluster.stages=2", "cluster.devices=[cpu]", "decode.ignore_eos=true")


def test_every_way_gives_the_text_of_the_target_and_is_measured_by_itself(tmp_path, capfd):
    folder = resource_dir("demo") / "target"
    prompt = AutoTokenizer.from_pretrained(folder).encode(PROMPT)
    (expected,) = cluster.reference(folder, [prompt], NUM_TOKENS)
    data, output = tmp_path / "own.txt", tmp_path / "answers.json"
    data.write_text(f"{PROMPT}\n")
    named = [PLAIN, WIDE, "static_tree policy.shape=[1,2,1]"]
    asked = ["--policies", ",".join(named), "--dataset", str(data), "--output", str(output)]
    policies = [f"policy={name}" for name in named]
    length = f"decode.max_new_tokens={NUM_TOKENS}"
    assert main(["bench", *asked, "--json", *SETTINGS, length]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["equal"] is True
    assert (told["emulated"], told["synthetic"], told["lossy"]) == (False, False, False)
    assert [policy["policy"] for policy in told["policies"]] == policies
    requests = json.loads(output.read_text())["requests"]
    for policy in told["policies"]:
        (answer,) = requests[policy["policy"]]
        assert answer["token_ids"] == expected
        assert (policy["tokens"], policy["differing_answers"]) == (NUM_TOKENS, 0)
    plain, wide, tree = told["policies"]
    assert plain["speed_up"] == 1
    assert plain["tokens_per_step"] == plain["rows_per_step"] == 1
    for policy in (wide, tree):
        assert policy["tokens_per_step"] > 1 / 2
        assert policy["rows_per_step"] > 1
    assert wide["rows_per_step"] <= 4
