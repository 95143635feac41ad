"""`pipespec bench` as a user runs it: one cluster of real processes for many prompts.

`tests/integration/test_up.py` has what it says of a cluster that is up already.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipespec.cli.main import main
from pipespec.client.bench import bench
from pipespec.client.dataset import load
from pipespec.client.truth import TRUTH_MARGIN, record_truth
from pipespec.config.compose import compose
from pipespec.system.resources import resource_dir
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
    "feed.width=4",
    "feed.children=4",
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
    """The cut prompt of every sample and what the target says after it, by Hugging Face."""
    folder = resource_dir("demo") / "target"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples = load(data)
    prompts = [tokenizer.encode(sample.prompt)[:CUT] for sample in samples]
    answers = cluster.reference(folder, prompts, NUM_TOKENS)
    told = zip(samples, prompts, answers, strict=True)
    return {sample.id: (prompt, answer) for sample, prompt, answer in told}


def test_what_the_target_says_is_recorded_for_the_synthetic_draft_and_labelled(
    data: Path,
    expected: dict[str, tuple[list[int], list[int]]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    truth = tmp_path / "truth.jsonl"
    guess = ["source=synthetic", f"source.truth={truth}", "source.curve=['1:1.0']"]
    record_truth(load(data), truth, *SETTINGS, *guess, prompt_tokens=CUT)
    texts = [json.loads(line) for line in truth.read_text().splitlines()]
    assert len(texts) == 4
    for prompt, answer in expected.values():
        (text,) = (text for text in texts if text[: len(prompt) + NUM_TOKENS] == prompt + answer)
        assert len(text) == len(prompt) + NUM_TOKENS + TRUTH_MARGIN
    capfd.readouterr()
    own = ["--dataset", str(data), "--prompt-tokens", str(CUT), "--num-prompts", "2"]
    assert main(["bench", *own, *SETTINGS, *guess]) == 0
    out, _ = capfd.readouterr()
    assert "2 requests, 1 at once, 16 tokens" in out
    assert out.count("SYNTHETIC") == 4
    assert "EMULATED" not in out
    assert "LOSSY" not in out


def test_under_a_pace_times_are_labelled_and_in_the_time_of_the_emulated_machine(
    data: Path, expected: dict[str, tuple[list[int], list[int]]]
) -> None:
    pace = ["feed=root", "pace=fixed", "pace.stage_ms=20", "pace.scale=2"]
    settings = [text for text in SETTINGS if not text.startswith("feed.")]
    result = bench(compose([*settings, *pace]), load(data, 1), prompt_tokens=CUT)
    assert result.labels["emulated"] is True
    (request,) = result.requests
    assert request.token_ids == expected[request.id][1]
    # Two stages of 20 ms each; in real time a token takes twice as long.
    assert result.summary()["mean_tbt_ms"] >= 40
    assert request.stats["tbt_ms"]["mean"] == pytest.approx(result.summary()["mean_tbt_ms"])
    assert result.duration_s * 1e3 >= request.token_ms[-1]


# --- refused before any rank starts -------------------------------------------------------------


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run the command in this process; it must end with code 2 and one sentence."""
    import pipespec.cluster.session

    def no_rank(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(pipespec.cluster.session.Cluster, "run", no_rank)

    def run(*arguments: str) -> str:
        code = main(["bench", *arguments])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert err.startswith("pipespec: ")
        assert err.count("\n") == 1
        return err

    return run


def test_a_bad_data_set_is_refused_with_its_line(refuse, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"id": "a", "benchmark": "b", "prompt": "Why?"}\n{"id": "c"}\n')
    assert f"{file}, line 2 has no 'benchmark'" in refuse(f"dataset={file}")


def test_a_prompt_that_does_not_fit_is_named_with_the_remedy(refuse, data: Path) -> None:
    err = refuse(f"dataset={data}", "model.context=9")
    assert "'sums/0' has" in err
    assert "the context holds 9" in err
    assert "prompt_tokens=N" in err
