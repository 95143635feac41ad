"""`pipespec bench` as a user runs it: one cluster of real processes for many prompts.

`tests/integration/test_up.py` tests it with a cluster that is up already.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipespec.cli.main import main
from pipespec.config.compose import compose
from pipespec.instruments.bench.dataset import load
from pipespec.instruments.bench.measurement import bench
from pipespec.instruments.bench.reference import TRUTH_MARGIN, record_reference
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


@pytest.mark.long  # test_profile.py benches an emulated machine in every run
def test_emulated_bench_is_labelled_and_reports_times_of_the_emulated_machine(
    data: Path, expected: dict[str, tuple[list[int], list[int]]]
) -> None:
    pace = ["policy=root", "emulate=fixed", "emulate.stage_ms=20", "emulate.scale=2"]
    settings = [text for text in SETTINGS if not text.startswith("policy.")]
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

    monkeypatch.setattr(pipespec.cluster.session.WorkerGroup, "start_workers", no_rank)

    def run(*arguments: str) -> str:
        code = main(["bench", *arguments])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert err.startswith("pipespec: ")
        assert err.count("\n") == 1
        return err

    return run


def test_bench_names_the_line_of_a_bad_data_set(refuse, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"id": "a", "benchmark": "b", "prompt": "Why?"}\n{"id": "c"}\n')
    assert f"{file}, line 2 has no 'benchmark'" in refuse(f"dataset={file}")


def test_bench_names_a_prompt_that_does_not_fit_and_the_remedy(refuse, data: Path) -> None:
    err = refuse(f"dataset={data}", "model.context=9")
    assert "'sums/0' has" in err
    assert "the context holds 9" in err
    assert "prompt_tokens=N" in err
