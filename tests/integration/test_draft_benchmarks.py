"""The benchmarks about drafts, each as a small run: nothing else decodes with their settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.docs.stored_results import ROOT

# Beside the module, the numbers that a row of its result has.
BENCHMARKS = {
    "accuracy_curves": "top_1",
    "json_schemas": "best_first",
    "parallel_draft": "tokens_per_step",
    "repeating_texts": "suffix_tokens_per_step",
    "shared_noise_gain": "best_first",
    "stated_probabilities": "tokens_per_step",
}
# Of the plain pipeline of eight stages.
PLAIN = 0.125


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_about_drafts_runs(name: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", f"benchmarks.drafts.{name}", "--quick", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [row[BENCHMARKS[name]] for row in json.loads(file.read_text())["rows"]]
    # Speculation happens: without it all counts would be those of the plain pipeline.
    assert found and max(found) > 2 * PLAIN
