"""`pipespec compare` as a user runs it: one cluster of real processes for several policies."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from pipespec.cli.main import main
from pipespec.system.folders import resource_dir
from tools.rig import cluster

pytestmark = pytest.mark.slow
PROMPT = "Once upon a time there was a king who"
NUM_TOKENS = 12
PLAIN, WIDE = "policy=root", "policy=level policy.width=4 policy.children=2"
SETTINGS = ("cluster.stages=2", "cluster.devices=[cpu]", "decode.ignore_eos=true")


def test_every_way_gives_the_text_of_the_target_and_is_measured_by_itself(
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = resource_dir("demo") / "target"
    prompt = AutoTokenizer.from_pretrained(folder).encode(PROMPT)
    (expected,) = cluster.reference(folder, [prompt], NUM_TOKENS)
    policies = [PLAIN, WIDE.replace(" ", ","), "policy=static_tree policy.shape=[1,2,1]"]
    length = f"decode.max_new_tokens={NUM_TOKENS}"
    assert main(["compare", *policies, "--json", "--prompt", PROMPT, *SETTINGS, length]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["equal"] is True
    assert (told["emulated"], told["synthetic"], told["lossy"]) == (False, False, False)
    assert [policy["policy"] for policy in told["policies"]] == [PLAIN, WIDE, policies[2]]
    for policy in told["policies"]:
        (answer,) = policy["answers"]
        assert answer["token_ids"] == expected
        assert (policy["tokens"], policy["differing_answers"]) == (NUM_TOKENS, 0)
    plain, wide, tree = told["policies"]
    assert plain["speed_up"] == 1
    assert plain["tokens_per_step"] == pytest.approx(1 / 2)
    assert plain["rows_per_step"] == pytest.approx(1 / 2)
    for policy in (wide, tree):
        assert policy["tokens_per_step"] > 1 / 2
        assert policy["rows_per_step"] > 1
    assert wide["rows_per_step"] <= 4
