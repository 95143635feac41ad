"""`pipespec bench` as a user runs it: one cluster of real processes for many prompts.

`tests/integration/test_up.py` tests it with a cluster that is up already.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipespec.cli.main import main
from pipespec.extras.bench.dataset import load
from pipespec.extras.bench.reference import TRUTH_MARGIN, record_reference
from pipespec.system.folders import resource_dir
from tools.rig import cluster

pytestmark = pytest.mark.slow
PROMPTS = {
    "tales": [
        "Once upon a time there was a king who",
        "Once upon",
        "The little girl ran out of the house and down to the river, where",
    ],
    "sums": ["Tom has three apples and buys four more. How many"],
}
NUM_TOKENS = 8
CUT = 9
SETTINGS = [
    "cluster.stages=2",
    f"decode.max_new_tokens={NUM_TOKENS}",
    "decode.ignore_eos=true",
    "policy.width=4",
    "policy.children=4",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one file per benchmark."""
    folder = tmp_path_factory.mktemp("data")
    for name, prompts in PROMPTS.items():
        lines = [
            json.dumps({"id": f"{name}/{i}", "benchmark": name, "prompt": prompt})
            for i, prompt in enumerate(prompts)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def expected(data: Path) -> dict[str, tuple[list[int], list[int]]]:
    """The cut prompt of every sample and the target's answer to it, by Hugging Face."""
    folder = resource_dir("demo") / "target"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples = load(data)
    prompts = [tokenizer.encode(sample.prompt)[:CUT] for sample in samples]
    answers = cluster.reference(folder, prompts, NUM_TOKENS)
    zipped = zip(samples, prompts, answers, strict=True)
    return {sample.id: (prompt, answer) for sample, prompt, answer in zipped}


@pytest.mark.long
def test_bench_records_the_targets_answers_for_a_synthetic_draft_and_labels_results(
    data: Path,
    expected: dict[str, tuple[list[int], list[int]]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    truth = tmp_path / "truth.jsonl"
    synthetic = ["proposer=synthetic", f"proposer.truth={truth}", "proposer.curve=['1:1.0']"]
    record_reference(load(data), truth, *SETTINGS, *synthetic, prompt_tokens=CUT)
    texts = [json.loads(line) for line in truth.read_text().splitlines()]
    assert len(texts) == 4
    for prompt, answer in expected.values():
        (text,) = (text for text in texts if text[: len(prompt) + NUM_TOKENS] == prompt + answer)
        assert len(text) == len(prompt) + NUM_TOKENS + TRUTH_MARGIN
    capfd.readouterr()
    own = ["--dataset", str(data), "--prompt-tokens", str(CUT), "--num-prompts", "2"]
    assert main(["bench", *own, *SETTINGS, *synthetic]) == 0
    out, _ = capfd.readouterr()
    assert "2 requests, 1 at once, 16 tokens" in out
    assert out.count("SYNTHETIC") == 4
    assert "EMULATED" not in out
    assert "LOSSY" not in out


def test_bench_names_a_prompt_that_does_not_fit_and_the_remedy(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--dataset", str(data), "model.context=9"]) == 2
    err = capsys.readouterr().err
    assert "'sums/0' has" in err
    assert "the context holds 9" in err
    assert "--prompt-tokens N" in err
